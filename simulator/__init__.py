"""A discrete-event simulator of LLM training on GPU clusters: how fast, how full, and why, before anything is rented.

`run` simulates a training step of a workload, and `sweep` many that differ in a few keys. `search` finds the best
layout, `plan` the fewest GPUs, and `advise` changes that help. `share` simulates several jobs on one cluster,
`schedule` a pipeline schedule without a model, and `capture` makes a model of a PyTorch module. `check`, `collective`,
`topology` and `validate` are the commands of those names. `plot` draws results. `simulate` is the engine beneath: a
program on a cluster. Unusable input raises `errors.InputError`.

>>> import simulator
>>> simulator.schedule("1f1b", stages=4, microbatches=8).to_dict()["bubble_ratio"]
0.375
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator import plot
    from simulator.advising.advise import SpeedAdvice, advise
    from simulator.api import run
    from simulator.captured import CapturedModel
    from simulator.capturing.entry import capture
    from simulator.commands.check import CheckResult, check
    from simulator.commands.collective import CollectiveResult, collective
    from simulator.commands.topology import TopologyResult, topology
    from simulator.commands.validate import ValidationResult, validate
    from simulator.engine import simulate
    from simulator.planning.entry import plan
    from simulator.planning.result import PlanResult
    from simulator.results import Result
    from simulator.schedule_alone import ScheduleResult, schedule
    from simulator.searching.entry import search
    from simulator.searching.result import SearchResult
    from simulator.sharing import SharedResult, share
    from simulator.step_result import StepResult
    from simulator.sweeping.entry import sweep
    from simulator.sweeping.result import SweepResult

__version__ = "0.2.0"
__all__ = [
    "CapturedModel",
    "CheckResult",
    "CollectiveResult",
    "PlanResult",
    "Result",
    "ScheduleResult",
    "SearchResult",
    "SharedResult",
    "SpeedAdvice",
    "StepResult",
    "SweepResult",
    "TopologyResult",
    "ValidationResult",
    "advise",
    "capture",
    "check",
    "collective",
    "plan",
    "plot",
    "run",
    "schedule",
    "search",
    "share",
    "simulate",
    "sweep",
    "topology",
    "validate",
]

#: Modules of names that are loaded at first use: reading a workload file on a bare GPU machine must import neither
#: SimPy nor matplotlib.
_HOME = {
    "capture": "simulator.capturing.entry",
    "CapturedModel": "simulator.captured",
    "advise": "simulator.advising.advise",
    "SpeedAdvice": "simulator.advising.advise",
    "check": "simulator.commands.check",
    "CheckResult": "simulator.commands.check",
    "collective": "simulator.commands.collective",
    "CollectiveResult": "simulator.commands.collective",
    "simulate": "simulator.engine",
    "schedule": "simulator.schedule_alone",
    "ScheduleResult": "simulator.schedule_alone",
    "search": "simulator.searching.entry",
    "plan": "simulator.planning.entry",
    "PlanResult": "simulator.planning.result",
    "SearchResult": "simulator.searching.result",
    "share": "simulator.sharing",
    "SharedResult": "simulator.sharing",
    "Result": "simulator.results",
    "sweep": "simulator.sweeping.entry",
    "SweepResult": "simulator.sweeping.result",
    "topology": "simulator.commands.topology",
    "TopologyResult": "simulator.commands.topology",
    "StepResult": "simulator.step_result",
    "validate": "simulator.commands.validate",
    "ValidationResult": "simulator.commands.validate",
}


def __dir__() -> list[str]:
    """List all names, so that ``help(simulator)`` and completion show those that are loaded at first use."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "plot":
        return import_module("simulator.plot")
    return getattr(import_module(_HOME.get(name, "simulator.api")), name)
