"""Seconds that nothing can shorten: kernels at the highest clock, collectives on an idle network.

They are worked out once for all layouts that share a kernel, a part of the model, or a group.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.models import Op
from simulator.network.collectives import idle_seconds, patterns, plan, plan_of
from simulator.network.plan import Plan
from simulator.program import AllToAll, Beside, Collective, Compute, Kernel, kernels_of

#: Axis -> the group of ranks that communicate on it; axes that are left out cost nothing.
AxisGroups = Mapping[str, tuple[int, ...]]
#: Prices of parts that are kept.
_MOST_PARTS = 20_000


class RepeatedCollective(NamedTuple):
    """Collectives of one kind of one group, ``nbytes`` all together."""

    op: str
    group: tuple[int, ...]
    nbytes: float


@dataclass(frozen=True)
class LeastPrices:
    """Least seconds of work on the GPUs of a cluster.

    ``gpus``: types of GPU. ``fastest``: speed of the fastest GPU relative to its type. A kernel of a step never takes
    less than here: `Costs.kernel_s` falls as the clock rises, communication beside it and a late host only delay it.
    """

    costs: Costs
    gpus: tuple[str, ...]
    fastest: float
    cluster: Cluster
    _kernels: dict[Kernel, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _collectives: dict[tuple[Any, ...], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _links: dict[tuple[str, tuple[int, ...]], list[dict[int, float]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _ops: dict[tuple[Any, ...], tuple[object, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def on_cluster(cls, costs: Costs, cluster: Cluster, gpus: tuple[str, ...]) -> LeastPrices:
        """Return the prices on GPUs of the types ``gpus`` of ``cluster``."""
        return cls(costs, gpus, max(gpu.speed_scale for gpu in cluster.gpus), cluster)

    def kernel_s(self, kernel: Kernel) -> float:
        """Return the least seconds of a kernel on any GPU of the cluster."""
        seconds = self._kernels.get(kernel)
        if seconds is None:
            each = []
            for gpu in self.gpus:
                power = self.costs.for_gpu(gpu).power
                each.append(self.costs.kernel_s(kernel, gpu, None if power is None else power.highest_hz))
            seconds = self._kernels[kernel] = min(each) / self.fastest
        return seconds

    def collective_s(self, comm: Collective, group: Sequence[int]) -> float:
        """Return the seconds of a collective of these ranks on an idle network; 0 where its bytes are uneven."""
        if isinstance(comm, AllToAll) and (comm.send_shares or comm.receive_shares or comm.per_node):
            return 0.0
        key = comm.op, comm.algorithm, comm.nbytes, tuple(group)
        seconds = self._collectives.get(key)
        if seconds is None:
            chosen = plan(comm.op, comm.nbytes, group, self.cluster, self.costs, comm.algorithm)
            seconds = self._collectives[key] = idle_seconds(chosen, self.cluster, self.costs)
        return seconds

    def links_s(self, transfers: Sequence[RepeatedCollective]) -> float:
        """Return the seconds that the busiest link of some groups is busy at least.

        All bytes cross the links of the algorithm that carries them, be it one collective after another or several at a
        time. Of the algorithms that NCCL could take the combination counts whose busiest link has least to do.
        """
        each = [self._loads(one) for one in transfers if one.nbytes and len(one.group) > 1]
        if not each:
            return 0.0
        busiest = []
        for chosen in itertools.product(*each):
            busy: Counter[int] = Counter()
            for loads in chosen:
                busy.update(loads)
            busiest.append(max(busy.values(), default=0.0))
        return min(busiest)

    def _loads(self, transfer: RepeatedCollective) -> list[dict[int, float]]:
        """Return, by algorithm, the seconds for which each link carries a transfer."""
        op, group, nbytes = transfer
        key = op, group
        if key not in self._links:
            ways = patterns(op, group, self.cluster)
            plans = [plan_of(op, one, 1.0, self.costs) for one in ways]
            self._links[key] = [_seconds_by_link(one, self.cluster, self.costs) for one in plans]
        return [{link: nbytes * seconds for link, seconds in loads.items()} for loads in self._links[key]]

    def ops_s(self, owner: object, kind: str, ops: Sequence[Op], groups: AxisGroups) -> float:
        """Return the least seconds of operations one after another.

        The sum is remembered by their ``owner`` and ``kind``. Collectives count where their axis has a group.
        """
        key = id(owner), kind, tuple(groups.items())
        kept = self._ops.get(key)
        if kept is None:
            if len(self._ops) >= _MOST_PARTS:
                self._ops.clear()
            kept = self._ops[key] = owner, sum(self._op_s(op, groups) for op in ops)
        return kept[1]

    def _op_s(self, op: Op, groups: AxisGroups) -> float:
        computing_s = sum(self.kernel_s(compute.kernel) for compute in kernels_of(op))
        match op:
            case Compute():
                return computing_s
            case Beside():
                return max(computing_s, self._comm_s(op.comm, groups))
            case _:
                return self._comm_s(op, groups)

    def _comm_s(self, comm: Collective, groups: AxisGroups) -> float:
        group = groups.get(comm.axis)
        return 0.0 if group is None or len(group) == 1 else self.collective_s(comm, group)


def _seconds_by_link(chosen: Plan, cluster: Cluster, costs: Costs) -> dict[int, float]:
    """Return link -> seconds for which it carries the bytes of a plan at full rate."""
    busy: dict[int, float] = {}
    for phase in chosen.phases:
        for number, load in phase.loads:
            link = cluster.links[number]
            capacity_Bps = costs.reachable_Bps(link.kind, link.bandwidth_Bps)
            busy[number] = busy.get(number, 0.0) + phase.nbytes * load / capacity_Bps
    return busy


def is_uniform(spec: ClusterSpec) -> bool:
    """Return whether all nodes, links and GPUs are alike, and all GPUs of a node reach each other alike.

    Every group that sits in one node then has the same network."""
    return spec.node is not None and not spec.overrides and not spec.background and spec.node.nvlink.kind == "nvswitch"
