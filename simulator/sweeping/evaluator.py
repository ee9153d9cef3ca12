"""Evaluation of points, of which none is simulated that a store has: a runner beside what was finished before."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from simulator.sweeping.evaluation import evaluate
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point
from simulator.sweeping.runner import Runner
from simulator.sweeping.store import Store


class EvaluatedPoint(NamedTuple):
    """A point, what came of it, and whether that is new: not from the store."""

    point: Point
    outcome: PointOutcome
    is_new: bool


@dataclass
class Evaluator:
    """Evaluates points on a ``runner``, and keeps every outcome in a ``store`` as soon as it is there.

    ``retry_failed``: points whose simulator or process broke down before are tried again. ``n_kept``: how many
    outcomes were in the store before. Of equal points one is simulated.
    """

    runner: Runner
    store: Store
    retry_failed: bool = False
    n_kept: int = 0

    def outcomes(self, points: Iterable[Point]) -> Generator[EvaluatedPoint, None, None]:
        """Yield points with their outcomes as they are ready (see `Runner`); closing it ends all that is under way."""
        finished = self._finished()
        with closing(self.runner.outcomes(points, finished)) as stream:
            for point, outcome in stream:
                yield self._kept(point, outcome, finished)

    def here(self, point: Point) -> PointOutcome:
        """Return the outcome of one point, which is simulated in this process where the store has none."""
        finished = self._finished()
        return self._kept(point, evaluate(point, finished), finished).outcome

    def _finished(self) -> frozenset[str]:
        return self.store.finished(failed=not self.retry_failed)

    def _kept(self, point: Point, outcome: PointOutcome, finished: frozenset[str]) -> EvaluatedPoint:
        """Commit an outcome that is new, or take it from the store, where ``finished`` ones were before."""
        if outcome.status == Status.KEPT:
            self.n_kept += outcome.key in finished
            return EvaluatedPoint(point, self.store.outcome(outcome.key), False)
        self.store.add(point, outcome)
        return EvaluatedPoint(point, outcome, True)
