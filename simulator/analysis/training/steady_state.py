"""The steady state of steps that follow one another: one period of it, as a Timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans
from simulator.program import COMPUTE_LANE, Program
from simulator.timeline import Floats, Timeline

#: Periods of different ranks and steps are the same one if they differ by less than this share of it.
TOLERANCE = 1e-9
#: Steps played in a row until a steady state shows: the first, and the last, number tried.
STEPS, MAX_STEPS = 4, 32
UNSTEADY = (
    "of the steps that were played none repeats the one before: the period is the mean of the later half, "
    "and what it is made of is one of the last"
)
#: Mean periods of asynchronous workers are settled once they differ by less than this share.
SETTLED = 0.01


@dataclass(frozen=True)
class Steady:
    """``period``: one period as a Timeline, cut out of the steps ``played``; ``window``: from when to when that was for
    the first rank (s); ``stable``: whether every rank did the same at the same time a period before."""

    period: Timeline
    played: Timeline
    window: tuple[float, float]
    stable: bool


def steady(timeline: Timeline, steps: int, microbatches: int) -> Steady:
    """The last of ``steps`` equal steps, of ``microbatches`` each, that repeats the one before: from where each rank
    comes to the step's first entry on its compute lane, to the same place a step later.

    Where no step repeats the one before, the last but one is taken as it is, with the mean period of the later half.
    """
    came = {rank: _came(timeline, rank) for rank in timeline.ranks}
    length = {rank: len(times) // steps for rank, times in came.items()}
    begins = {rank: times[:: length[rank]] for rank, times in came.items()}
    for step in range(steps - 2, 0, -1):
        shifts = [
            times[step * n : (step + 1) * n + 1] - times[(step - 1) * n : step * n + 1]
            for times, n in ((came[rank], length[rank]) for rank in came)
        ]
        period = float(np.mean([shift[0] for shift in shifts]))
        if all(np.abs(shift - period).max() <= TOLERANCE * period for shift in shifts):
            return _cut(
                timeline, {rank: begins[rank][step : step + 2] for rank in came}, period, steps, microbatches, True
            )
    half = steps // 2
    later_s = {rank: float(times[-1] - times[half]) / (steps - 1 - half) for rank, times in begins.items()}
    period = float(np.average(list(later_s.values()), weights=[timeline.ranks_like[rank] for rank in later_s]))
    return _cut(timeline, {rank: times[-2:] for rank, times in begins.items()}, period, steps, microbatches, False)


def begun_by(timeline: Timeline, steps: int, until_s: float) -> dict[int, int]:
    """Return how many of ``steps`` equal steps each simulated rank has begun by ``until_s``."""
    came = {rank: _came(timeline, rank) for rank in timeline.ranks}
    return {
        rank: int((times[:: len(times) // steps] <= until_s * (1 + TOLERANCE)).sum()) for rank, times in came.items()
    }


def steady_until(timeline: Timeline, steps: int, microbatches: int, begun: Mapping[int, int]) -> Steady | None:
    """The period of equal steps beside other jobs: that of the last two of the steps that all ranks have ``begun`` and
    that are as long as each other, else the mean of the later half of those. None where fewer than two are whole.

    Of the period the last part is shown: whatever the ranks did in as long a time before the last of those beginnings.
    A mean counts as stable once it has settled to `SETTLED`.
    """
    came = {rank: _came(timeline, rank) for rank in timeline.ranks}
    begins = np.array([times[:: len(times) // steps] for times in came.values()])[:, : min(begun.values())]
    if begins.shape[1] < 3:
        return None
    lengths = np.diff(begins, axis=1)
    mean_s = np.average(lengths, axis=0, weights=[timeline.ranks_like[rank] for rank in came])
    period = float(mean_s[-1])
    stable = bool(np.abs(lengths[:, -2:] - period).max() <= TOLERANCE * period)
    if not stable:
        later = mean_s[len(mean_s) // 2 :]
        period = float(later.mean())
        stable = len(later) > 2 and abs(later[len(later) // 2 :].mean() - period) <= SETTLED * period
    ends = begins[:, -1]
    windows = {rank: np.array([end - period, end]) for rank, end in zip(came, ends, strict=True)}
    return _cut(timeline, windows, period, steps, microbatches, stable)


def own_paces(timeline: Timeline, steps: int, microbatches: int, begun: Mapping[int, int] | None = None) -> Steady:
    """As `steady`, of workers that do not wait for each other: of each its last whole step while all are under way, and
    of those that it has ``begun`` (None: all).

    The period is the time in which all workers together do as many steps as there are workers, the harmonic mean of
    their own. Workers that meet at servers now and then do not repeat themselves exactly: their own period is the mean
    of the later half of their steps, and taken as steady once it has settled to `SETTLED`.
    """
    came = {rank: _came(timeline, rank) for rank in timeline.ranks}
    begins = {rank: times[:: len(times) // steps] for rank, times in came.items()}
    horizon = min(float(times[-1]) for times in begins.values())
    windows: dict[int, Floats] = {}
    own: dict[int, float] = {}
    stable = True
    for rank, times in begins.items():
        whole = times[times <= horizon * (1 + TOLERANCE)]
        whole = whole if begun is None else whole[: begun[rank]]
        if len(whole) < 3:
            stable = False
            whole = times[:3]
        steps_s = np.diff(whole)
        own[rank] = float(steps_s[-1])
        if abs(steps_s[-1] - steps_s[-2]) > TOLERANCE * steps_s[-1]:
            later = steps_s[len(steps_s) // 2 :]
            own[rank] = float(later.mean())
            settled = abs(later[len(later) // 2 :].mean() - own[rank]) <= SETTLED * own[rank]
            stable = stable and settled and len(later) > 3
        windows[rank] = np.array([whole[-1] - own[rank], whole[-1]])
    like = timeline.ranks_like
    period = sum(like.values()) / sum(like[rank] / seconds for rank, seconds in own.items())
    found = _cut(timeline, windows, period, steps, microbatches, stable)
    return replace(found, period=replace(found.period, own_period_s=own))


def until_steady(
    build: Callable[[int], Program], play: Callable[[Program], Timeline], microbatches: int, *, together: bool = True
) -> tuple[Program, Steady]:
    """Play more and more steps until one repeats the one before, unless ``together`` each rank its own; ``build`` makes
    the program of so many."""
    cut = steady if together else own_paces
    steps = STEPS
    while True:
        program = build(steps)
        found = cut(play(program), steps, microbatches)
        if found.stable or steps >= MAX_STEPS:
            return program, found
        steps *= 2


def _came(timeline: Timeline, rank: int) -> Floats:
    """When the rank's compute lane came to each of its entries that compute, in order; every step has as many."""
    spans = np.flatnonzero(compute_lane_spans(timeline) & (timeline.rank == rank))
    _, entry = np.unique(timeline.step[spans], return_inverse=True)
    times = np.full(int(entry.max(initial=-1)) + 1, np.inf)
    np.minimum.at(times, entry, timeline.posted_s[spans])
    return times


def _cut(
    timeline: Timeline, begins: dict[int, Floats], period: float, steps: int, microbatches: int, stable: bool
) -> Steady:
    windows = {rank: (float(begin[0]), float(begin[1])) for rank, begin in begins.items()}
    start = min(low for low, _ in windows.values())
    cut = timeline.cut(windows, period, compute_lane=COMPUTE_LANE, steps=steps, microbatches=microbatches)
    return Steady(cut, timeline, (start, start + period), stable)
