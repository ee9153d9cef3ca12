"""Seconds of a graph's nodes: as recorded, by the roofline of a cluster's GPU, or on a cluster's idle network."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    """The cluster that a graph is to run on: its idle network, and its ``gpus`` by type."""

    exchanges: ExchangeTimes
    gpus: Mapping[str, GpuSpec]

    @classmethod
    def on(cls, reference: str | Mapping[str, Any], n_ranks: int) -> GraphTarget:
        """Return a cluster of as many nodes as hold ``n_ranks``.

        Raises `InputError` whose keys begin with ``target``.
        """
        exchanges = ExchangeTimes.on(reference, n_ranks, "target")
        types = exchanges.cluster.gpu_types(range(n_ranks))
        return cls(exchanges, {name: load_profile(name, key="target").gpu_spec for name in types})

    @property
    def cluster(self) -> Cluster:
        """The cluster itself."""
        return self.exchanges.cluster

    @property
    def costs(self) -> Costs:
        """The costs of its network: nothing disturbs kernels, whose lengths are known, and hosts issue for nothing."""
        return _without_launches(self.exchanges.costs.undisturbed())

    def roofline_s(self, rank: int, node: GraphNode) -> float:
        """Return the seconds of a kernel: its operations at the peak, or its bytes at the memory's bandwidth."""
        gpu = self.gpus[self.cluster.gpus[rank].type]
        peak = gpu.peak_flops_per_s[self.peak_dtype(rank, node)]
        return max(node.flops / peak.value, node.nbytes / gpu.memory_bandwidth_Bps.value)

    def peak_dtype(self, rank: int, node: GraphNode) -> MatrixDtype:
        """Return the type whose peak a kernel runs at: its own, or the fastest where the rank's GPU has none of it."""
        peaks = self.gpus[self.cluster.gpus[rank].type].peak_flops_per_s
        wanted = cast(MatrixDtype, node.dtype or _USUAL_DTYPE)
        return wanted if wanted in peaks else max(peaks, key=lambda dtype: peaks[dtype].value)

    def replaced_peak(self, rank: int, node: GraphNode) -> str:
        """Return a sentence on a kernel whose type the rank's GPU has no peak of; empty where it has."""
        wanted, peak_dtype = node.dtype or _USUAL_DTYPE, self.peak_dtype(rank, node)
        gpu = self.cluster.gpus[rank].type
        return (
            ""
            if wanted == peak_dtype
            else f"{gpu} has no peak of {wanted}: such kernels run at its peak of {peak_dtype}"
        )


def _without_launches(costs: Costs) -> Costs:
    by_type = {gpu: _without_launches(one) for gpu, one in costs.by_type.items()}
    return replace(costs, launch={}, by_type=by_type)


@dataclass(frozen=True)
class NodeLengths:
    """Seconds of the nodes of a job on ``target``; None: as recorded."""

    job: JobGraph
    target: GraphTarget | None
    _idle_s: dict[Hashable, float] = field(default_factory=dict, repr=False, compare=False)
    _is_present: dict[str, bool] = field(default_factory=dict, repr=False, compare=False)

    def plays(self, node: GraphNode) -> bool:
        """Tell whether the network plays the node: on a cluster, where all who take part are in the trace."""
        if self.target is None or node.kind not in (*EXCHANGES, *_MEMORY):
            return False
        return node.kind in _MEMORY or self.is_complete(node)

    def is_complete(self, node: GraphNode) -> bool:
        """Tell whether all ranks that take part in a communication are known, and in the trace."""
        assert node.comm is not None
        if node.kind != NodeKind.COLLECTIVE:
            return node.comm.peer in self._present
        group = node.comm.group
        if group not in self._is_present:
            members = self.job.members(group)
            self._is_present[group] = bool(members) and self._present.issuperset(members)
        return self._is_present[group]

    @cached_property
    def _present(self) -> frozenset[int]:
        return frozenset(rank.rank for rank in self.job.ranks)

    def seconds(self, rank: RankGraph, node: GraphNode) -> float:
        """Return how long a node takes that the network does not play. Raises `InputError` where nothing tells.

        Without a duration, communication with ranks that have no trace takes its time on an idle network.
        """
        if node.seconds is not None:
            return node.seconds
        where = f"operation {node.number} ({node.name[:60]})"
        if self.target is None:
            raise InputError("has no duration", file=rank.file, key=where, fix="--cluster, for its GPU and network")
        if node.kind not in EXCHANGES:
            return self.target.roofline_s(rank.rank, node)
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
        comm = node.comm
        members = comm.group if node.kind == NodeKind.COLLECTIVE else (rank.rank, comm.peer)
        key = comm.operation, comm.nbytes, members
        if key not in self._idle_s:
            ranks, nbytes = self._members(rank, node), self.job.message_bytes(comm)
            asked = TracedCollective(comm.operation or TRANSFER, nbytes, "", len(ranks), ranks)
            self._idle_s[key] = self.target.exchanges.seconds(asked) or 0.0
        return self._idle_s[key]
