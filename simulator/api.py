"""What Python users call: `run` a workload."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator import models
from simulator.analysis.training.advice import advice
from simulator.analysis.training.host_memory import host_memory
from simulator.analysis.training.memory import RankMemory, fullest, memory_of_ranks, second_step_warning
from simulator.analysis.training.rehearsal import times_of
from simulator.analysis.training.report import Job, StepFlops, report
from simulator.analysis.training.staleness import staleness
from simulator.analysis.training.static_memory import holdings
from simulator.analysis.training.steady_state import UNSTEADY, Steady, until_steady
from simulator.cluster import Cluster, cluster_of
from simulator.config import Workload, load_workload
from simulator.config.profile import Profile, load_profiles
from simulator.config.section import is_whole, located
from simulator.config.stack import load_stack
from simulator.config.workload import written_in
from simulator.costs import Costs
from simulator.costs.provenance import priced_by
from simulator.engine import Placed, simulate
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.lowering import build_program, layout
from simulator.output.envelope import envelope
from simulator.program import Program
from simulator.schedules import Times
from simulator.timeline import Timeline
from simulator.units import format_time
from simulator.validation.accuracy import accuracy

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

#: Rows of a trace that a viewer can still open.
MAX_TRACE_ROWS = 5_000_000
#: Share of a GPU's memory within which what a job needs decides whether it fits.
NEAR = 0.01


@dataclass(frozen=True, repr=False)
class Result:
    """One simulated training step.

    ``profiles``: type of GPU -> its profile. Of schedules whose claim is of steps that follow one another ``spans`` is
    one period between them, and ``steady`` what it was cut out of. ``program`` is all that was played, on ``nodes`` of
    the cluster (None: the first).
    """

    workload: Workload
    profiles: Mapping[str, Profile]
    cluster: Cluster
    costs: Costs
    program: Program
    spans: Timeline
    steady: Steady | None = None

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        """The type of every rank's GPU."""
        return tuple([self.cluster.gpus[gpu].type for gpu in self.placed.gpus])

    @cached_property
    def placed(self) -> Placed:
        """The program on the GPUs of its nodes."""
        return Placed.on(self.program, self.costs, self.cluster, self.workload.nodes)

    @property
    def capacities(self) -> dict[int, float]:
        """Simulated rank -> bytes of its GPU's memory."""
        return {rank: self.profiles[self.gpus[rank]].gpu_spec.memory_bytes.value for rank in self.spans.ranks}

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """One row per kernel and transfer of every simulated rank (see `Timeline.frame`)."""
        return self.spans.frame()

    @property
    def played(self) -> Timeline:
        """All that was played: a step, or several in a row."""
        return self.spans if self.steady is None else self.steady.played

    @cached_property
    def _report(self) -> dict[str, Any]:
        known = accuracy(self.workload)
        alone = self.steady is not None and self.workload.parallelism.data_parallel == "async"
        content = report(
            _job(self),
            self.spans,
            steady=self.steady,
            staleness=staleness(self.steady.played, self.program.groups) if self.steady and alone else None,
            accuracy=known,
        )
        return envelope("run", self.warnings, **content)

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        """Every simulated rank at its fullest."""
        return self._memories(self.capacities)

    def memories_within(self, capacity_bytes: float) -> tuple[RankMemory, ...]:
        """Every simulated rank at its fullest, on GPUs of so much memory."""
        return self._memories(dict.fromkeys(self.spans.ranks, capacity_bytes))

    def _memories(self, capacities: Mapping[int, float]) -> tuple[RankMemory, ...]:
        blas = {rank: self.profiles[self.gpus[rank]].gpu_spec.blas_workspace_bytes for rank in self.played.ranks}
        return memory_of_ranks(self.played, holdings(self.workload, blas), capacities)

    @cached_property
    def warnings(self) -> list[str]:
        """What the user should know before trusting the figures."""
        unsteady = [] if self.steady is None or self.steady.stable else [UNSTEADY]
        return [*models.warnings(self.workload), *unsteady, *second_step_warning(self.memories)]

    def __repr__(self) -> str:
        """The first lines of the summary."""
        from simulator.output.summary import opening

        return opening(self._report)

    def to_dict(self) -> dict[str, Any]:
        """The results under the names of the JSON output, SI units; the caller's own."""
        return copy.deepcopy(self._report)

    def summary(self) -> RenderableType:
        """The results as tables for a terminal."""
        from simulator.output.summary import summary

        return summary(self._report)

    def gantt(self, ax: Axes | None = None) -> Figure:
        """A picture of the pipeline; into ``ax`` where given."""
        from simulator.output.gantt import gantt

        return gantt(self.spans, ax, title=self.title)

    @property
    def title(self) -> str:
        """What stands over a picture of the pipeline."""
        title = f"{self.workload.name}: {format_time(self.spans.step_time_s)} a step"
        if self.workload.parallelism.pp > 1:
            title += f", bubble {self._report['bubble_fraction']:.1%} of the pipeline's window"
        return title

    def memory(self, ax: Axes | None = None) -> Figure:
        """A picture of the fullest GPU's memory over the step; into ``ax`` where given."""
        from simulator.output.memory_plot import memory_plot

        return memory_plot(self.played, self.memories, ax, title=self.workload.name)

    def save_trace(self, path: str | Path, ranks: Sequence[int] | None = None) -> None:
        """Write a Chrome/Perfetto trace, gzipped if ``path`` ends in .gz.

        ``ranks``: any of the job's, played or stood for by others; one per pipeline stage by default. Raises
        `InputError` for others, and where the trace would be too large to open.
        """
        from simulator.output.trace import write_trace

        if ranks is not None:
            ranks = _existing(ranks, self.spans.n_ranks)
        spans = self.spans if ranks is None else self.spans.of_ranks(ranks)
        if spans.n_rows > MAX_TRACE_ROWS and ranks is not None:
            raise InputError(
                f"{len(ranks)} ranks have {spans.n_rows:,} kernels and transfers",
                file=path,
                key="--trace-ranks",
                allowed=f"at most {MAX_TRACE_ROWS:,}, about a gigabyte",
                fix="fewer ranks",
            )
        write_trace(spans, path, ranks=ranks, name=self.workload.name)


