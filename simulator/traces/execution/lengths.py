"""Seconds of a graph's nodes: as recorded, by the roofline of a cluster's GPU, or on a cluster's idle network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from simulator.cluster import Cluster
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.hardware.gpu import GpuSpec
from simulator.hardware.kernels import MatrixDtype
from simulator.traces.classes import TRANSFER
from simulator.traces.execution.graph import EXCHANGES, GraphNode, JobGraph, NodeKind, RankGraph
from simulator.traces.execution.process_groups import GROUPS_FILE
from simulator.traces.hardware import ExchangeTimes
from simulator.traces.trace import TracedCollective

#: Type of the products of kernels whose trace does not tell it: what training computes in.
_USUAL_DTYPE = "bf16"
_MEMORY = (NodeKind.LOAD, NodeKind.STORE)


@dataclass(frozen=True)
class GraphTarget:
    """The cluster that a graph is to run on: its idle network, and its first rank's GPU."""

    exchanges: ExchangeTimes
    gpu: GpuSpec

    @classmethod
    def on(cls, reference: str | Mapping[str, Any], n_ranks: int) -> GraphTarget:
        """Return a cluster of as many nodes as hold ``n_ranks``.

        Raises `InputError` whose keys begin with ``target``.
        """
        exchanges = ExchangeTimes.on(reference, n_ranks, "target")
        (first, *_) = exchanges.cluster.gpu_types(range(n_ranks))
        return cls(exchanges, load_profile(first, key="target").gpu_spec)

    @property
    def cluster(self) -> Cluster:
        """The cluster itself."""
        return self.exchanges.cluster

    @property
    def costs(self) -> Costs:
        """The costs of its network: nothing disturbs kernels, whose lengths are known, and hosts issue for nothing."""
        return _without_launches(self.exchanges.costs.undisturbed())

    def roofline_s(self, node: GraphNode) -> float:
        """Return the seconds of a kernel: its operations at the peak, or its bytes at the memory's bandwidth."""
        peaks = self.gpu.peak_flops_per_s
        peak = peaks.get(cast(MatrixDtype, node.dtype or _USUAL_DTYPE)) or max(
            peaks.values(), key=lambda one: one.value
        )
        return max(node.flops / peak.value, node.nbytes / self.gpu.memory_bandwidth_Bps.value)


def _without_launches(costs: Costs) -> Costs:
    by_type = {gpu: _without_launches(one) for gpu, one in costs.by_type.items()}
    return replace(costs, launch={}, by_type=by_type)


@dataclass(frozen=True)
class NodeLengths:
    """Seconds of the nodes of a job on ``target``; None: as recorded."""

    job: JobGraph
    target: GraphTarget | None
    _idle_s: dict[TracedCollective, float] = field(default_factory=dict, repr=False, compare=False)

    def plays(self, node: GraphNode) -> bool:
        """Tell whether the network plays the node: on a cluster, where all who take part are in the trace."""
        if self.target is None or node.kind not in (*EXCHANGES, *_MEMORY):
            return False
        return node.kind in _MEMORY or self.is_complete(node)

    def is_complete(self, node: GraphNode) -> bool:
        """Tell whether all ranks that take part in a communication are known, and in the trace."""
        present = {rank.rank for rank in self.job.ranks}
        assert node.comm is not None
        if node.kind == NodeKind.COLLECTIVE:
            members = self.job.members(node.comm.group)
            return bool(members) and present.issuperset(members)
        return node.comm.peer in present

    def seconds(self, rank: RankGraph, node: GraphNode) -> float:
        """Return how long a node takes that the network does not play. Raises `InputError` where nothing tells.

        Without a duration, communication with ranks that have no trace takes its time on an idle network.
        """
        if node.seconds is not None:
            return node.seconds
        where = f"node {node.number} ({node.name[:60]})"
        if self.target is None:
            raise InputError("has no duration", file=rank.file, key=where, fix="--cluster, for its GPU and network")
        if node.kind not in EXCHANGES:
            return self.target.roofline_s(node)
        if not self._members(rank, node):
            fix = f"the traces of all ranks, or a {GROUPS_FILE} with its group"
            raise InputError("nothing tells which ranks take part in it", file=rank.file, key=where, fix=fix)
        return self._idle_seconds(rank, node)

    def expected_s(self, rank: RankGraph, node: GraphNode) -> float:
        """Return about how long a node takes, by which nodes of a lane are ordered: on an idle network."""
        if not self.plays(node):
            return self.seconds(rank, node)
        return (node.seconds or 0.0) if node.comm is None else self._idle_seconds(rank, node)

    def _members(self, rank: RankGraph, node: GraphNode) -> tuple[int, ...]:
        assert node.comm is not None
        is_collective = node.kind == NodeKind.COLLECTIVE
        return self.job.members(node.comm.group) if is_collective else (rank.rank, node.comm.peer)

    def _idle_seconds(self, rank: RankGraph, node: GraphNode) -> float:
        assert node.comm is not None
        assert self.target is not None
        members = self._members(rank, node)
        nbytes = self.job.message_bytes(node.comm)
        asked = TracedCollective(node.comm.operation or TRANSFER, nbytes, "", len(members), members)
        if asked not in self._idle_s:
            self._idle_s[asked] = self.target.exchanges.seconds(asked) or 0.0
        return self._idle_s[asked]
