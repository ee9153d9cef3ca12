"""Ranks of a job: Megatron's rank order, what tells ranks apart, and the groups of every axis."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.config import Parallelism, Workload
from simulator.models import Seat, representative_seat, routing
from simulator.program import REPLICAS, Axis

#: Disjoint, ordered groups of ranks.
RankGroups = tuple[tuple[int, ...], ...]
Grid = NDArray[np.int64]


class PipelineSeat(NamedTuple):
    """Place of a rank in the pipeline, and its seat on axes whose members differ: together they decide its work."""

    pipeline_rank: int
    seat: Seat

    def __str__(self) -> str:
        apart = [f"{axis}{at}" for axis, at in self.seat._asdict().items() if at]
        return " ".join([f"stage{self.pipeline_rank}", *apart])


@dataclass(frozen=True)
class Layout:
    """The distinct ``places``, and the place of each rank: ``place_of[rank]`` indexes them.

    ``groups`` has every axis of `program.AXES` that has groups of more than one member, and ``rank`` where ranks deal
    with hosts.
    """

    places: tuple[PipelineSeat, ...]
    place_of: tuple[int, ...]
    groups: Mapping[str, RankGroups]

    @property
    def pipeline_rank(self) -> tuple[int, ...]:
        """Pipeline rank of every rank."""
        stages = [place.pipeline_rank for place in self.places]
        return tuple([stages[index] for index in self.place_of])


class _Ranks:
    """Rank numbers on a grid of named axes, the first of ``order`` innermost (Megatron-LM's ``RankGenerator``)."""

    def __init__(self, order: Sequence[str], sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.grid: Grid = np.arange(int(np.prod(list(sizes.values())))).reshape([sizes[axis] for axis in order[::-1]])
        self._dimension = {axis: len(order) - 1 - index for index, axis in enumerate(order)}

    def along(self, *inner: str) -> RankGroups:
        """Return groups that vary the ``inner`` axes, the last of them fastest; none if each would have one member."""
        size = int(np.prod([self.sizes[axis] for axis in inner]))
        if size == 1:
            return ()
        moved = np.moveaxis(self.grid, [self._dimension[axis] for axis in inner], range(-len(inner), 0))
        return tuple(map(tuple, moved.reshape(-1, size).tolist()))

    def first_along(self, *inner: str) -> tuple[int, ...]:
        """Return the group of rank 0 among those of `along`; itself alone if each would have one member."""
        moved = np.moveaxis(self.grid, [self._dimension[axis] for axis in inner], range(-len(inner), 0))
        return tuple(moved[(0,) * (moved.ndim - len(inner))].reshape(-1).tolist())

    def position(self, axis: str) -> Grid:
        """Return the position of every rank on an axis."""
        dimension = self._dimension[axis]
        shape = [size if at == dimension else 1 for at, size in enumerate(self.grid.shape)]
        return np.broadcast_to(np.arange(self.sizes[axis]).reshape(shape), self.grid.shape).reshape(-1)


#: Of the last few workloads, as program, memory and figures of one ask for the same.
_recent: deque[tuple[Workload, Layout]] = deque(maxlen=2)


def layout(workload: Workload) -> Layout:
    """Number the ranks, the first axis of ``rank_order`` innermost, and find their places and groups.

    With ``tp-dp-pp`` and tp 2, dp 2, pp 2: ranks 0 and 1 are a tp group, 0 and 2 a dp group, 0 and 4 a pipeline.
    """
    kept = next((placed for other, placed in _recent if other is workload), None)
    if kept is None:
        kept = _layout(workload)
        _recent.append((workload, kept))
    return kept


def _layout(workload: Workload) -> Layout:
    ranks, expert_ranks = _dense_ranks(workload.parallelism), _expert_ranks(workload)
    groups = _dense_groups(workload.parallelism, ranks)
    if expert_ranks:
        groups |= _expert_groups(workload, expert_ranks)
    groups |= _instances(workload.parallelism, groups)
    groups |= _other_groups(workload, groups)
    columns = [ranks.position(Axis.PP), ranks.position(Axis.CP)]
    columns.append(expert_ranks.position(Axis.EP) if expert_ranks else np.zeros_like(columns[0]))
    code = np.ravel_multi_index(columns, [int(column.max()) + 1 for column in columns])
    codes, first = np.unique(code, return_index=True)
    seats = [
        PipelineSeat(stage, representative_seat(workload, Seat(cp=cp, ep=ep)))
        for stage, cp, ep in zip(*[column[first].tolist() for column in columns], strict=True)
    ]
    places = {place: number for number, place in enumerate(sorted(set(seats)))}
    place_of = np.array([places[seat] for seat in seats], dtype=np.int64)[np.searchsorted(codes, code)]
    return Layout(
        tuple(places),
        tuple(place_of.tolist()),
        {axis: members for axis, members in groups.items() if members},
    )


def groups_of_first_rank(workload: Workload) -> dict[str, tuple[int, ...]]:
    """Return the groups of rank 0 on the axes of computation, and of ranks that hold the same parameters.

    They are those of `layout`, for which every rank of the job is looked at."""
    ranks, expert_ranks = _dense_ranks(workload.parallelism), _expert_ranks(workload)
    groups = {axis: ranks.first_along(axis) for axis in (Axis.TP, Axis.CP)}
    groups[Axis.DP] = ranks.first_along(*_sharing_parameters(workload.parallelism))
    if expert_ranks:
        groups |= {axis: expert_ranks.first_along(axis) for axis in (Axis.EP, Axis.ETP, Axis.EDP)}
    return {str(axis): members for axis, members in groups.items()}


def _sharing_parameters(parallelism: Parallelism) -> list[Axis]:
    """Return the axes of ranks that hold the same parameters outside experts, the innermost last."""
    order = parallelism.rank_order.split("-")
    return sorted((Axis.DP, Axis.CP), key=lambda axis: order.index(axis) if axis in order else len(order), reverse=True)


def _dense_ranks(parallelism: Parallelism) -> _Ranks:
    """Return the grid of ranks outside experts."""
    axes = [axis for axis in parallelism.rank_order.split("-") if axis != Axis.EP]
    axes += [] if Axis.CP in axes else [Axis.CP]
    sizes: dict[str, int] = {
        Axis.TP: parallelism.tp,
        Axis.CP: parallelism.cp,
        Axis.DP: parallelism.dp,
        Axis.PP: parallelism.pp,
    }
    return _Ranks(axes, sizes)


def _expert_ranks(workload: Workload) -> _Ranks | None:
    """Return the grid of ranks inside experts, where there are any (Megatron-LM's expert ``RankGenerator``).

    It has the order of the grid outside. There etp stands for tp, ep has its size, cp is 1, and what is left is edp.
    """
    parallelism = workload.parallelism
    if workload.model.moe is None:
        return None
    inside = {Axis.TP: Axis.ETP, Axis.DP: Axis.EDP}
    order = [inside.get(Axis(axis), axis) for axis in parallelism.rank_order.split("-") if axis != Axis.CP]
    order += [] if Axis.EP in order else [Axis.EP]
    sizes: dict[str, int] = {
        Axis.ETP: parallelism.etp,
        Axis.EP: parallelism.ep,
        Axis.EDP: parallelism.replicas(Axis.EDP),
        Axis.PP: parallelism.pp,
    }
    return _Ranks(order, sizes)


def _dense_groups(parallelism: Parallelism, ranks: _Ranks) -> dict[str, RankGroups]:
    """Return the groups outside experts. Ranks of dp and cp share parameters, and are one group."""
    return {
        **{axis: ranks.along(axis) for axis in (Axis.TP, Axis.CP, Axis.PP)},
        Axis.DP: ranks.along(*_sharing_parameters(parallelism)),
        Axis.MP: ranks.along(Axis.PP, Axis.TP),
    }


def _expert_groups(workload: Workload, ranks: _Ranks) -> dict[str, RankGroups]:
    """Return the groups inside experts, and those of members of ep that hold copies of the same experts."""
    groups: dict[str, RankGroups] = {axis: ranks.along(axis) for axis in (Axis.EP, Axis.ETP, Axis.EDP)}
    groups[Axis.EMP] = ranks.along(Axis.PP, Axis.EP, Axis.ETP)
    for one in routing(workload).copy_rounds:
        groups[one.axis] = tuple(
            tuple(members[position] for position in holders.positions)
            for members in groups[Axis.EP]
            for holders in one.groups
        )
    return groups


def _instances(parallelism: Parallelism, groups: Mapping[str, RankGroups]) -> dict[str, RankGroups]:
    """Return the groups that share a state, and those that hold the same shard, where a state has several instances.

    Megatron-LM calls them ``num_distributed_optimizer_instances``; in torch they are a 2-dimensional mesh (HSDP).
    """
    split: dict[str, RankGroups] = {}
    for axis, parts in REPLICAS.items():
        size, members = parallelism.shards(axis), groups.get(axis, ())
        if 1 < size < parallelism.replicas(axis):
            split[parts.shard] = tuple(
                group[first : first + size] for group in members for first in range(0, len(group), size)
            )
            split[parts.replica] = tuple(group[place::size] for group in members for place in range(size))
    return split


def _other_groups(workload: Workload, groups: Mapping[str, RankGroups]) -> dict[str, RankGroups]:
    """Return the groups that only some jobs have: each rank alone, both ends of a pipeline, ranks of two copies."""
    parallelism, pipelines = workload.parallelism, groups[Axis.PP]
    special: dict[str, RankGroups] = {}
    if parallelism.server_count or any(place != "none" for place in parallelism.offload.model_dump().values()):
        special[Axis.RANK] = tuple((rank,) for rank in range(workload.n_ranks))
    if workload.model.table_at_both_ends and not parallelism.table_in_place:
        first, last = parallelism.ends
        special[Axis.EMBEDDING] = tuple((pipeline[first], pipeline[last]) for pipeline in pipelines)
    if parallelism.pipeline_schedule.copies == 2:
        special[Axis.TWIN] = tuple(
            (pipeline[rank], pipeline[-1 - rank]) for pipeline in pipelines for rank in range(parallelism.pp // 2)
        )
    return special
