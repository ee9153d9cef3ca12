"""The notice of a simulation that takes long: how far it is, and how long it will take yet."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from simulator.cli.terminal import progress, say

#: A play that will take this long is told of, s.
LONG_s = 30.0
#: Seconds of a play from which it is judged how long it takes, and seconds between two lines that tell of it.
JUDGED_AFTER_s, BETWEEN_LINES_s = 3.0, 60.0
#: Seconds left of a play below which no line tells of it.
LEAST_LEFT_s = 1.0


@contextmanager
def simulating(what: str) -> Iterator[None]:
    """Say on standard error how far the play within is: always on a terminal, else where it takes `LONG_s`."""
    from simulator.engine.progress import watched

    with progress(f"simulating {what}") as far:

        def line(text: str) -> None:
            if not sys.stderr.isatty():
                say(f"{what}: {text}", sys.stderr)

        with watched(PlayNotice(far, line, time.monotonic)):
            yield


class PlayNotice:
    """Words on plays, one after another: to ``far`` as each goes on, to ``line`` those of long ones, now and then.

    A play goes on as fast as it has so far: its blocks of kernels take about the same each.
    """

    def __init__(self, far: Callable[[str], object], line: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._far, self._line, self._clock = far, line, clock
        self._share = math.inf
        self._first = self._began_s = 0.0
        self._next_line_s = 0.0

    def __call__(self, share: float) -> None:
        """Hear which share of a play has ended. A smaller one than before is of another play."""
        now_s = self._clock()
        if share < self._share:
            self._first, self._began_s, self._next_line_s = share, now_s, now_s + JUDGED_AFTER_s
        self._share = share
        if share <= self._first:
            return
        passed_s = now_s - self._began_s
        left_s = passed_s * (1.0 - share) / (share - self._first)
        text = f"simulated {100 * share:.0f} % of the step, about {_rounded(left_s)} left"
        self._far(text)
        if now_s >= self._next_line_s and passed_s + left_s >= LONG_s and left_s >= LEAST_LEFT_s:
            self._next_line_s = now_s + BETWEEN_LINES_s
            self._line(text)


def _rounded(seconds: float) -> str:
    """Return a time for a person to read, in seconds up to two minutes.

    >>> _rounded(41.3), _rounded(200.0)
    ('41 s', '3 min')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
