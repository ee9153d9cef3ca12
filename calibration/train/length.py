"""How many steps a run has; of its own, so that who only starts runs need not wait for the trainer's imports."""

from __future__ import annotations

from dataclasses import dataclass

#: Steps under the profiler; the last is kept.
PROFILED = 2


@dataclass(frozen=True)
class Length:
    """How long a run goes on: warm-up steps, then timed ones for ``seconds``, at least ``least`` and at most ``most``,
    then `PROFILED` under the profiler, the last of which is kept. ``probe_all``: hosts are probed between all timed
    steps, not once."""

    warm_up: int = 3
    least: int = 5
    most: int = 60
    seconds: float = 4.0
    probe_all: bool = False
