"""Python entry point of a training step: `run`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from simulator.analysis.training.rehearsal import rehearsed_times
from simulator.analysis.training.steady_state import until_steady
from simulator.cluster import Cluster, recent_cluster
from simulator.config import Workload, load_workload
from simulator.config.loading import written_in
from simulator.config.profile import load_profiles
from simulator.config.stack import load_stack
from simulator.costs import Costs, recent_costs
from simulator.engine import Placed, UnsteadyError, check_routes, simulate
from simulator.errors import InputError, amended, located
from simulator.lowering import build_program, shortened
from simulator.program import Program, Repetition
from simulator.schedules import Times
from simulator.step_result import StepResult
from simulator.timeline import Timeline


def run(workload: str | Path | Mapping[str, Any] | Workload, *, set: Mapping[str, Any] | None = None) -> StepResult:
    """Simulate one training step of ``workload``: a file, a shipped name, a mapping or a loaded `Workload`.

    ``set`` changes dotted keys first, such as ``{"parallelism.pp": 4}``. Raises `InputError` on what cannot be used.
    """
    job = workload if isinstance(workload, Workload) and not set else load_workload(workload, set or {})
    with located(written_in(workload if isinstance(workload, str | Path) else None, set or {}, "set")):
        return run_step(job)


def run_step(workload: Workload, *, interference: bool = True, built: Cluster | None = None) -> StepResult:
    """Simulate one training step.

    Without ``interference`` communication does not slow kernels. ``built``: a cluster that is reused if it is the
    workload's.
    """
    profiles = load_profiles(workload.calibrations, workload.training)
    cluster = built if built is not None and built.spec == workload.cluster else cluster_of(workload)
    network = load_stack(workload.stack) if workload.stack else None
    costs = recent_costs(profiles, workload.software, network)
    schedule, shortcuts = workload.parallelism.pipeline_schedule, workload.simulation.engine_options
    times = None if schedule.search is None else rehearse(workload, cluster, costs)
    if not interference:
        costs = costs.undisturbed()

    def build(steps: int) -> Program:
        return build_program(workload, times=times, steps=steps)

    def play(program: Program, repetition: Repetition | None = None) -> Timeline:
        with amended(_name_algorithm):
            return simulate(program, cluster, costs, nodes=workload.nodes, repetition=repetition, **shortcuts)

    result = partial(StepResult, workload, profiles, cluster, costs, simulate=run_step)
    short = shortened(workload) if workload.simulation.steady else None
    if short is not None:
        program = build_program(workload, passes=short.order)
        with suppress(UnsteadyError):
            return result(program, play(program, short.repetition), repetition=short.repetition)

    together = workload.parallelism.data_parallel != "async"
    if together and not schedule.steady:
        program = build(1)
        return result(program, play(program))
    program, state = until_steady(build, lambda program, _: play(program), workload.microbatches, together=together)
    return result(program, state.period, state)


def check_algorithm(workload: Workload, cluster: Cluster) -> None:
    """Raise `InputError` where a group of ranks cannot all-reduce by ``parallelism.collective_algorithm``."""
    if workload.parallelism.collective_algorithm == "auto":
        return
    tuned = workload.parallelism.pipeline_schedule.search is not None
    program = build_program(_rehearsal(workload) if tuned else workload)
    costs = recent_costs(load_profiles(workload.calibrations, workload.training), workload.software, None)
    with amended(_name_algorithm):
        check_routes(Placed.on(program, costs, cluster, workload.nodes), cluster)


def _name_algorithm(error: InputError) -> None:
    """Let an error of the network's ``algorithm`` name the key of workload files that says it."""
    if error.key == "algorithm":
        error.key = "parallelism.collective_algorithm"
        error.fix = error.fix and error.fix.replace("algorithm ", "collective_algorithm: ")


def cluster_of(workload: Workload, nodes: int | None = None) -> Cluster:
    """Return the cluster of a workload, built before or now; `InputError`s are under its key."""
    with located(lambda key: (None, f"cluster.{key}" if key else "cluster")):
        return recent_cluster(workload.cluster, nodes)


def rehearse(workload: Workload, cluster: Cluster, costs: Costs) -> Times:
    """Return the times of passes, from a step of two micro-batches with a schedule that needs no tuning.

    Raises `InputError` where the memory limit leaves no room for a micro-batch.
    """
    parallelism, options = workload.parallelism, workload.simulation.engine_options
    timeline = simulate(build_program(_rehearsal(workload)), cluster, costs, nodes=workload.nodes, **options)
    times = rehearsed_times(timeline, parallelism.n_stages, parallelism.zb_memory_limit)
    try:
        parallelism.pipeline_schedule.tuned(times).order(parallelism.pp, workload.microbatches, parallelism.vpp)
    except ValueError as problem:
        raise InputError(str(problem), key="parallelism.zb_memory_limit", found=parallelism.zb_memory_limit) from None
    return times


def _rehearsal(workload: Workload) -> Workload:
    """Return the job with two micro-batches and a schedule that needs no tuning."""
    training, parallelism = workload.training, workload.parallelism
    return workload.model_copy(
        update={
            "training": training.model_copy(update={"global_batch": 2 * training.micro_batch * parallelism.dp}),
            "parallelism": parallelism.model_copy(update={"schedule": "zb_h1"}),
        }
    )
