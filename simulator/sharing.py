"""Python entry point of several jobs on one cluster at once: `share`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from simulator.analysis.training.steady_state import STEPS, SteadyState, steady_alone, steady_until, steps_begun
from simulator.api import cluster_of, rehearse, run_step
from simulator.bounds import EngineChoice
from simulator.cluster import Cluster
from simulator.config import Workload, load_workload
from simulator.config.loading import check_products
from simulator.config.profile import check_one_vendor, load_profiles
from simulator.config.rules import scale
from simulator.config.shared_jobs import calibrations_of_jobs, check_several, with_distinct_names, with_nodes
from simulator.config.stack import check_stack, load_stack
from simulator.costs import Costs
from simulator.engine import Placed, simulate_together
from simulator.errors import InputError
from simulator.hardware.profile import Profile
from simulator.input_files import brief
from simulator.lowering import build_program
from simulator.program import Program
from simulator.results import PlayedResult, numbered_timelines
from simulator.schedules import Times
from simulator.step_result import StepResult
from simulator.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType

#: Most steps of one job that are played.
MAX_STEPS = 256
#: Most rounds in which all jobs are played together, each with more steps, until every job has a stable period.
MAX_ROUNDS = 5
#: Factor on the estimated number of steps.
_MARGIN = 1.1


@dataclass(frozen=True, repr=False)
class SharedResult(PlayedResult):
    """Result of jobs on one cluster at once.

    ``results``: each job as it repeats its step beside the others. Its step time is the mean period, its placement the
    list of its nodes. ``alone_s``: the period with the cluster to itself, on the same nodes. ``steps``: steps played.
    ``notes``: warnings about playing them together.
    """

    command: ClassVar[str] = "run"

    cluster: Cluster
    results: tuple[StepResult, ...]
    alone_s: tuple[float, ...]
    steps: tuple[int, ...]
    notes: tuple[str, ...]

    @cached_property
    def warnings(self) -> list[str]:
        """Warnings of the jobs under their names, and those of playing them together.

        GPUs without work are GPUs that no job has.
        """
        job_warnings = [f"{result.job_name}: {warning}" for result in self.results for warning in _job_warnings(result)]
        busy = sum(
            result.workload.n_ranks + sum(len(self.cluster.gpus_of(node)) for node in result.workload.server_nodes)
            for result in self.results
        )
        total = len(self.cluster.gpus)
        idle = [scale.without_rank(total - busy, total)] if total > busy else []
        return [*job_warnings, *idle, *self.notes]

    def content(self) -> dict[str, Any]:
        """Return the figures under the names of the JSON output, SI units.

        ``runs``: each job's result with ``sharing``: its nodes, the period alone, lost seconds and slowdown.
        """
        runs = []
        for result, alone_s, steps in zip(self.results, self.alone_s, self.steps, strict=True):
            shared_s = result.spans.step_time_s
            sharing = {
                "nodes": list(result.workload.own_nodes),
                "alone_step_time_s": alone_s,
                "lost_s": shared_s - alone_s,
                "slowdown": shared_s / alone_s,
                "steps_played": steps,
            }
            runs.append({**result.to_dict(), "warnings": _job_warnings(result), "sharing": sharing})
        spec = self.cluster.spec
        return {"share_fabric": {"cluster": spec.name, "nodes": spec.n_nodes}, "runs": runs}

    def __repr__(self) -> str:
        """Return the first table of the summary."""
        from simulator.output.summary import shared_opening

        return shared_opening(self.report)

    def summary(self) -> RenderableType:
        """Return the results as tables for a terminal."""
        from simulator.output.summary import shared

        return shared(self.report)

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """Rows of all jobs, each from time 0 of its own period: ``job``, then the columns of `Timeline.frame`."""
        import pandas as pd

        frames = [result.timeline.assign(job=result.job_name) for result in self.results]
        rows = pd.concat(frames, ignore_index=True)
        return rows[["job", *rows.columns.drop("job")]]

    def gantt(self) -> Figure:
        """Draw the jobs' Timelines below each other, each from time 0 of its own period."""
        from simulator.output.gantt import compare_gantt

        return compare_gantt(numbered_timelines(self.results))

    def save_trace(self, path: str | Path) -> None:
        """Write a Chrome/Perfetto trace per job, named ``path`` with the job's number before its suffix.

        ``trace.json.gz`` becomes ``trace.1.json.gz``, ``trace.2.json.gz`` and so on.
        """
        path = Path(path)
        suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
        for number, result in enumerate(self.results, 1):
            result.save_trace(path.with_name(f"{path.name.removesuffix(suffix)}.{number}{suffix}"))


