"""How old the weights are that asynchronous workers compute with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from simulator.timeline import Floats, Timeline


def staleness(played: Timeline, groups: Mapping[str, Sequence[Sequence[int]]]) -> float:
    """Mean number of other workers' updates that a server applies between a worker's pull and its update with the
    gradients that it computes from what it pulled, part by part of the parameters.

    ``played``: steps in a row; ``groups``: ranks by axis, those of ``dp`` share parameters. Of updates that end
    together half are counted before, half after one another.
    """
    ends, starts = _by_part(played, "server", played.end_s), _by_part(played, "pull", played.start_s)
    together: dict[int, Counter[int]] = {}
    for group in groups.get("dp", ()):
        twins = Counter(played.simulated_as[rank] for rank in group)
        for rank in twins:
            together.setdefault(rank, twins - Counter({rank: 1}))
    # Of the time in which all workers are under way.
    horizon = min((float(times[-1]) for times in ends.values()), default=0.0)
    count = total = 0.0
    for (rank, part), updates in ends.items():
        pulled, applied = starts[rank, part][:-1], updates[1:]
        kept = applied <= horizon
        for other, number in together.get(rank, Counter()).items():
            theirs = ends[other, part]
            seen = _before(theirs, applied[kept]) - _before(theirs, pulled[kept])
            total += played.ranks_like[rank] * number * float(seen.sum())
        count += played.ranks_like[rank] * int(kept.sum())
    return total / count if count else 0.0


def _before(times: Floats, moments: Floats) -> Floats:
    """How many of ``times`` (ascending) lie before each of ``moments``, those at the moment itself by half."""
    return (np.searchsorted(times, moments, side="left") + np.searchsorted(times, moments, side="right")) / 2


def _by_part(played: Timeline, lane: str, values: Floats) -> dict[tuple[int, str], Floats]:
    """Values of a lane's spans by rank and part of the parameters, step after step."""
    found: dict[tuple[int, str], list[float]] = {}
    code = played.lane_names.index(lane) if lane in played.lane_names else -1
    for span in np.flatnonzero(played.lane == code).tolist():
        found.setdefault((int(played.rank[span]), played.parts[span]), []).append(float(values[span]))
    return {key: np.array(times) for key, times in found.items()}