def _existing(ranks: object, n_ranks: int) -> list[int]:
    """``ranks`` of a job that has so many. Raises `InputError` where they are not that."""
    if isinstance(ranks, Iterable):
        listed = list(ranks)
        if all(is_whole(rank) and 0 <= rank < n_ranks for rank in listed):
            return [int(rank) for rank in listed]
    allowed = f"a list of ranks, which are 0 to {n_ranks - 1}"
    raise InputError("no ranks of this job", key="ranks", found=brief(ranks), allowed=allowed)


def run(workload: str | Path | Mapping[str, Any] | Workload, *, set: Mapping[str, Any] | None = None) -> Result:
    """Simulate one training step of ``workload``: a file, a shipped name, a mapping or a loaded `Workload`.

    ``set`` changes dotted keys first, such as ``{"parallelism.pp": 4}``. Raises `InputError` on what cannot be used.
    """
    job = workload if isinstance(workload, Workload) and not set else load_workload(workload, set or {})
    with located(written_in(workload if isinstance(workload, str | Path) else None, set or {}, "set")):
        return _run(job)


def _run(job: Workload, *, disturbed: bool = True, known: Cluster | None = None) -> Result:
    """Simulate one training step. Unless ``disturbed`` every kernel takes what it takes alone. ``known``: a cluster
    that is built already, with what was worked out about it, should it be the job's."""
    profiles = load_profiles(job.calibrations, job.training.attention_kernel)
    cluster = known if known is not None and known.spec == job.cluster else cluster_of(job)
    network = load_stack(job.stack) if job.stack else None
    costs = Costs.from_profiles(profiles, job.software, network)
    schedule, shortcuts = job.parallelism.plan, job.simulation.model_dump()
    times = None if schedule.search is None else rehearsed(job, cluster, costs)
    if not disturbed:
        costs = costs.undisturbed()

    def build(steps: int) -> Program:
        return build_program(job, times=times, steps=steps)

    def play(program: Program) -> Timeline:
        return simulate(program, cluster, costs, nodes=job.nodes, **shortcuts)

    together = job.parallelism.data_parallel != "async"
    if together and not schedule.steady:
        program = build(1)
        return Result(job, profiles, cluster, costs, program, play(program))
    program, found = until_steady(build, play, job.microbatches, together=together)
    return Result(job, profiles, cluster, costs, program, found.period, found)


