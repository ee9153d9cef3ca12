"""Which rank does what: Megatron's rank order and the process groups that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.config import Parallelism, Workload
from simulator.models import Seat, routing, telling_seat

Groups = Mapping[str, tuple[tuple[int, ...], ...]]
Grid = NDArray[np.int64]


class Place(NamedTuple):
    """What decides a rank's work: its place in the pipeline, and its seat on axes whose members differ."""

    pipeline_rank: int
    seat: Seat

    def __str__(self) -> str:
        apart = [f"{axis}{at}" for axis, at in self.seat._asdict().items() if at]
        return " ".join([f"stage{self.pipeline_rank}", *apart])


@dataclass(frozen=True)
class Layout:
    """The distinct ``places``, which of them each rank has (``place_of[rank]`` indexes them), and the groups of every
    axis that has more than one member.

    Axes: tp, cp, pp (ordered by pipeline rank), ``dp`` (ranks that hold the same parameters outside experts: all dp and
    cp ranks, as in Megatron-LM), ep and etp inside experts, ``edp`` (ranks that hold the same experts), ``mp`` (all
    tensor and pipeline ranks of one replica) and ``emp`` (its like for experts: pp, ep and etp), ``embd`` (the ranks of
    the first and the last stage, where each has its copy of the embedding table), ``twin`` (two pipeline ranks that
    hold the same stages) and ``rank`` (each alone, where ranks deal with hosts). Where ZeRO shards within instances
    (``hsdp``), dp and edp are split into ``dp_shard``, consecutive members, and ``dp_replica``, across these.
    ``copies0``, ``copies1`` ...: ranks of an ep group that hold copies of the same experts.
    """

    places: tuple[Place, ...]
    place_of: tuple[int, ...]
    groups: Groups

    @property
    def pipeline_rank(self) -> tuple[int, ...]:
        """Per rank, its place in the pipeline."""
        return tuple(self.places[index].pipeline_rank for index in self.place_of)


class _Ranks:
    """Rank numbers on a grid of named axes, the first of ``order`` innermost (Megatron-LM's ``RankGenerator``)."""

    def __init__(self, order: Sequence[str], sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.grid: Grid = np.arange(int(np.prod(list(sizes.values())))).reshape([sizes[axis] for axis in order[::-1]])
        self._dimension = {axis: len(order) - 1 - index for index, axis in enumerate(order)}

    def along(self, *inner: str) -> tuple[tuple[int, ...], ...]:
        """Groups that vary the ``inner`` axes, the last of them fastest; none where each would have one member."""
        size = int(np.prod([self.sizes[axis] for axis in inner]))
        if size == 1:
            return ()
        moved = np.moveaxis(self.grid, [self._dimension[axis] for axis in inner], range(-len(inner), 0))
        return tuple(tuple(row) for row in moved.reshape(-1, size).tolist())

    def position(self, axis: str) -> list[int]:
        """Per rank, where it stands on an axis."""
        return [int(at) for at in np.indices(self.grid.shape)[self._dimension[axis]].reshape(-1)]


def layout(workload: Workload) -> Layout:
    """Ranks numbered with the first axis of ``rank_order`` innermost.

    With ``tp-dp-pp`` and tp 2, dp 2, pp 2: ranks 0 and 1 are a tp group, 0 and 2 a dp group, 0 and 4 a pipeline.
    Experts have a grid of their own in the same order, where etp stands for tp, ep has its size, cp is 1, and
    what is left is edp (Megatron-LM's expert ``RankGenerator``).
    """
    parallelism = workload.parallelism
    axes = [axis for axis in parallelism.rank_order.split("-") if axis != "ep"]
    axes += [] if "cp" in axes else ["cp"]
    ranks = _Ranks(axes, {"tp": parallelism.tp, "cp": parallelism.cp, "dp": parallelism.dp, "pp": parallelism.pp})
    of_experts = _expert_ranks(workload)
    shared = sorted(("dp", "cp"), key=axes.index, reverse=True)

    groups = {axis: ranks.along(axis) for axis in ("tp", "cp", "pp")}
    groups["dp"] = ranks.along(*shared)
    groups["mp"] = ranks.along("pp", "tp")
    if of_experts:
        groups |= {axis: of_experts.along(axis) for axis in ("ep", "etp", "edp")}
        groups["emp"] = of_experts.along("pp", "ep", "etp")
        for one in routing(workload).copy_rounds:
            groups[one.axis] = tuple(
                tuple(members[position] for position in holders.positions)
                for members in groups["ep"]
                for holders in one.groups
            )
    groups |= _instances(parallelism, groups)
    if parallelism.server_count or any(place != "none" for place in parallelism.offload.model_dump().values()):
        groups["rank"] = tuple((rank,) for rank in range(workload.n_ranks))
    if workload.model.table_at_both_ends and not parallelism.table_in_place:
        first, last = parallelism.ends
        groups["embd"] = tuple((pipeline[first], pipeline[last]) for pipeline in groups["pp"])
    if parallelism.plan.copies == 2:
        groups["twin"] = tuple(
            (pipeline[rank], pipeline[-1 - rank]) for pipeline in groups["pp"] for rank in range(parallelism.pp // 2)
        )
    ep = of_experts.position("ep") if of_experts else [0] * workload.n_ranks
    wanted = [
        Place(stage, telling_seat(workload, Seat(cp=cp, ep=expert)))
        for stage, cp, expert in zip(ranks.position("pp"), ranks.position("cp"), ep, strict=True)
    ]
    places = {place: number for number, place in enumerate(sorted(set(wanted)))}
    return Layout(
        tuple(places),
        tuple(places[place] for place in wanted),
        {axis: members for axis, members in groups.items() if members},
    )


def _instances(parallelism: Parallelism, groups: Groups) -> Groups:
    """The groups that share a state, and those that hold the same shard of it, where a state has several instances
    (Megatron-LM's ``num_distributed_optimizer_instances``, torch's 2-dimensional mesh of HSDP)."""
    split: dict[str, tuple[tuple[int, ...], ...]] = {}
    for axis in ("dp", "edp"):
        size = parallelism.shards(axis)
        if 1 < size < parallelism.replicas(axis):
            of_axis = groups.get(axis, ())
            split[parallelism.shard_axis(axis)] = tuple(
                group[first : first + size] for group in of_axis for first in range(0, len(group), size)
            )
            split[parallelism.replica_axis(axis)] = tuple(
                group[place::size] for group in of_axis for place in range(size)
            )
    return split


def _expert_ranks(workload: Workload) -> _Ranks | None:
    """The grid of experts, where there are any."""
    parallelism = workload.parallelism
    if workload.model.moe is None:
        return None
    order = [{"tp": "etp", "dp": "edp"}.get(axis, axis) for axis in parallelism.rank_order.split("-") if axis != "cp"]
    order += [] if "ep" in order else ["ep"]
    sizes = {
        "etp": parallelism.etp,
        "ep": parallelism.ep,
        "edp": parallelism.replicas("edp"),
        "pp": parallelism.pp,
    }
    return _Ranks(order, sizes)
