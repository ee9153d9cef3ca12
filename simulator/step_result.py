"""Result of a simulated training step: its figures, memory, advice, pictures and files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from simulator import models
from simulator.analysis.training.advice import advice
from simulator.analysis.training.host_memory import host_memory
from simulator.analysis.training.memory import (
    RankMemory,
    fullest,
    memory_of_ranks,
    narrow_warning,
    second_step_warning,
)
from simulator.analysis.training.report import ComparedJob, StepFlops, TrainingJob, key_figures, report
from simulator.analysis.training.stage_balance import simulated_split
from simulator.analysis.training.stage_split import (
    LayerSeconds,
    SimulatedSplit,
    better_split,
    passed_kernels,
    priced_layers,
    split_setting,
)
from simulator.analysis.training.staleness import staleness
from simulator.analysis.training.static_memory import static_memory
from simulator.analysis.training.steady_state import UNSTEADY, SteadyState
from simulator.analysis.training.uneven_experts import uneven_experts_warning
from simulator.cluster import Cluster
from simulator.config import Workload, altered
from simulator.costs import Costs
from simulator.costs.provenance import priced_by
from simulator.engine import Placed
from simulator.engine.gpu_clocks import UNSETTLED
from simulator.errors import InputError
from simulator.hardware.kernels import MatrixDtype
from simulator.hardware.profile import Profile
from simulator.lowering import build_program, layout
from simulator.program import Program, Repetition
from simulator.results import StepFigures, TimelineResult
from simulator.timeline import Timeline
from simulator.units import format_time
from simulator.validation.accuracy import accuracy, interval_figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

#: Share of a GPU's memory around its capacity, within which advice is checked by a full simulation.
NEAR = 0.01


class SimulateStep(Protocol):
    """How a step of another job is simulated; see `simulator.api.run_step`."""

    def __call__(
        self, workload: Workload, *, interference: bool = True, built: Cluster | None = None
    ) -> StepResult: ...


@dataclass(frozen=True, repr=False)
class StepResult(TimelineResult, StepFigures):
    """Result of one simulated training step.

    ``profiles``: type of GPU -> its profile. ``played_program``: what was played, on ``workload.nodes`` of the cluster.
    ``repetition``: periods of the pipeline that it leaves out, and that ``spans`` have nevertheless.
    ``spans``: the step's Timeline; where steps were played in a row, one period of their ``steady`` state.
    ``simulate``: how advice tries jobs that differ in a few keys. ``is_shared``: other jobs ran on the cluster
    meanwhile.
    """

    command: ClassVar[str] = "run"

    workload: Workload
    profiles: Mapping[str, Profile]
    cluster: Cluster
    costs: Costs
    played_program: Program
    spans: Timeline
    steady: SteadyState | None = None
    repetition: Repetition | None = None
    is_shared: bool = False
    simulate: SimulateStep = field(kw_only=True)

    @property
    def job_name(self) -> str:
        """Name of the workload."""
        return self.workload.name

    @cached_property
    def gpu_numbers(self) -> tuple[int, ...]:
        """The GPU of the cluster that every rank runs on."""
        return Placed.on(self.played_program, self.costs, self.cluster, self.workload.nodes).gpus

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        """Type of every rank's GPU."""
        return self.cluster.types_of(self.gpu_numbers)

    @cached_property
    def program(self) -> Program:
        """The whole program, on ``workload.nodes`` of the cluster."""
        return self.played_program if self.repetition is None else build_program(self.workload)

    @cached_property
    def placed(self) -> Placed:
        """The whole program on the GPUs of its nodes."""
        return Placed.on(self.program, self.costs, self.cluster, self.workload.nodes)

    @property
    def whole_program(self) -> Program | None:
        """The program of the spans; None of steps that overlap, whose spans are parts of several."""
        return self.program if self.steady is None else None

    @property
    def capacities(self) -> dict[int, float]:
        """Simulated rank -> bytes of its GPU's memory."""
        return {rank: self.profiles[self.gpus[rank]].gpu_spec.memory_bytes.value for rank in self.spans.ranks}

    @property
    def played(self) -> Timeline:
        """Timeline of all that was played: a step, or several in a row."""
        return self.spans if self.steady is None else self.steady.played

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        """Memory of every simulated rank at its peak."""
        return self._memories(self.capacities)

    def memories_within(self, capacity_bytes: float) -> tuple[RankMemory, ...]:
        """Return the memory of every simulated rank at its peak, on GPUs of ``capacity_bytes``."""
        return self._memories(dict.fromkeys(self.spans.ranks, capacity_bytes))

    def _memories(self, capacities: Mapping[int, float]) -> tuple[RankMemory, ...]:
        job, specs = self.workload, {gpu: one.gpu_spec for gpu, one in self.profiles.items()}
        blas = {rank: specs[self.gpus[rank]].blas_workspace_bytes for rank in self.played.ranks}
        return memory_of_ranks(self.played, static_memory(job, blas), capacities, job.simulation.engine)

    def needed_bytes(self, workload: Workload) -> float:
        """Return the device memory of the fullest rank of a job that differs from this one in a few keys, bytes.

        It is infinite where hosts have no room for what is offloaded. A step without interference has fewer events, and
        the order of passes decides its memory. Transfers of ZeRO-3 beside passes alone make a difference (of 95 jobs at
        most 0.2 %). A job within `NEAR` of the GPU's memory is simulated with interference.
        """
        trial = self.simulate(workload, interference=False, built=self.cluster)
        host = host_memory(workload, layout(workload).pipeline_rank, trial.played)
        if host is not None and not host["fits"]:
            return math.inf
        worst = fullest(trial.memories)
        if abs(worst.total - worst.capacity) > NEAR * worst.capacity:
            return worst.total
        return fullest(self.simulate(workload, built=self.cluster).memories).total

    @cached_property
    def warnings(self) -> list[str]:
        """Notes that a user should read before trusting the figures."""
        unsteady = [] if self.steady is None or self.steady.stable else [UNSTEADY]
        unsettled = [] if self.spans.clocks_settled else [UNSETTLED]
        memory_warnings = second_step_warning(self.memories) + narrow_warning(self.memories)
        memory_warnings += uneven_experts_warning(self.memories, self.workload, self.needed_bytes)
        return [*models.warnings(self.workload), *unsteady, *unsettled, *memory_warnings]

    def content(self) -> dict[str, Any]:
        """Return the figures under the names of the JSON output, SI units."""
        age = None
        if self.steady and self.workload.parallelism.data_parallel == "async":
            age = staleness(self.steady.played, self.played_program.groups)
        return report(_training_job(self), self.spans, steady=self.steady, staleness=age, accuracy=accuracy)

    def key_figures(self) -> dict[str, Any]:
        """Return the figures by which jobs are compared; quicker than `to_dict`, which tries advice too."""
        figures = key_figures(_compared_job(self), self.spans, steady=self.steady)
        return figures | interval_figures(self.workload, figures)

    @property
    def accuracy(self) -> dict[str, Any] | None:
        """Interval in which the measured step time would lie, and what it rests on; None: nothing comparable."""
        judged: dict[str, Any] | None = self.report["accuracy"]
        return judged

    def __repr__(self) -> str:
        """Return the first lines of the summary."""
        from simulator.output.summary import opening

        return opening(self.report)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the key figures, and where time goes."""
        from simulator.output.notebook_view import step_view

        return step_view(self.report)

    def summary(self) -> RenderableType:
        """Return the results as tables for a terminal."""
        from simulator.output.summary import summary

        return summary(self.report)

    def save_chakra(self, folder: str | Path) -> list[Path]:
        """Write the step into ``folder`` as Chakra's execution traces, a file per rank, and return the files.

        The folder is made where its parent is there.

        Raises `InputError` where the step has work that these have no nodes for, or protobuf is not installed.
        """
        from simulator.traces.execution.writing import write_chakra

        if self.steady is not None:
            raise InputError(
                "steps that overlap have no traces of one step", key="parallelism.schedule",
                found=self.workload.parallelism.schedule, fix="a schedule whose steps follow one another",
            )  # fmt: skip
        return write_chakra(self.program, self.spans, Path(folder))

    @property
    def title(self) -> str:
        """Title of pictures: name, step time and bubble."""
        from simulator.output.efficiency_text import BUBBLE_WINDOW

        title = f"{self.job_name}: {format_time(self.spans.step_time_s)} a step"
        if (bubble := self.report["bubble_fraction"]) is not None:
            title += f", bubble {bubble:.1%} {BUBBLE_WINDOW}"
        return title

    def memory(self, ax: Axes | None = None) -> Figure:
        """Draw the fullest GPU's memory over the step; into ``ax`` where given."""
        from simulator.output.memory_plot import memory_plot

        return memory_plot(self.played, self.memories, ax, title=self.job_name)


