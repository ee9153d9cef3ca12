"""Meetings of kernels of several ranks in one communication, and the time in which its bytes move.

A kernel of NCCL's is on the GPU from when its own rank has come to it. Its bytes move from when all ranks of its group
have come until the last one has all bytes. Before that the kernel waits. A profiled step has one clock for all ranks of
a host. Kernels of one group come in one order on all of its ranks: the n-th of a kind on one rank is the n-th on the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from simulator.arrays import Floats, Ints
from simulator.program import comms_of
from simulator.step_result import StepResult
from simulator.timeline import CATEGORIES

MeetingGroups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Meetings:
    """``groups``: kind of communication -> the ranks that meet in it, of kinds with one partition of ranks.
    ``hand_overs``: rank -> its sends and receives in a step, of ranks with one neighbour."""

    groups: Mapping[str, MeetingGroups]
    hand_overs: Mapping[int, int]


def meetings(result: StepResult | None) -> Meetings:
    """Return the meetings of a simulated workload; none where it could not be simulated."""
    if result is None:
        return Meetings({}, {})
    program, groups = result.program, {}
    axes: dict[str, set[str]] = {}
    for role in program.roles:
        for comm in (comm for _, _, step in role.steps() for comm in comms_of(step.op)):
            axes.setdefault(comm.purpose, set()).add(comm.axis)
    for kind, names in axes.items():
        several = [tuple(group for group in program.groups[axis] if len(group) > 1) for axis in sorted(names)]
        partitions = {tuple(sorted(partition)) for partition in several if partition}
        if len(partitions) == 1:
            groups[kind] = partitions.pop()
    pairs = [group for group in groups.get("pp", ()) if len(group) == 2]
    rows = result.spans.select_ranks([rank for pair in pairs for rank in pair]).rows()
    handed = np.bincount(rows["rank"][rows["category"] == CATEGORIES.index("pp")].astype(np.int64))
    return Meetings(groups, {rank: int(handed[rank]) for pair in pairs for rank in pair})


def moving_s(frame: pd.DataFrame, meeting: Meetings) -> tuple[Floats, Floats]:
    """Return the times at which bytes begin and end to move, of every row of a profiled timeline.

    Columns of the timeline: see `calibration.train.record`. Times are nan of kernels that are no communication, and
    where they cannot be told. This is so where the ranks have unlike numbers of kernels, and where the n-th ones were
    not all there at some time. In pipelines it is so where a rank has two neighbours: the record does not say which one
    a kernel is for. It is also so where fewer kernels than transfers ran: torch's 1F1B makes one kernel of a send and a
    receive. A send may end before the receive begins, its bytes being in NCCL's buffers: then neither has waited.
    """
    moves, done = np.full(len(frame), np.nan), np.full(len(frame), np.nan)
    start, end = frame["start_s"].to_numpy(np.float64), frame["end_s"].to_numpy(np.float64)
    frame = frame.reset_index(drop=True)
    communication = frame[frame["class"] == "communication"]
    for kind, rows_of_kind in communication.groupby("kind"):
        for group in meeting.groups.get(str(kind), ()):
            rows_by_rank = [rows_of_kind[rows_of_kind["rank"] == rank] for rank in group]
            sends = kind == "pp"
            if sends and any(
                meeting.hand_overs.get(rank) != len(rows) for rank, rows in zip(group, rows_by_rank, strict=True)
            ):
                continue
            queues = [_queues(rows) for rows in rows_by_rank]
            for queue in queues[0]:
                members = [queued.get(queue, np.zeros(0, dtype=np.int64)) for queued in queues]
                if len({len(member) for member in members}) > 1:
                    continue
                kernels = np.stack(members)
                all_there = start[kernels].max(axis=0)
                too_early = (end[kernels] < all_there).any(axis=0)
                if sends or not too_early.any():
                    moves[kernels] = np.where(too_early, start[kernels], all_there)
                    done[kernels] = np.where(too_early, end[kernels], end[kernels].max(axis=0))
    return moves, done


def _queues(kernels: pd.DataFrame) -> dict[tuple[int, str], Ints]:
    """Kernels of one rank and kind, by their stream (counted, as streams have other numbers on other ranks) and name,
    in the order in which they began."""
    streams = {name: place for place, name in enumerate(sorted(set(kernels["stream"]), key=lambda s: (len(s), s)))}
    ordered = kernels.sort_values("start_s", kind="stable")
    keys = zip(ordered["stream"].map(streams), ordered["name"], strict=True)
    queues: dict[tuple[int, str], list[int]] = {}
    for key, index in zip(keys, ordered.index, strict=True):
        queues.setdefault(key, []).append(index)
    return {key: np.array(indices, dtype=np.int64) for key, indices in queues.items()}
