"""How many steps a run has; of its own, so that who only starts runs need not wait for the trainer's imports."""

from __future__ import annotations

from dataclasses import dataclass

#: Steps under the profiler; the last is kept, as clocks swing for three or four behind the rest while it starts.
PROFILED = 5


@dataclass(frozen=True)
class Length:
    """The length of a run: ``warm_up`` steps, rows of timed steps, and `PROFILED` steps under the profiler.

    Hosts are probed between two rows. Of the profiled steps the last is kept. A row is ``settle_s`` of steps that are
    not timed and ``row_s`` of steps that are, one at least. A GPU that has rested, as it does while hosts are probed,
    is faster than in training that goes on. At its power limit an H200 is 3 % faster in the first step after a rest of
    0.1 s or more. Then it is slower by as much, and swings for a second (calibration/results/README.md).
    There are ``least`` timed steps at least, ``most`` at most, and rows until all took ``seconds``.
    """

    warm_up: int = 3
    settle_s: float = 1.0
    row_s: float = 2.0
    least: int = 5
    most: int = 200
    seconds: float = 4.0
