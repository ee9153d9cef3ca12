"""Which rank does what: Megatron's rank order and the process groups that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simulator.config import Workload

Groups = Mapping[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Layout:
    """``pipeline_rank[rank]`` and the groups of every axis that has more than one member.

    Axes: tp, dp, pp (ordered by pipeline rank), ``mp`` (all tensor and pipeline ranks of one replica), ``embd`` (the
    ranks of the first and the last stage, where each has its copy of a tied embedding table) and ``twin`` (two pipeline
    ranks that hold the same stages).
    """

    pipeline_rank: tuple[int, ...]
    groups: Groups


def layout(workload: Workload) -> Layout:
    """Ranks numbered with the first axis of ``rank_order`` innermost, as Megatron-LM's ``RankGenerator`` does.

    With ``tp-dp-pp`` and tp 2, dp 2, pp 2: ranks 0 and 1 are a tp group, 0 and 2 a dp group, 0 and 4 a pipeline.
    """
    parallelism = workload.parallelism
    sizes = {"tp": parallelism.tp, "dp": parallelism.dp, "pp": parallelism.pp}
    axes = [axis for axis in parallelism.rank_order.split("-") if axis in sizes]
    grid = np.arange(workload.n_ranks).reshape([sizes[axis] for axis in reversed(axes)])
    dimension = {axis: len(axes) - 1 - index for index, axis in enumerate(axes)}

    def along(*inner: str) -> tuple[tuple[int, ...], ...]:
        """Groups that vary the ``inner`` axes, the last of them fastest."""
        moved = np.moveaxis(grid, [dimension[axis] for axis in inner], range(-len(inner), 0))
        size = int(np.prod([sizes[axis] for axis in inner]))
        return tuple(tuple(row) for row in moved.reshape(-1, size).tolist()) if size > 1 else ()

    groups = {axis: along(axis) for axis in axes}
    groups["mp"] = along("pp", "tp")
    if workload.model.tied_embeddings and not parallelism.table_in_place:
        first, last = parallelism.ends
        groups["embd"] = tuple((pipeline[first], pipeline[last]) for pipeline in groups["pp"])
    if parallelism.plan.copies == 2:
        groups["twin"] = tuple(
            (pipeline[rank], pipeline[-1 - rank]) for pipeline in groups["pp"] for rank in range(parallelism.pp // 2)
        )
    pipeline_rank = np.indices(grid.shape)[dimension["pp"]].reshape(-1)
    return Layout(tuple(pipeline_rank.tolist()), {axis: members for axis, members in groups.items() if members})
