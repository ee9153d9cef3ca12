"""Kernels of communication on different ranks that are one operation."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from simulator.traces.classes import TRANSFER
from simulator.traces.trace import RankTrace, RunTrace


@dataclass(frozen=True, slots=True)
class Meeting:
    """One operation of process group ``group``: rank -> index of its kernel among the rank's ops."""

    group: Hashable
    ops: Mapping[int, int]


def meetings(trace: RunTrace) -> list[Meeting]:
    """Return the operations that ranks of a trace have in common, in the order of the first rank that calls each.

    Ranks call the operations of a group in one order (NCCL asks for that), so that the n-th of a rank is the n-th of
    every other. Groups are told by name and members. Where these are not recorded, operations are matched by kind and
    size, provided that all ranks of the job are in the trace. Where ranks differ in how many they have, nothing of that
    group is matched. Transfers between two ranks are not matched, as traces do not name the other end.
    """
    by_rank = {rank.rank: _calls_by_group(rank, len(trace.ranks)) for rank in trace.ranks}
    matched: list[tuple[float, Meeting]] = []
    for group in dict.fromkeys(key for calls in by_rank.values() for key in calls):
        members = [rank for rank in trace.ranks if group in by_rank[rank.rank]]
        lists = [by_rank[rank.rank][group] for rank in members]
        if len({len(indices) for indices in lists}) != 1 or len(members) < 2:
            continue
        for ops in zip(*lists, strict=True):
            pairs = {rank.rank: op for rank, op in zip(members, ops, strict=True)}
            matched.append((float(members[0].ops.start_s[ops[0]]), Meeting(group, pairs)))
    return [meeting for _, meeting in sorted(matched, key=lambda entry: entry[0])]


def _calls_by_group(rank: RankTrace, n_ranks: int) -> dict[tuple[object, ...], list[int]]:
    """Return the calls of each group; ``n_ranks`` are in the trace."""
    calls: dict[tuple[object, ...], list[int]] = {}
    for op in np.flatnonzero(rank.ops.collective >= 0).tolist():
        collective = rank.collectives[rank.ops.collective[op]]
        if collective.size == 1 or collective.operation == TRANSFER:
            continue
        key: tuple[object, ...] = collective.group, collective.ranks, collective.size
        if not collective.group and not collective.ranks:
            if rank.world_size != n_ranks:
                continue
            key = collective.operation, collective.nbytes, collective.size
        calls.setdefault(key, []).append(op)
    return calls
