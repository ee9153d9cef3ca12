"""Steady state of steps that follow one another: one period of it, as a Timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans
from simulator.arrays import Floats, Ints
from simulator.program import COMPUTE_LANE, Program, StepPhase
from simulator.timeline import Timeline

#: Periods of ranks and steps are equal if they differ by less than this share.
TOLERANCE = 1e-9
#: Steps played in a row until one repeats the one before: first and last number tried.
STEPS, MAX_STEPS = 4, 32
UNSTEADY = (
    "of the steps that were played none repeats the one before: the period is the mean of the later half, "
    "and what it is made of is one of the last"
)
#: Mean periods of asynchronous workers are settled once they differ by less than this share.
SETTLED = 0.01
#: Steps of a later half that can tell whether its mean has settled.
LEAST_LATER = 3


@dataclass(frozen=True)
class SteadyState:
    """One period of a steady state.

    ``period``: the period as a Timeline, cut out of the steps ``played``. ``window``: its begin and end (s) on the rank
    that begins first. ``stable``: every rank did the same at the same time a period before.
    """

    period: Timeline
    played: Timeline
    window: tuple[float, float]
    stable: bool


def steady(timeline: Timeline, steps: int, microbatches: int) -> SteadyState:
    """Return the last of ``steps`` equal steps, of ``microbatches`` each, that repeats the one before.

    It lasts from where each rank's compute lane reaches the step's first entry to the same place a step later. Where no
    step repeats the one before, the last but one is taken as it is, with the mean period of the later half.
    """
    reached = _reached(timeline)
    length = {rank: len(times) // steps for rank, times in reached.items()}
    begins = {rank: times[:: length[rank]] for rank, times in reached.items()}
    for step in range(steps - 2, 0, -1):
        shifts = [
            times[step * n : (step + 1) * n + 1] - times[(step - 1) * n : step * n + 1]
            for times, n in ((reached[rank], length[rank]) for rank in reached)
        ]
        period = float(np.mean([shift[0] for shift in shifts]))
        if all(np.abs(shift - period).max() <= TOLERANCE * period for shift in shifts):
            windows = {rank: begins[rank][step : step + 2] for rank in reached}
            return _cut(timeline, windows, period, steps, microbatches, True)
    half = steps // 2
    later_s = {rank: float(times[-1] - times[half]) / (steps - 1 - half) for rank, times in begins.items()}
    period = float(np.average(list(later_s.values()), weights=[timeline.ranks_like[rank] for rank in later_s]))
    return _cut(timeline, {rank: times[-2:] for rank, times in begins.items()}, period, steps, microbatches, False)


def steps_begun(timeline: Timeline, steps: int, until_s: float) -> dict[int, int]:
    """Return how many of ``steps`` equal steps each simulated rank has begun by ``until_s``."""
    begins = _begins(timeline, steps)
    return {rank: int((times <= until_s * (1 + TOLERANCE)).sum()) for rank, times in begins.items()}


def steady_until(timeline: Timeline, steps: int, microbatches: int, begun: Mapping[int, int]) -> SteadyState | None:
    """Return the period of equal steps beside other jobs; None where fewer than two steps are whole.

    ``begun``: simulated rank -> number of steps begun; the smallest number of all ranks counts. The period is that of
    the last two, if these are equally long. Otherwise it is the mean of the later half of all. It is cut out right
    before the last of their beginnings. A mean is stable once it has settled to `SETTLED`.
    """
    begins_of_rank = _begins(timeline, steps)
    begins = np.array(list(begins_of_rank.values()))[:, : min(begun.values())]
    if begins.shape[1] < 3:
        return None
    lengths = np.diff(begins, axis=1)
    mean_s = np.average(lengths, axis=0, weights=[timeline.ranks_like[rank] for rank in begins_of_rank])
    period = float(mean_s[-1])
    stable = bool(np.abs(lengths[:, -2:] - period).max() <= TOLERANCE * period)
    if not stable:
        period, stable = _mean_of_later(mean_s)
    ends = begins[:, -1]
    windows = {rank: np.array([end - period, end]) for rank, end in zip(begins_of_rank, ends, strict=True)}
    return _cut(timeline, windows, period, steps, microbatches, stable)


def steady_alone(
    timeline: Timeline, steps: int, microbatches: int, begun: Mapping[int, int] | None = None
) -> SteadyState:
    """Return the steady state of workers that do not wait for each other.

    Each worker's last whole step is taken, while all are under way, and among its ``begun`` steps [all].
    The period is the time in which all workers together do as many steps as there are workers: the harmonic mean of
    their periods. Workers that meet at servers now and then do not repeat themselves exactly. Their period is the mean
    of the later half of their steps, and stable once it has settled to `SETTLED`.
    """
    begins = _begins(timeline, steps)
    horizon = min(float(times[-1]) for times in begins.values())
    windows: dict[int, Floats] = {}
    periods: dict[int, float] = {}
    stable = True
    for rank, times in begins.items():
        whole = times[times <= horizon * (1 + TOLERANCE)]
        whole = whole if begun is None else whole[: begun[rank]]
        if len(whole) < 3:
            stable = False
            whole = times[:3]
        steps_s = np.diff(whole)
        periods[rank] = float(steps_s[-1])
        if abs(steps_s[-1] - steps_s[-2]) > TOLERANCE * steps_s[-1]:
            periods[rank], settled = _mean_of_later(steps_s)
            stable = stable and settled
        windows[rank] = np.array([whole[-1] - periods[rank], whole[-1]])
    like = timeline.ranks_like
    period = sum(like.values()) / sum(like[rank] / seconds for rank, seconds in periods.items())
    cut = _cut(timeline, windows, period, steps, microbatches, stable)
    return replace(cut, period=replace(cut.period, own_period_s=periods))


def until_steady(
    build: Callable[[int], Program],
    play: Callable[[Program, int], Timeline],
    microbatches: int,
    *,
    together: bool = True,
) -> tuple[Program, SteadyState]:
    """Play more and more steps until one repeats the one before, and return their program and their steady state.

    ``build`` returns the program of a number of steps, and ``play`` what a program of so many is played to. Ranks
    repeat the same step ``together``, or each one alone.
    """
    find = steady if together else steady_alone
    steps = STEPS
    while True:
        program = build(steps)
        state = find(play(program, steps), steps, microbatches)
        if state.stable or steps >= MAX_STEPS:
            return program, state
        steps *= 2


def _mean_of_later(lengths_s: Floats) -> tuple[float, bool]:
    """Return the mean of the later half of ``lengths_s``, and whether it has settled to that of its own later half."""
    later = lengths_s[len(lengths_s) // 2 :]
    mean_s = float(later.mean())
    return mean_s, len(later) >= LEAST_LATER and bool(abs(later[len(later) // 2 :].mean() - mean_s) <= SETTLED * mean_s)


def _begins(timeline: Timeline, steps: int) -> dict[int, Floats]:
    """Return when each rank's compute lane reached the beginning of each of ``steps`` equal steps."""
    return {rank: times[:: len(times) // steps] for rank, times in _reached(timeline).items()}


def _reached(timeline: Timeline) -> dict[int, Floats]:
    """Return when each rank's compute lane reached each entry that computes, in order; every step has as many.

    An entry may begin with communication inside its block. It is drawn on a lane of its own, in the phase of its pass.
    """
    on_lane = compute_lane_spans(timeline)
    begins = on_lane | (timeline.phase != StepPhase.COMMUNICATION)
    order = np.argsort(timeline.rank, kind="stable")
    order = order[begins[order]]
    ranks = list(timeline.ranks)
    cuts = np.searchsorted(timeline.rank[order], ranks, side="right")[:-1]
    return {
        rank: _entries_reached(timeline, spans[on_lane[spans]], spans[~on_lane[spans]])
        for rank, spans in zip(ranks, np.split(order, cuts), strict=True)
    }


def _entries_reached(timeline: Timeline, spans: Ints, elsewhere: Ints) -> Floats:
    """Return when entries of one rank were reached: ``spans`` are on its compute lane, and ``elsewhere`` on others."""
    steps, entry = np.unique(timeline.step[spans], return_inverse=True)
    times = np.full(len(steps), np.inf)
    np.minimum.at(times, entry, timeline.posted_s[spans])
    if len(elsewhere):
        entry_of_label = dict(zip(timeline.labels.select(spans), entry.tolist(), strict=True))
        for span, label in zip(elsewhere.tolist(), timeline.labels.select(elsewhere), strict=True):
            number = entry_of_label.get(label, -1)
            if number >= 0:
                times[number] = min(times[number], timeline.posted_s[span])
    return times


def _cut(
    timeline: Timeline, begins: dict[int, Floats], period: float, steps: int, microbatches: int, stable: bool
) -> SteadyState:
    windows = {rank: (float(begin[0]), float(begin[1])) for rank, begin in begins.items()}
    start = min(low for low, _ in windows.values())
    cut = timeline.cut(windows, period, compute_lane=COMPUTE_LANE, steps=steps, microbatches=microbatches)
    return SteadyState(cut, timeline, (start, start + period), stable)
