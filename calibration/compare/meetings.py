"""Which kernels of several ranks are one communication, and when its bytes move.

A kernel of NCCL's is on the GPU from when its own rank has come to it; its bytes move from when all ranks of its group
have until the last one has all of them. What it is there before, it waits. A profiled step has one clock for all ranks
of a host, and kernels of one group come in one order on all of its ranks, so that the n-th of a kind on one is the n-th
on the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from simulator.api import StepResult
from simulator.arrays import Floats, Ints
from simulator.program import comms_of
from simulator.timeline import CATEGORIES

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Meetings:
    """``groups``: kind of communication -> the ranks that meet in it, where all that it does is among the same ones.
    ``hand_overs``: rank -> its sends and receives in a step, of ranks with one neighbour."""

    groups: Mapping[str, Groups]
    hand_overs: Mapping[int, int]


def meetings(result: StepResult | None) -> Meetings:
    """Of a workload that could be simulated; of another, none."""
    if result is None:
        return Meetings({}, {})
    program, groups = result.program, {}
    axes: dict[str, set[str]] = {}
    for role in program.roles:
        for comm in (comm for _, _, step in role.steps() for comm in comms_of(step.op)):
            axes.setdefault(comm.purpose, set()).add(comm.axis)
    for kind, of_kind in axes.items():
        several = [tuple(group for group in program.groups[axis] if len(group) > 1) for axis in sorted(of_kind)]
        partitions = {tuple(sorted(partition)) for partition in several if partition}
        if len(partitions) == 1:
            groups[kind] = partitions.pop()
    pairs = [group for group in groups.get("pp", ()) if len(group) == 2]
    rows = result.spans.select_ranks([rank for pair in pairs for rank in pair]).rows()
    handed = np.bincount(rows["rank"][rows["category"] == CATEGORIES.index("pp")].astype(np.int64))
    return Meetings(groups, {rank: int(handed[rank]) for pair in pairs for rank in pair})


def moving_s(frame: pd.DataFrame, known: Meetings) -> tuple[Floats, Floats]:
    """Of every row of a profiled timeline (its columns: `calibration.train.record`) from when to when bytes move, nan
    where that cannot be told, and of what is no communication.

    It cannot where the ranks have unlike numbers of kernels, where the n-th ones were not all there at some time, and
    of pipelines where a rank has two neighbours, as the record does not say which one a kernel is for, or where fewer
    kernels than transfers ran, as torch's 1F1B makes one kernel of a send and a receive. A send may end before the
    receive begins, its bytes being in NCCL's buffers: then both have waited for
    nobody.
    """
    moves, done = np.full(len(frame), np.nan), np.full(len(frame), np.nan)
    start, end = frame["start_s"].to_numpy(np.float64), frame["end_s"].to_numpy(np.float64)
    frame = frame.reset_index(drop=True)
    communication = frame[frame["class"] == "communication"]
    for kind, of_kind in communication.groupby("kind"):
        for group in known.groups.get(str(kind), ()):
            of_ranks = [of_kind[of_kind["rank"] == rank] for rank in group]
            sends = kind == "pp"
            if sends and any(known.hand_overs.get(rank) != len(own) for rank, own in zip(group, of_ranks, strict=True)):
                continue
            queues = [_queues(own) for own in of_ranks]
            for queue in queues[0]:
                members = [of_rank.get(queue, np.zeros(0, dtype=np.int64)) for of_rank in queues]
                if len({len(member) for member in members}) > 1:
                    continue
                kernels = np.stack(members)
                all_there = start[kernels].max(axis=0)
                gone = (end[kernels] < all_there).any(axis=0)
                if sends or not gone.any():
                    moves[kernels] = np.where(gone, start[kernels], all_there)
                    done[kernels] = np.where(gone, end[kernels], end[kernels].max(axis=0))
    return moves, done


def _queues(kernels: pd.DataFrame) -> dict[tuple[int, str], Ints]:
    """Kernels of one rank and kind, by their stream (counted, as streams have other numbers on other ranks) and name,
    in the order in which they began."""
    streams = {name: place for place, name in enumerate(sorted(set(kernels["stream"]), key=lambda s: (len(s), s)))}
    ordered = kernels.sort_values("start_s", kind="stable")
    keys = zip(ordered["stream"].map(streams), ordered["name"], strict=True)
    found: dict[tuple[int, str], list[int]] = {}
    for key, index in zip(keys, ordered.index, strict=True):
        found.setdefault(key, []).append(index)
    return {key: np.array(indices, dtype=np.int64) for key, indices in found.items()}
