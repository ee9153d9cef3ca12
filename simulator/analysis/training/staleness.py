"""Staleness: age of the weights of asynchronous workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from simulator.arrays import Floats
from simulator.timeline import Timeline


def staleness(played: Timeline, groups: Mapping[str, Sequence[Sequence[int]]]) -> float:
    """Return the mean number of other workers' updates between a worker's pull and its own update.

    The update is the one computed from the pulled weights; each part of the parameters counts by itself. ``played``:
    steps in a row. ``groups``: axis -> groups of ranks; a group of ``dp`` shares parameters. Updates that end together
    count half before and half after one another.
    """
    ends, starts = _by_part(played, "server", played.end_s), _by_part(played, "pull", played.start_s)
    peers: dict[int, Counter[int]] = {}
    for group in groups.get("dp", ()):
        members = Counter(played.simulated_as[rank] for rank in group)
        for rank in members:
            peers.setdefault(rank, members - Counter({rank: 1}))
    # End of the time in which all workers are under way.
    horizon = min((float(times[-1]) for times in ends.values()), default=0.0)
    count = total = 0.0
    for (rank, part), updates in ends.items():
        pulled, applied = starts[rank, part][:-1], updates[1:]
        inside = applied <= horizon
        for peer, number in peers.get(rank, Counter()).items():
            peer_updates = ends[peer, part]
            between = _count_before(peer_updates, applied[inside]) - _count_before(peer_updates, pulled[inside])
            total += played.ranks_like[rank] * number * float(between.sum())
        count += played.ranks_like[rank] * int(inside.sum())
    return total / count if count else 0.0


def _count_before(times: Floats, moments: Floats) -> Floats:
    """Return how many of ``times`` (ascending) lie before each of ``moments``; those at the moment count half."""
    return (np.searchsorted(times, moments, side="left") + np.searchsorted(times, moments, side="right")) / 2


def _by_part(played: Timeline, lane: str, values: Floats) -> dict[tuple[int, str], Floats]:
    """Return values of a lane's spans by rank and part of the parameters, step after step."""
    by_part: dict[tuple[int, str], list[float]] = {}
    code = played.lane_names.index(lane) if lane in played.lane_names else -1
    for span in np.flatnonzero(played.lane == code).tolist():
        by_part.setdefault((int(played.rank[span]), played.parts[span]), []).append(float(values[span]))
    return {key: np.array(steps) for key, steps in by_part.items()}
