"""Several jobs on one cluster at once: `share`."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.analysis.training.steady_state import STEPS, Steady, begun_by, own_paces, steady_until
from simulator.api import Result, rehearsed
from simulator.cluster import Cluster, cluster_of
from simulator.config import Workload, load_workload
from simulator.config.cluster import ClusterSpec
from simulator.config.profile import Profile, check_one_vendor, check_precision, load_profiles
from simulator.config.rules import scale
from simulator.config.stack import check_stack, load_stack
from simulator.costs import Costs
from simulator.engine import Placed, simulate_together
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.lowering import build_program
from simulator.output.envelope import envelope
from simulator.program import Program
from simulator.schedules import Times
from simulator.timeline import Timeline

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Steps of one job that are played at most.
MAX_STEPS = 256
#: Times that all jobs are played together, until each has done `STEPS` while all the others were under way and has
#: found its period.
MAX_ROUNDS = 5
#: Steps added to what an estimate says.
_MARGIN = 1.1


@dataclass(frozen=True, repr=False)
class Shared:
    """Jobs on one cluster at once. Of each: its ``results`` as it repeats its step beside the others, with the mean
    period as step time, its workload with a list of the nodes that it was given as placement; that period with the
    cluster to itself, on the same nodes (``alone_s``); and the ``steps`` that were played. ``notes``: what to know
    before trusting the figures."""

    cluster: Cluster
    results: tuple[Result, ...]
    alone_s: tuple[float, ...]
    steps: tuple[int, ...]
    notes: tuple[str, ...]

    @cached_property
    def warnings(self) -> list[str]:
        """Those of the jobs under their names, and those of playing them together. GPUs without work are those that no
        job has."""
        own = [f"{result.workload.name}: {warning}" for result in self.results for warning in _own_warnings(result)]
        taken = sum(
            result.workload.n_ranks + sum(len(self.cluster.gpus_of(node)) for node in result.workload.server_nodes)
            for result in self.results
        )
        total = len(self.cluster.gpus)
        idle = [scale.without_rank(total - taken, total)] if total > taken else []
        return [*own, *idle, *self.notes]

    @cached_property
    def _report(self) -> dict[str, Any]:
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
            runs.append({**result.to_dict(), "warnings": _own_warnings(result), "sharing": sharing})
        spec = self.cluster.spec
        return envelope("run", self.warnings, share_fabric={"cluster": spec.name, "nodes": spec.nodes}, runs=runs)

    def __repr__(self) -> str:
        """The first table of the summary."""
        from simulator.output.summary import shared_opening

        return shared_opening(self._report)

    def to_dict(self) -> dict[str, Any]:
        """``runs``: each job's result as `Result.to_dict` has it, and beside it ``sharing``: its nodes, the period
        alone, what it lost (s), and how many times as long its steps are. The caller's own."""
        return copy.deepcopy(self._report)

    def summary(self) -> RenderableType:
        """The results as tables for a terminal."""
        from simulator.output.summary import shared

        return shared(self._report)


def _own_warnings(result: Result) -> list[str]:
    """Without those of GPUs that have no rank of this job: others' may run there."""
    of_size = list(scale.warnings(result.workload))
    return [warning for warning in result.warnings if warning not in of_size]


@dataclass(frozen=True)
class _Job:
    """A workload made ready to be played on the nodes of the cluster that it lists."""

    workload: Workload
    profiles: Mapping[str, Profile]
    costs: Costs
    cluster: Cluster
    times: Times | None

    @classmethod
    def ready(cls, workload: Workload, cluster: Cluster, calibrations: Mapping[str, str]) -> _Job:
        """``calibrations``: type of GPU -> profile, of all jobs, whose links are as good as all of these say."""
        profiles = load_profiles(calibrations, workload.training.attention_kernel)
        own = {gpu: profiles[gpu] for gpu in workload.gpu_types}
        for profile in own.values():
            check_precision(profile, workload.training.precision)
        check_one_vendor(own, key="placement")
        network = None
        if workload.stack:
            network = load_stack(workload.stack)
            for gpu in own:
                check_stack(network, gpu, key="stack")
        costs = Costs.from_profiles(profiles, workload.software, network)
        searches = workload.parallelism.plan.search is not None
        times = rehearsed(workload, cluster, costs) if searches else None
        return cls(workload, own, costs, cluster, times)

    def program(self, steps: int) -> Program:
        return build_program(self.workload, times=self.times, steps=steps)

    def period(self, timeline: Timeline, steps: int, begun: Mapping[int, int]) -> Steady | None:
        """Return the period of the steps that its ranks have ``begun``; None where these are too few."""
        if self.workload.parallelism.data_parallel == "async":
            return own_paces(timeline, steps, self.workload.microbatches, begun)
        return steady_until(timeline, steps, self.workload.microbatches, begun)

    def alone_s(self, steps: int, beside: Timeline | None = None, until_s: float = math.inf) -> float:
        """Return its period with the cluster to itself, s: that of as many steps, and of the same, as it is said to
        have begun by ``until_s`` ``beside`` others, so that where nobody meets nothing is lost."""
        timeline = _together([self], [self.program(steps)])[0]
        begun = begun_by(timeline if beside is None else beside, steps, until_s)
        if beside is not None:
            begun = {rank: begun[beside.simulated_as[rank]] for rank in timeline.ranks}
        found = self.period(timeline, steps, begun)
        assert found is not None  # four steps have three periods
        return found.period.step_time_s


