"""Plays of a random job: as it is, alone on an idle network, with and without shortcuts; each at most once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

from simulator.analysis.training import steady_state
from simulator.api import run, run_step
from simulator.bounds import EngineChoice
from simulator.config import Workload
from simulator.config.workload import Simulation
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.engine.compiled.handle import SimulationHandle
from simulator.network.flows import Network
from simulator.network.simulated_time import SimulatedTime
from simulator.step_result import StepResult
from simulator.timeline import Timeline
from tests.support.random_jobs import Job, load

#: Steps in a row that are played at most: what has not settled until then is compared all the same.
MAX_STEPS = steady_state.STEPS


@dataclass(frozen=True)
class Plays:
    """A random job, with the plays of it that several checks look at."""

    job: Job

    @cached_property
    def workload(self) -> Workload:
        """The job as loaded."""
        return load(self.job)

    @cached_property
    def quick(self) -> StepResult:
        """The step with every shortcut."""
        return played(self.workload)

    @cached_property
    def plain(self) -> StepResult:
        """The step with neither folding nor coalescing."""
        return played(self.workload, fold=False, coalesce=False)

    @cached_property
    def alone(self) -> StepResult:
        """The step with nothing shared."""
        return alone_step(self.workload)

    @cached_property
    def shared(self) -> Timeline:
        """The timeline of `quick` without a power limit."""
        quick, costs = self.quick, _unlimited(self.quick.costs)
        if costs == quick.costs:
            return quick.played
        return simulate(quick.program, quick.cluster, costs, nodes=quick.workload.nodes)

    @cached_property
    def shared_alone(self) -> Timeline:
        """The timeline of `quick`'s program with nothing shared."""
        one_step = self.quick.steady is None and self.workload.parallelism.pipeline_schedule.search is None
        return self.alone.played if one_step else alone_timeline(self.quick)


def played(
    workload: Workload,
    *,
    fold: bool = True,
    coalesce: bool = True,
    steady: bool = True,
    engine: EngineChoice = "auto",
) -> StepResult:
    """Return the step of a loaded workload with these shortcuts, by an engine."""
    simulation = Simulation(fold=fold, coalesce=coalesce, steady=steady, engine=engine)
    with patch.object(steady_state, "MAX_STEPS", MAX_STEPS):
        return run(workload.model_copy(update={"simulation": simulation}))


def content(result: StepResult) -> dict[str, Any]:
    """Return the figures of a result without advice, which takes more simulations."""
    with ExitStack() as stack:
        stack.enter_context(patch("simulator.step_result._better_split", lambda result, now: None))
        stack.enter_context(patch("simulator.step_result.advice", lambda memories, workload, needed_bytes: []))
        return result.content()


class IdleNetwork(Network):
    """A network on which every transfer is as fast as on an idle one, whatever else is under way."""

    def __init__(self, env: SimulatedTime, capacity_Bps: Sequence[float]) -> None:
        super().__init__(env, [math.inf] * len(capacity_Bps))  # the cap of a phase is its rate on an idle network


class HandleOfIdleNetwork(SimulationHandle):
    """A compiled simulation on such a network."""

    def __init__(
        self, answers: dict[str, Callable[..., int]], capacity_Bps: Sequence[float], sizes: tuple[int, int, int, int]
    ) -> None:
        super().__init__(answers, [math.inf] * len(capacity_Bps), sizes)


@contextmanager
def idle_links() -> Iterator[None]:
    """Let both engines play on links that are never full, as in `IdleNetwork`."""
    with ExitStack() as stack:
        stack.enter_context(patch("simulator.engine.play.Network", IdleNetwork))
        stack.enter_context(patch("simulator.engine.compiled.play.SimulationHandle", HandleOfIdleNetwork))
        stack.enter_context(patch.object(steady_state, "MAX_STEPS", MAX_STEPS))
        yield


def alone_timeline(result: StepResult) -> Timeline:
    """Return ``result``'s program as played with nothing shared: idle links, kernels undisturbed, no power limit."""
    with idle_links():
        return simulate(result.program, result.cluster, result.costs.undisturbed(), nodes=result.workload.nodes)


def alone_step(workload: Workload) -> StepResult:
    """Return a step with nothing shared, as in `alone_timeline`."""
    with idle_links():
        return run_step(workload, interference=False)


def _unlimited(costs: Costs) -> Costs:
    """Return the same costs without a power limit."""
    if costs.power is None and all(one.power is None for one in costs.by_type.values()):
        return costs
    by_type: Mapping[str, Costs] = {gpu: _unlimited(one) for gpu, one in costs.by_type.items()}
    return replace(costs, power=None, by_type=by_type)
