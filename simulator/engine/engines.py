"""The engines that play programs, and which one does.

Both play all programs to the same times. The compiled one is used wherever the package was built with a C compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from simulator.bounds import EngineChoice
from simulator.cluster import Cluster
from simulator.engine.compiled.library import why_missing
from simulator.engine.compiled.play import CompiledEngine
from simulator.engine.placement import Placed
from simulator.engine.play import PlayedJobs, SimpyEngine
from simulator.engine.recorder import GpuClocks
from simulator.engine.representatives import SimulatedCluster
from simulator.errors import InputError


class Player(Protocol):
    """Jobs on a simulated cluster, to be played once or several times."""

    def play(self, clocks: Sequence[GpuClocks]) -> PlayedJobs: ...


def engine_in_use(engine: EngineChoice = "auto") -> Literal["compiled", "python"]:
    """Return which engine plays. Raises `InputError` where the compiled one is asked for, and is not there."""
    if engine == "auto":
        return "python" if why_missing() else "compiled"
    if engine == "compiled" and (reason := why_missing()):
        what = f"the compiled engine cannot be used: {reason}"
        raise InputError(what, key="simulation.engine", found=engine, fix="auto or python")
    return engine


def player(
    engine: EngineChoice, jobs: Sequence[Placed], simulated: SimulatedCluster, cluster: Cluster, coalesce: bool
) -> Player:
    """Return what plays jobs. Raises as `engine_in_use`."""
    kind = CompiledEngine if engine_in_use(engine) == "compiled" else SimpyEngine
    return kind(jobs, simulated, cluster, coalesce)