def _job_warnings(result: StepResult) -> list[str]:
    """Return a job's warnings without those of GPUs that it leaves to others."""
    idle_gpus = list(scale.warnings(result.workload))
    return [warning for warning in result.warnings if warning not in idle_gpus]


@dataclass(frozen=True)
class _SharedJob:
    """A workload ready to be played on the nodes of the cluster that it lists."""

    workload: Workload
    profiles: Mapping[str, Profile]
    costs: Costs
    cluster: Cluster
    times: Times | None

    @classmethod
    def prepare(cls, workload: Workload, cluster: Cluster, calibrations: Mapping[str, str]) -> _SharedJob:
        """Read profiles and stack of a job, and rehearse it where its schedule is tuned.

        ``calibrations``: type of GPU -> profile, for all jobs, as they share links.
        """
        all_profiles = load_profiles(calibrations, workload.training)
        profiles = {gpu: all_profiles[gpu] for gpu in workload.gpu_types}
        for profile in profiles.values():
            check_products(profile, workload, lambda key: (None, key))
        check_one_vendor(profiles, key="placement")
        network = None
        if workload.stack:
            network = load_stack(workload.stack)
            for gpu in profiles:
                check_stack(network, gpu, key="stack")
        costs = Costs.from_profiles(all_profiles, workload.software, network)
        searches = workload.parallelism.pipeline_schedule.search is not None
        times = rehearse(workload, cluster, costs) if searches else None
        return cls(workload, profiles, costs, cluster, times)

    def program(self, steps: int) -> Program:
        return build_program(self.workload, times=self.times, steps=steps)

    def period(self, timeline: Timeline, steps: int, begun: Mapping[int, int]) -> SteadyState | None:
        """Return the period of the steps that its ranks have ``begun``; None where these are too few."""
        if self.workload.parallelism.data_parallel == "async":
            return steady_alone(timeline, steps, self.workload.microbatches, begun)
        return steady_until(timeline, steps, self.workload.microbatches, begun)

    def alone_s(self, steps: int, beside: Timeline | None = None, until_s: float = math.inf) -> float:
        """Return the period with the cluster to itself, s.

        ``beside``: the job's Timeline beside others. The period is then that of the steps begun there by ``until_s``,
        so that a job that meets nobody loses nothing.
        """
        timeline = _play_together([self], [self.program(steps)])[0]
        begun = steps_begun(timeline if beside is None else beside, steps, until_s)
        if beside is not None:
            begun = {rank: begun[beside.simulated_as[rank]] for rank in timeline.ranks}
        state = self.period(timeline, steps, begun)
        assert state is not None  # four steps have three periods
        return state.period.step_time_s


@dataclass(frozen=True)
class _Round:
    """Jobs played together once: of each the number of ``steps``, program, Timeline and period, None if not found."""

    steps: tuple[int, ...]
    programs: tuple[Program, ...]
    timelines: tuple[Timeline, ...]
    periods: tuple[SteadyState | None, ...]

    @classmethod
    def play(cls, jobs: Sequence[_SharedJob], steps: Sequence[int]) -> _Round:
        programs = tuple(job.program(count) for job, count in zip(jobs, steps, strict=True))
        timelines = _play_together(jobs, programs)
        first_end_s = min(timeline.length_s for timeline in timelines)
        periods = tuple(
            job.period(timeline, count, steps_begun(timeline, count, first_end_s))
            for job, timeline, count in zip(jobs, timelines, steps, strict=True)
        )
        return cls(tuple(steps), programs, timelines, periods)

    @property
    def first_end_s(self) -> float:
        """End of the job that ends first."""
        return min(timeline.length_s for timeline in self.timelines)

    @property
    def settled(self) -> bool:
        """Every job has a stable period."""
        return all(period is not None and period.stable for period in self.periods)

    def longer(self) -> tuple[int, ...]:
        """Return the steps of the next round.

        Where a job has no period yet, those that end first go on until the last has ended. Otherwise all do twice as
        many.
        """
        if all(period is not None for period in self.periods):
            return tuple(min(2 * count, MAX_STEPS) for count in self.steps)
        ends = [timeline.length_s for timeline in self.timelines]
        more = [
            count if end == max(ends) else math.ceil(_MARGIN * count * max(ends) / end)
            for count, end in zip(self.steps, ends, strict=True)
        ]
        return tuple(min(count, MAX_STEPS) for count in more)