def _better_split(result: StepResult, now: SimulatedSplit) -> SimulatedSplit | None:
    """Return a split of the layers over the pipeline's stages that makes the step faster and fits; None without one."""
    workload = result.workload
    if workload.parallelism.n_stages == 1 or result.is_shared:
        return None
    room = max(0.0, _over_capacity(result))

    def simulated(split: tuple[int, ...]) -> SimulatedSplit | None:
        try:
            other = altered(workload, split_setting(workload, split))
        except InputError:
            return None
        trial = result.simulate(other, built=result.cluster)
        return None if _over_capacity(trial) > room else simulated_split(trial.spans, split)

    return better_split(now, _layer_prices(result), simulated)


def _over_capacity(result: StepResult) -> float:
    """Return the bytes by which the fullest rank exceeds its GPU; negative where it fits."""
    worst = fullest(result.memories)
    return worst.total - worst.capacity


def _layer_prices(result: StepResult) -> LayerSeconds:
    """Return the prices of layers on the slowest GPU of each stage."""
    workload, gpus = result.workload, map(result.cluster.gpus.__getitem__, result.gpu_numbers)
    kinds = [(gpu.type, gpu.speed_scale) for gpu in gpus]
    speeds: dict[int, dict[tuple[str, float], None]] = {}
    for pipeline_rank, kind in dict.fromkeys(zip(layout(workload).pipeline_rank, kinds, strict=True)):
        for stage in workload.parallelism.stages_of(pipeline_rank):
            speeds.setdefault(stage % workload.parallelism.n_stages, {})[kind] = None

    def price_s(stage: int, part: models.Part) -> float:
        kernels = passed_kernels(part)
        return max(sum(result.costs.kernel_s(one, gpu) for one in kernels) / speed for gpu, speed in speeds[stage])

    return priced_layers(workload, price_s)


