"""Runners of points: the one part that differs between cores of this machine and machines of a cluster."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Protocol

from simulator.sweeping.outcome import PointOutcome
from simulator.sweeping.point import Point


class Runner(Protocol):
    """Evaluates points somewhere.

    An implementation calls `simulator.sweeping.evaluation.evaluate` once for each point, wherever it likes. Where the
    process that does so dies, another one is given the point, once. Then the outcome is `Status.FAILED`.
    """

    def outcomes(
        self, points: Iterable[Point], finished: frozenset[str]
    ) -> Generator[tuple[Point, PointOutcome], None, None]:
        """Yield points with their outcomes as they are ready, in any order; points are taken as they are needed.

        ``finished``: keys that need no simulation. Closing the generator ends all that is under way.
        """