def rehearsed(job: Workload, cluster: Cluster, costs: Costs) -> Times:
    """What the passes of ``job`` take, from a step of two micro-batches with a schedule that needs no tuning.

    Raises `InputError` where the memory limit leaves no room for a micro-batch.
    """
    training, layout = job.training, job.parallelism
    short = job.model_copy(
        update={
            "training": training.model_copy(update={"global_batch": 2 * training.micro_batch * layout.dp}),
            "parallelism": layout.model_copy(update={"schedule": "zb_h1"}),
        }
    )
    timeline = simulate(build_program(short), cluster, costs, nodes=job.nodes, **job.simulation.model_dump())
    times = times_of(timeline, layout.n_stages, layout.zb_memory_limit)
    try:
        layout.plan.tuned(times).order(layout.pp, job.microbatches, layout.vpp)
    except ValueError as problem:
        raise InputError(str(problem), key="parallelism.zb_memory_limit", found=layout.zb_memory_limit) from None
    return times


def _needed_bytes(known: Cluster, workload: Workload) -> float:
    """Device memory of the fullest rank, from a step of its own; without end where hosts have no room for what leaves
    it. ``known`` as in `_run`.

    Who holds what beside what is a matter of the order of passes, and hardly of what slows their kernels: a step
    without that, played once and in fewer events, has as much, but for what transfers of ZeRO-3 hold beside passes (of
    95 jobs at most 0.2 %). What comes within `NEAR` of what the GPU has is played as it is.
    """
    result = _run(workload, disturbed=False, known=known)
    host = host_memory(workload, layout(workload).pipeline_rank, result.played)
    if host is not None and not host["fits"]:
        return math.inf
    worst = fullest(result.memories)
    if abs(worst.total - worst.capacity) > NEAR * worst.capacity:
        return worst.total
    return fullest(_run(workload, known=known).memories).total


def _job(result: Result) -> Job:
    workload, timeline = result.workload, result.spans
    profiles = [result.profiles[gpu] for gpu in result.cluster.gpu_types(result.placed.gpus)]
    precision = workload.training.precision
    peaks = {gpu: one.gpu_spec.peak_flops_per_s[precision].value for gpu, one in result.profiles.items()}
    pipelines = result.program.groups.get("pp") or tuple((rank,) for rank in range(timeline.n_ranks))
    return Job(
        workload=workload,
        peak_flops_per_s=sum(peaks[gpu] * count for gpu, count in Counter(result.gpus).items()) / workload.n_ranks,
        calibration={
            "name": ", ".join(one.name for one in profiles),
            "gpu": ", ".join(one.gpu for one in profiles),
            "date": ", ".join(dict.fromkeys(one.date for one in profiles)),
            "source": "; ".join(dict.fromkeys(source for one in profiles for source in one.sources.values())),
            "kind": ", ".join(dict.fromkeys(one.kind for one in profiles)),
            **({"stack": workload.stack} if workload.stack else {}),
            "kernel_time_priced_by": priced_by(result.program, result.costs, result.gpus),
        },
        parameters=models.parameters(workload),
        active_parameters=models.active_parameters(workload),
        flops=StepFlops(
            models.model_flops_per_step(workload),
            models.model_flops_per_step_causal(workload),
            models.hardware_flops_per_step(workload),
        ),
        pipelines=[tuple(timeline.simulated_as[rank] for rank in pipeline) for pipeline in pipelines],
        memories=result.memories,
        advice=advice(result.memories, workload, partial(_needed_bytes, result.cluster)),
        pipeline_rank=layout(workload).pipeline_rank,
    )