def share(
    workloads: Sequence[str | Path | Mapping[str, Any] | Workload], *, set: Mapping[str, Any] | None = None
) -> Shared:
    """Simulate several ``workloads`` on one cluster at once, each on nodes of its own (their ``placement``). Transfers
    meet on the links that they share. ``set`` changes dotted keys of all of them first.

    The cluster is the one that they all name, with as many nodes as the largest of them says, or as they need together.
    All begin at the same moment and repeat their step, the shorter ones more often, so that no job ever has the cluster
    to itself: step times are mean periods. Equal jobs stay in step and meet in every step, the worst case.

    Raises `InputError`, such as for jobs of different clusters.
    """
    if not isinstance(workloads, Sequence) or isinstance(workloads, str | bytes):
        allowed = "a list of 2 and more, such as ['gpt22b_tp8', 'gpt22b_tp8']"
        raise InputError("must be a list of workloads", key="workloads", found=brief(workloads), allowed=allowed)
    cluster, jobs = _placed(_named([load_workload(workload, set or {}) for workload in workloads]))
    calibrations = _calibrations(jobs)
    ready = [_Job.ready(job, cluster, calibrations) for job in jobs]
    about_s = [job.alone_s(STEPS) for job in ready]
    longest = max(about_s)
    steps = [min(MAX_STEPS, math.ceil(STEPS * longest / own)) for own in about_s]
    rounds = 0
    while True:
        programs = [job.program(count) for job, count in zip(ready, steps, strict=True)]
        timelines = _together(ready, programs)
        ends = [timeline.length_s for timeline in timelines]
        found = [
            job.period(timeline, count, begun_by(timeline, count, min(ends)))
            for job, timeline, count in zip(ready, timelines, steps, strict=True)
        ]
        rounds += 1
        if rounds == MAX_ROUNDS or all(period is not None and period.stable for period in found):
            break
        if any(period is None for period in found):
            # Who ends first has to go on until the others have done theirs.
            wanted = [math.ceil(_MARGIN * count * max(ends) / end) for count, end in zip(steps, ends, strict=True)]
            wanted = [count if end == max(ends) else more for count, more, end in zip(steps, wanted, ends, strict=True)]
        else:
            wanted = [2 * count for count in steps]
        wanted = [min(count, MAX_STEPS) for count in wanted]
        if wanted == steps:
            break
        steps = wanted
    notes: list[str] = []
    results: list[Result] = []
    alone: list[float] = []
    for job, program, timeline, count, period in zip(ready, programs, timelines, steps, found, strict=True):
        until_s = math.inf if period is None else min(ends)
        alone.append(job.alone_s(count, timeline, until_s))
        if period is None:
            period = job.period(timeline, count, begun_by(timeline, count, until_s))
            assert period is not None
            notes.append(
                f"{job.workload.name}: its steps are so much longer than others' that it had parts of them to itself "
                f"({MAX_STEPS} steps of a job are played at most): it loses more than is said here"
            )
        results.append(Result(job.workload, job.profiles, cluster, job.costs, program, period.period, period))
    return Shared(cluster, tuple(results), tuple(alone), tuple(steps), tuple(notes))