def _compared_job(result: StepResult) -> ComparedJob:
    workload, timeline = result.workload, result.spans
    pipelines = result.played_program.groups.get("pp") or tuple((rank,) for rank in range(timeline.n_ranks))
    return ComparedJob(
        workload=workload,
        peak_flops_per_s=_mean_peak(result, workload.training.precision) or 0.0,
        fp8_peak_flops_per_s=_mean_peak(result, "fp8") if workload.training.fp8 else None,
        fp4_peak_flops_per_s=_mean_peak(result, "fp4") if workload.training.fp4 else None,
        flops=StepFlops(
            *models.model_flops(workload)[:2],
            models.hardware_flops_per_step(workload),
        ),
        pipelines=[tuple(timeline.simulated_as[rank] for rank in pipeline) for pipeline in pipelines],
        memories=result.memories,
        pipeline_rank=layout(workload).pipeline_rank,
    )


def _mean_peak(result: StepResult, dtype: MatrixDtype) -> float | None:
    """Return a dense peak, FLOP/s, mean over GPUs; None where a type of GPU has none."""
    peaks = {gpu: one.gpu_spec.peak_flops_per_s.get(dtype) for gpu, one in result.profiles.items()}
    counts = Counter(result.gpus)
    figures = [(peak.value, counts[gpu]) for gpu, peak in peaks.items() if peak is not None and counts[gpu]]
    total = sum(peak * count for peak, count in figures)
    return None if len(figures) < len(counts) else total / counts.total()


def _slower_host_step_s(result: StepResult) -> float:
    """Return the step time of the job on hosts of half the speed, s."""
    return result.simulate(result.workload.with_hosts_at(1 / 2)).spans.step_time_s


def _training_job(result: StepResult) -> TrainingJob:
    workload = result.workload
    profiles = [result.profiles[gpu] for gpu in result.cluster.gpu_types(result.gpu_numbers)]
    return TrainingJob(
        **vars(_compared_job(result)),
        calibration={
            "name": ", ".join(one.name for one in profiles),
            "gpu": ", ".join(one.gpu for one in profiles),
            "date": ", ".join(dict.fromkeys(one.date for one in profiles)),
            "source": "; ".join(dict.fromkeys(source for one in profiles for source in one.sources.values())),
            "kind": ", ".join(dict.fromkeys(one.kind for one in profiles)),
            **({"stack": workload.stack} if workload.stack else {}),
            "kernel_time_priced_by": priced_by(result.played_program, result.costs, result.gpus, result.repetition),
        },
        parameters=models.parameters(workload),
        active_parameters=models.active_parameters(workload),
        trained_parameters=models.trained_parameters(workload),
        better_split=partial(_better_split, result),
        advice=advice(result.memories, workload, result.needed_bytes),
        slower_host_step_s=None if result.is_shared else partial(_slower_host_step_s, result),
    )
