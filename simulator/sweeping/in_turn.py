"""Runner that simulates one point after another in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import partial

from simulator.sweeping.equal_points import EqualPoints
from simulator.sweeping.evaluation import evaluate
from simulator.sweeping.outcome import PointOutcome
from simulator.sweeping.point import Point


class InTurn:
    """Runner without other processes, for points so few or quick that starting one would take longer."""

    def outcomes(
        self, points: Iterable[Point], finished: frozenset[str], claim: Callable[[str], bool]
    ) -> Generator[tuple[Point, PointOutcome], None, None]:
        """Yield points with their outcomes (see `simulator.sweeping.runner.Runner`)."""
        equal = EqualPoints(claim)
        for point in points:
            outcome = evaluate(point, finished, partial(equal.begins, point))
            equal.ended(point, outcome.key)
            yield point, outcome
