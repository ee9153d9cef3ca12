"""Evaluation of points, of which none is simulated that a store has: a runner beside what was finished before."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from simulator.sweeping.claims import Claims
from simulator.sweeping.in_turn import InTurn
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point
from simulator.sweeping.runner import Runner
from simulator.sweeping.store import Store

#: Seconds between two looks at what other commands have finished.
_LOOK_s = 0.2


class EvaluatedPoint(NamedTuple):
    """A point, what came of it, and whether that is new: not from the store."""

    point: Point
    outcome: PointOutcome
    is_new: bool


@dataclass
class Evaluator:
    """Evaluates points on a ``runner``, and keeps every outcome in a ``store`` as soon as it is there.

    ``retry_failed``: points whose simulator or process broke down before are tried again. ``n_kept``: how many
    outcomes came from the store, where an earlier command or one beside this has put them. Of equal points one is
    simulated. ``_new``: keys of the outcomes that did not come from there.
    """

    runner: Runner
    store: Store
    retry_failed: bool = False
    n_kept: int = 0
    _new: set[str] = field(default_factory=set)

    def outcomes(self, points: Iterable[Point]) -> Generator[EvaluatedPoint, None, None]:
        """Yield points with their outcomes as they are ready (see `Runner`); closing it ends all that is under way."""
        yield from self._outcomes(self.runner, points)

    def here(self, point: Point) -> PointOutcome:
        """Return the outcome of one point, which is simulated in this process where the store has none."""
        (one,) = self._outcomes(InTurn(), [point])
        return one.outcome

    def _outcomes(self, runner: Runner, points: Iterable[Point]) -> Generator[EvaluatedPoint, None, None]:
        """Yield outcomes of a ``runner``; points that another command has begun come when that has finished them."""
        finished = self.store.finished(failed=not self.retry_failed)
        elsewhere: list[tuple[Point, str]] = []
        left: Iterable[Point] | None = points
        with Claims.on(self.store, failed=not self.retry_failed) as claims:
            while left is not None:
                with closing(runner.outcomes(left, finished, claims.take)) as stream:
                    for point, outcome in stream:
                        key, is_known = outcome.key, outcome.status != Status.KEPT or outcome.key in self._new
                        if is_known or claims.is_finished(key):
                            yield self._kept(point, outcome)
                        else:
                            elsewhere.append((point, key))
                        yield from self._finished_elsewhere(elsewhere, claims)
                left = None
                while elsewhere and not left:
                    time.sleep(_LOOK_s)
                    yield from self._finished_elsewhere(elsewhere, claims)
                    left = _abandoned(elsewhere, claims)

    def _finished_elsewhere(self, elsewhere: list[tuple[Point, str]], claims: Claims) -> Iterator[EvaluatedPoint]:
        """Yield points that other commands have finished, and take them off the list."""
        for entry in [(point, key) for point, key in elsewhere if claims.is_finished(key)]:
            elsewhere.remove(entry)
            yield self._kept(entry[0], PointOutcome(entry[1], Status.KEPT))

    def _kept(self, point: Point, outcome: PointOutcome) -> EvaluatedPoint:
        """Commit an outcome that is new, or take it from the store."""
        if outcome.status == Status.KEPT:
            self.n_kept += outcome.key not in self._new
            return EvaluatedPoint(point, self.store.outcome(outcome.key), False)
        self._new.add(outcome.key)
        self.store.add(point, outcome)
        return EvaluatedPoint(point, outcome, True)


def _abandoned(elsewhere: list[tuple[Point, str]], claims: Claims) -> list[Point] | None:
    """Return the points whose command has ended without an outcome, off the list; None where there are none."""
    entries = [(point, key) for point, key in elsewhere if not claims.is_under_way(key)]
    for entry in entries:
        elsewhere.remove(entry)
    return [point for point, _ in entries] or None