def _together(jobs: Sequence[_Job], programs: Sequence[Program]) -> tuple[Timeline, ...]:
    cluster = jobs[0].cluster
    placed = [
        Placed.on(program, job.costs, cluster, job.workload.nodes) for job, program in zip(jobs, programs, strict=True)
    ]
    shortcuts = [job.workload.simulation for job in jobs]
    fold, coalesce = all(one.fold for one in shortcuts), all(one.coalesce for one in shortcuts)
    return simulate_together(placed, cluster, fold=fold, coalesce=coalesce)


def _named(jobs: Sequence[Workload]) -> list[Workload]:
    """With names that tell them apart."""
    if len(jobs) < 2:
        raise InputError(
            "shares the fabric with nobody", key="share_fabric", found=len(jobs), allowed="2 jobs and more"
        )
    names: dict[str, int] = {}
    result = []
    for job in jobs:
        names[job.name] = names.get(job.name, 0) + 1
        number = names[job.name]
        result.append(job if number == 1 else job.model_copy(update={"name": f"{job.name} ({number})"}))
    return result


def _placed(jobs: Sequence[Workload]) -> tuple[Cluster, list[Workload]]:
    """The one cluster of all jobs, and the jobs with the nodes that each is given."""
    first = jobs[0]
    for job in jobs[1:]:
        if job.cluster.model_dump(exclude={"nodes"}) != first.cluster.model_dump(exclude={"nodes"}):
            raise InputError(
                f"{first.name} and {job.name} are on different clusters",
                key="cluster",
                found=f"{first.cluster.name} and {job.cluster.name}",
                fix="one cluster for both; only its number of nodes may differ",
            )
        if job.stack != first.stack:
            raise InputError(
                f"{first.name} and {job.name} share links, which one stack uses",
                key="stack",
                found=f"{first.stack or 'none'} and {job.stack or 'none'}",
                fix="one stack for both, or none",
            )
    nodes = _deal(jobs, first.cluster)
    most = max(max(job.cluster.nodes for job in jobs), 1 + max(node for own in nodes for node in own))
    cluster = cluster_of(first, most)
    return cluster, [job.model_copy(update={"placement": own}) for job, own in zip(jobs, nodes, strict=True)]


def _calibrations(jobs: Sequence[Workload]) -> dict[str, str]:
    """Type of GPU that any job is on -> its profile. Raises `InputError` where jobs have different ones."""
    found: dict[str, str] = {}
    of: dict[str, str] = {}
    for job in jobs:
        for gpu, name in job.calibrations.items():
            if found.setdefault(gpu, name) != name:
                raise InputError(
                    f"{of[gpu]} and {job.name} share links, which have one efficiency",
                    key="calibration",
                    found=f"{found[gpu]} and {name}",
                    fix="one calibration for both",
                )
            of.setdefault(gpu, job.name)
    return found


def _deal(jobs: Sequence[Workload], cluster: ClusterSpec) -> tuple[tuple[int, ...], ...]:
    """The nodes of each job: those that it lists; of the others the first free ones, job after job; of those that
    interleave one by one in turn. Without a fixed number of nodes, as many more as are needed follow.

    Raises `InputError` where two jobs list one node, and where there are too few.
    """
    owner: dict[int, str] = {}
    for job in jobs:
        for node in job.nodes or ():
            if node in owner:
                raise InputError(
                    f"node {node} is that of {owner[node]} and of {job.name}", key="placement", fix="nodes of its own"
                )
            owner[node] = job.name
    numbers = range(cluster.fixed_nodes) if cluster.fixed_nodes else itertools.count()
    free = (node for node in numbers if node not in owner)
    nodes = [list(job.nodes or ()) for job in jobs]

    def lacks(number: int) -> bool:
        job = jobs[number]
        return scale.gpus_of_workers(job.parallelism, cluster, nodes[number]) < job.n_ranks

    packed = [number for number, job in enumerate(jobs) if job.placement == "packed"]
    interleaved = [number for number, job in enumerate(jobs) if job.placement == "interleaved"]
    for turn in (*([number] for number in packed), interleaved):
        while waiting := [number for number in turn if lacks(number)]:
            for number in waiting:
                if (given := next(free, None)) is None:
                    found = cluster.fixed_nodes
                    raise InputError(f"has no nodes left for {jobs[number].name}", key="cluster.nodes", found=found)
                nodes[number].append(given)
    return tuple(tuple(own) for own in nodes)
