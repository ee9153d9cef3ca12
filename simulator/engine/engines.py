"""The engines that play programs, and which one does.

Both play all programs to the same times. The compiled one is used wherever the package was built with a C compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from simulator.bounds import EngineChoice
from simulator.cluster import Cluster
from simulator.engine.compiled.library import why_missing
from simulator.engine.compiled.play import play_compiled
from simulator.engine.placement import Placed
from simulator.engine.play import PlayedJobs, play_on_simpy
from simulator.engine.recorder import GpuClocks
from simulator.engine.representatives import SimulatedCluster
from simulator.errors import InputError

#: Plays jobs to the end on a simulated cluster, with or without coalescing, each at its clocks.
Player = Callable[[Sequence[Placed], SimulatedCluster, Cluster, bool, Sequence[GpuClocks]], PlayedJobs]


def engine_in_use(engine: EngineChoice = "auto") -> Literal["compiled", "python"]:
    """Return which engine plays. Raises `InputError` where the compiled one is asked for, and is not there."""
    if engine == "auto":
        return "python" if why_missing() else "compiled"
    if engine == "compiled" and (reason := why_missing()):
        what = f"the compiled engine cannot be used: {reason}"
        raise InputError(what, key="simulation.engine", found=engine, fix="auto or python")
    return engine


def player(engine: EngineChoice) -> Player:
    """Return what plays programs."""
    return play_compiled if engine_in_use(engine) == "compiled" else play_on_simpy
