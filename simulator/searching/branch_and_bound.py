"""Branch and bound: layouts are simulated until no other one can be among the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from simulator.searching.candidates import BoundedSpace, Candidate
from simulator.searching.pareto import losses, undominated
from simulator.sweeping.evaluator import Evaluator
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point


@dataclass(frozen=True)
class SimulatedLayout:
    """A candidate, and what came of its simulation."""

    candidate: Candidate
    outcome: PointOutcome

    @property
    def step_time_s(self) -> float:
        """Simulated step time; infinite where there is none, or the layout does not fit."""
        figures = self.outcome.figures
        return float(figures["step_time_s"]) if figures.get("fits") else math.inf


@dataclass(frozen=True)
class Ranking:
    """Simulated layouts, the fastest that fits first; those that do not fit, or have no figures, are last.

    ``n_proven``: how many of the first are the first of the whole space. ``next_bound_s``: least step time of all
    layouts that were not simulated. ``failed_bound_s``: that of all that broke the simulator or its process.
    """

    simulated: tuple[SimulatedLayout, ...]
    n_proven: int
    next_bound_s: float
    failed_bound_s: float = math.inf

    @property
    def fitting(self) -> tuple[SimulatedLayout, ...]:
        """The layouts that fit, the fastest first."""
        return tuple(one for one in self.simulated if math.isfinite(one.step_time_s))

    @property
    def failed(self) -> tuple[SimulatedLayout, ...]:
        """The layouts that broke the simulator or its process."""
        return tuple(one for one in self.simulated if one.outcome.status == Status.FAILED)


def ranked(
    space: BoundedSpace,
    evaluator: Evaluator,
    point_of: Callable[[Candidate], Point],
    top: int,
    is_over: Callable[[], bool],
    watch: Callable[[SimulatedLayout], object],
    slowest_s: float = math.inf,
) -> Ranking:
    """Return the ranking of a space.

    Its first ``top`` are those of an exhaustive search, unless it ``is_over`` before. Candidates are simulated in the
    order of their bounds. Once the next bound is not below the ``top``-th best step time so far, no layout that is left
    can be faster than that. Nor is one simulated whose bound is above ``slowest_s``.
    """
    candidates = {one.number: one for one in space.fitting}
    best: list[float] = []
    simulated: list[SimulatedLayout] = []

    def points() -> Iterator[Point]:
        for candidate in space.fitting:
            least_s = candidate.bound.step_time_s
            if is_over() or least_s > slowest_s or (len(best) >= top and least_s >= best[top - 1]):
                return
            yield point_of(candidate)

    with closing(evaluator.outcomes(points())) as stream:
        for point, outcome, _ in stream:
            one = SimulatedLayout(candidates[point.number], outcome)
            simulated.append(one)
            best.append(one.step_time_s)
            best.sort()
            watch(one)
    simulated.sort(key=lambda one: (one.step_time_s, one.candidate.number))
    numbers = {one.candidate.number for one in simulated}
    left = [one.bound.step_time_s for one in space.fitting if one.number not in numbers]
    next_bound_s = min(left, default=math.inf) if space.complete else 0.0
    failed = [one.candidate.bound.step_time_s for one in simulated if one.outcome.status == Status.FAILED]
    failed_bound_s = min(failed, default=math.inf)
    unknown_s = min(next_bound_s, failed_bound_s)
    n_proven = sum(one.step_time_s <= unknown_s and math.isfinite(one.step_time_s) for one in simulated)
    if math.isfinite(unknown_s):
        n_proven = min(n_proven, top)
    return Ranking(tuple(simulated), n_proven, next_bound_s, failed_bound_s)


def pareto_front(ranking: Ranking) -> tuple[SimulatedLayout, ...]:
    """Return the simulated layouts that fit, and of which none other is faster and leaves as much memory.

    The fastest is first; each following one is slower and leaves more.
    """
    weighed = ("step_time_s", "headroom_bytes")
    return tuple(undominated(ranking.fitting, lambda one: losses(one.outcome.figures, weighed)))