def share(
    workloads: Sequence[str | Path | Mapping[str, Any] | Workload], *, set: Mapping[str, Any] | None = None
) -> SharedResult:
    """Simulate several ``workloads`` on one cluster at once, each on nodes of its own (their ``placement``).

    Transfers meet on the links that they share. ``set`` changes dotted keys of all workloads first. They all name the
    same cluster. It has as many nodes as the largest workload says, or as they need together.

    All jobs begin at one moment and repeat their step, the shorter ones more often, so that no job ever has the cluster
    to itself. Step times are mean periods. Equal jobs stay in step and meet in every step, the worst case.

    Raises `InputError`, such as for jobs of different clusters.
    """
    if not isinstance(workloads, Sequence) or isinstance(workloads, str | bytes):
        allowed = "a list of 2 and more, such as ['gpt22b_tp8', 'gpt22b_tp8']"
        raise InputError("must be a list of workloads", key="workloads", found=brief(workloads), allowed=allowed)
    loaded = [load_workload(one, set or {}) for one in workloads]
    check_several(loaded)
    placed, nodes = with_nodes(with_distinct_names(loaded))
    cluster, calibrations = cluster_of(placed[0], nodes), calibrations_of_jobs(placed)
    on_cluster = [workload.model_copy(update={"cluster": cluster.spec}) for workload in placed]
    jobs = [_SharedJob.prepare(workload, cluster, calibrations) for workload in on_cluster]
    estimates_s = [job.alone_s(STEPS) for job in jobs]
    first_steps = [min(MAX_STEPS, math.ceil(STEPS * max(estimates_s) / period_s)) for period_s in estimates_s]
    played = _play_until_settled(jobs, first_steps)
    notes: list[str] = []
    results: list[StepResult] = []
    alone_s: list[float] = []
    for number, job in enumerate(jobs):
        timeline, count, period = played.timelines[number], played.steps[number], played.periods[number]
        until_s = math.inf if period is None else played.first_end_s
        alone_s.append(job.alone_s(count, timeline, until_s))
        if period is None:
            period = job.period(timeline, count, steps_begun(timeline, count, until_s))
            assert period is not None
            notes.append(
                f"{job.workload.name}: its steps are so much longer than others' that it had parts of them to itself "
                f"({MAX_STEPS} steps of a job are played at most): it loses more than is said here"
            )
        program = played.programs[number]
        played_job = (job.workload, job.profiles, cluster, job.costs, program, period.period, period)
        results.append(StepResult(*played_job, is_shared=True, simulate=run_step))
    return SharedResult(cluster, tuple(results), tuple(alone_s), played.steps, tuple(notes))


def _play_until_settled(jobs: Sequence[_SharedJob], steps: Sequence[int]) -> _Round:
    """Play rounds of more and more steps, until each job has a stable period or no more steps are allowed."""
    played = _Round.play(jobs, steps)
    for _ in range(MAX_ROUNDS - 1):
        longer = played.longer()
        if played.settled or longer == played.steps:
            break
        played = _Round.play(jobs, longer)
    return played


def _play_together(jobs: Sequence[_SharedJob], programs: Sequence[Program]) -> tuple[Timeline, ...]:
    cluster = jobs[0].cluster
    placed = [
        Placed.on(program, job.costs, cluster, job.workload.nodes) for job, program in zip(jobs, programs, strict=True)
    ]
    asked = [job.workload.simulation for job in jobs]
    fold, coalesce = all(one.fold for one in asked), all(one.coalesce for one in asked)
    engines = {one.engine for one in asked}
    engine: EngineChoice = "python" if "python" in engines else "compiled" if "compiled" in engines else "auto"
    return simulate_together(placed, cluster, fold=fold, coalesce=coalesce, engine=engine)
