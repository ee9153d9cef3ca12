"""Runners of points: the one part that differs between cores of this machine and machines of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Protocol

from simulator.sweeping.outcome import PointOutcome
from simulator.sweeping.point import Point


class Runner(Protocol):
    """Evaluates points somewhere.

    An implementation evaluates each point once, as `simulator.sweeping.evaluation.evaluate` does, wherever it likes.
    Where the process that does so dies, another one is given the point. After a few the outcome is `Status.FAILED`.
    Of points with one key one is simulated. The outcome of the others is `Status.KEPT`, and comes after it (see
    `simulator.sweeping.equal_points.EqualPoints`).
    """

    def outcomes(
        self, points: Iterable[Point], finished: frozenset[str], claim: Callable[[str], bool]
    ) -> Generator[tuple[Point, PointOutcome], None, None]:
        """Yield points with their outcomes as they are ready, in any order; points are taken as they are needed.

        ``finished``: keys that need no simulation. ``claim`` is asked before one of a key begins; where it says no, the
        outcome is `Status.KEPT`, as another command is at it, or has finished it meanwhile. Closing the generator ends
        all that is under way.
        """
