"""Report of a training step: all results of `run` as one dictionary, in the order of the JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.analysis.time.activity import Activity, activity
from simulator.analysis.time.breakdown import communication, time_breakdown
from simulator.analysis.time.critical_path import critical_path
from simulator.analysis.time.links import busiest_links, contention
from simulator.analysis.training.bubble import bubble
from simulator.analysis.training.host_memory import host_memory
from simulator.analysis.training.memory import RankMemory, memory_report
from simulator.analysis.training.stage_balance import simulated_split, stage_balance
from simulator.analysis.training.stage_split import SimulatedSplit
from simulator.analysis.training.steady_state import SteadyState
from simulator.config import Workload
from simulator.config.changed_cluster import changed_cluster_keys
from simulator.timeline import Timeline

SECONDS_PER_DAY, SECONDS_PER_HOUR = 86400.0, 3600.0


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step of the whole job.

    ``model``: matrix products and full attention of forward and backward passes. ``causal``: with half the attention.
    ``hardware``: FLOPs of the kernels, recompute included.
    """

    model: float
    causal: float
    hardware: float


@dataclass(frozen=True, kw_only=True)
class ComparedJob:
    """Facts of a job that its key figures need beside its Timeline.

    ``peak_flops_per_s``: dense peak of a GPU in ``training.precision``, mean over GPUs. ``fp8_peak_flops_per_s``
    and ``fp4_peak_flops_per_s``: those in 8 and in 4 bits, of jobs with such products whose GPUs have one.
    ``pipelines``: simulated ranks of each data-parallel replica (see `simulator.analysis.time.activity.weigh`).
    ``memories``: every simulated rank at its peak. ``pipeline_rank``: pipeline rank of each rank.
    """

    workload: Workload
    peak_flops_per_s: float
    flops: StepFlops
    pipelines: Sequence[Sequence[int]]
    memories: Sequence[RankMemory]
    pipeline_rank: Sequence[int]
    fp8_peak_flops_per_s: float | None = None
    fp4_peak_flops_per_s: float | None = None


#: Share of a step that GPUs wait for their hosts, from which on it is simulated what slower hosts would make of it.
HOST_MATTERS = 0.01


@dataclass(frozen=True, kw_only=True)
class TrainingJob(ComparedJob):
    """Facts of a job that a report needs beside its Timeline.

    ``advice``: settings that would make the job fit. ``better_split``: finds a split of the layers that is faster than
    a given one. ``calibration``: name, gpu, date, source, kind. ``slower_host_step_s``: simulates the step on hosts of
    half the speed; None beside other jobs, which would have to be simulated again too.
    """

    calibration: Mapping[str, Any]
    parameters: float
    active_parameters: float
    trained_parameters: float
    advice: Sequence[str]
    better_split: Callable[[SimulatedSplit], SimulatedSplit | None]
    slower_host_step_s: Callable[[], float] | None


def _host(job: TrainingJob, waiting: float) -> dict[str, float | None]:
    """Return the share of the step that GPUs wait for hosts, and where it matters the step on slower ones."""
    slower = job.slower_host_step_s if waiting > HOST_MATTERS else None
    return {"host_bound_fraction": waiting, "slower_host_step_time_s": None if slower is None else slower()}


def _stages(job: TrainingJob, timeline: Timeline) -> dict[str, Any]:
    """Return how evenly the job's stages are loaded, and a better split of its layers."""
    now = simulated_split(timeline, job.workload.parallelism.layers_per_stage)
    return stage_balance(now, job.better_split(now))


def report(
    job: TrainingJob,
    timeline: Timeline,
    *,
    steady: SteadyState | None = None,
    staleness: float | None = None,
    accuracy: Callable[[Workload, Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the content of the ``run`` result: plain numbers, strings, lists and dictionaries, SI units.

    ``steady``: the steady state that ``timeline`` is a period of; memory is the peak over all its steps.
    ``staleness``: see `simulator.analysis.training.staleness`; for asynchronous data parallelism. ``accuracy``: what
    says of a job and its figures how far off these may be.
    """
    played = timeline if steady is None else steady.played
    workload, step = job.workload, timeline.step_time_s
    cut = activity(timeline)
    breakdown = time_breakdown(cut, job.pipelines)
    memory = _memory(job, played) | {"advice": list(job.advice)}
    result: dict[str, Any] = {
        "name": workload.name,
        **_cluster(workload),
        "calibration": dict(job.calibration),
        "n_gpus": job.workload.n_ranks,
        "framework": workload.framework.model_dump(mode="json"),
        "parallelism": workload.parallelism.model_dump(mode="json"),
        "n_microbatches": workload.microbatches,
        "training": _batch(workload),
        "params_total": job.parameters,
        "params_active": job.active_parameters,
        "params_trained": job.trained_parameters,
        **_training(workload),
        "step_time_s": step,
        "steady_period": steady is not None,
        **({} if staleness is None else {"staleness": staleness}),
    }
    fractions = _fractions(breakdown, step)
    result |= throughput(job, step) | efficiency(job, step)
    result |= {
        **_idle(job, cut),
        "time_breakdown_s": breakdown,
        "stages": _stages(job, timeline),
        "communication": communication(cut),
        "links": busiest_links(timeline),
        "contention": contention(timeline),
        "memory": memory,
        **_host(job, fractions["host_bound_fraction"]),
        "critical_path": critical_path(played, None if steady is None else steady.window),
    }
    if accuracy is not None:
        result |= accuracy(workload, result | fractions)
    result["simulation"] = {
        "events": timeline.events,
        "ops": played.n_rows,
        "wall_s": timeline.wall_s,
        "ranks_simulated": len(timeline.ranks),
        "ranks_total": timeline.n_ranks,
    }
    return result


def _fractions(breakdown: Mapping[str, Any], step_s: float) -> dict[str, float]:
    """Return the shares of a step that its communication holds computation up, and its hosts do."""
    return {
        "exposed_communication_fraction": sum(breakdown["exposed"].values()) / step_s,
        "host_bound_fraction": breakdown["host"] / step_s,
    }


def _idle(job: ComparedJob, cut: Activity) -> dict[str, float | None]:
    """Return the idle time of pipelines (see `bubble`). Without stages nobody waits for one, and there is no bubble."""
    idle, staged = bubble(cut, job.pipelines), job.workload.parallelism.pp > 1
    return {
        "bubble_fraction": idle.fraction if staged else None,
        "bubble_ratio": idle.ratio if staged else None,
        "idle_in_passes_fraction": idle.fraction,
    }


def _cluster(workload: Workload) -> dict[str, Any]:
    """Return the name of a job's cluster, and the keys in which it is not the shipped one of this name."""
    return {"cluster": workload.cluster.name, "cluster_changes": changed_cluster_keys(workload.cluster)}


def _batch(workload: Workload) -> dict[str, Any]:
    """Return the tokens of a step, their precision, the optimizer, and what is computed again."""
    training = workload.training
    return {
        **training.model_dump(include={"seq", "micro_batch", "global_batch", "precision"}),
        "recompute": training.recompute.granularity,
        "optimizer": training.optimizer.name,
    }


def _training(workload: Workload) -> dict[str, Any]:
    """Return what is trained, the encoder before the model, and the recipe of products in 8 bits."""
    fp8, fp4 = workload.training.fp8, workload.training.fp4
    encoder = workload.model.encoder
    sizes = None if encoder is None else encoder.model_dump(include={"layers", "images", "patches_per_image"})
    return {
        "encoder": sizes,
        "tuning": _tuning(workload),
        "fp8": fp8 and fp8.model_dump(),
        "fp4": fp4 and fp4.model_dump(),
    }


def _tuning(workload: Workload) -> dict[str, Any] | None:
    """Return what is trained of a model that is frozen in part; None where all of it is trained."""
    training = workload.training
    if not training.frozen:
        return None
    adapters = training.adapters
    return {
        "adapters": adapters and {"method": adapters.method, "rank": adapters.rank},
        "frozen": list(training.frozen),
        "base": training.base,
    }


def key_figures(job: ComparedJob, timeline: Timeline, *, steady: SteadyState | None = None) -> dict[str, Any]:
    """Return the figures by which jobs are compared, without any dictionary inside; names and values are of `report`.

    Two are shares or differences of figures there. ``exposed_communication_fraction``: share of the step in which GPUs
    wait for communication. ``headroom_bytes``: least memory left on any GPU, negative where it does not fit.
    """
    step = timeline.step_time_s
    cut = activity(timeline)
    breakdown = time_breakdown(cut, job.pipelines)
    memory = _memory(job, timeline if steady is None else steady.played)
    speed, shares = throughput(job, step), efficiency(job, step)
    run, idle = speed.pop("run", {}), _idle(job, cut)
    del speed["throughput_counts"]  # a word
    return {
        "step_time_s": step,
        **speed,
        "mfu": shares["mfu"],
        "hfu": shares["hfu"],
        **{name: idle[name] for name in ("bubble_fraction", "idle_in_passes_fraction") if idle[name] is not None},
        **_fractions(breakdown, step),
        "fits": memory["fits"],
        "peak_bytes": memory["peak_bytes"],
        "capacity_bytes": memory["capacity_bytes"],
        "headroom_bytes": float(min(one.capacity - one.total for one in job.memories)),
        "n_gpus": job.workload.n_ranks,
        "n_microbatches": job.workload.microbatches,
        **{name: run[name] for name in ("days", "gpu_hours", "cost") if run.get(name) is not None},
    }


def _memory(job: ComparedJob, played: Timeline) -> dict[str, Any]:
    """Return the memory of GPUs, and of hosts where something is offloaded to them, and whether all of it fits."""
    memory = memory_report(job.memories)
    if (host := host_memory(job.workload, job.pipeline_rank, played)) is not None:
        memory |= {"fits": memory["fits"] and host["fits"], "host": host}
    return memory


def throughput(job: ComparedJob, step_time_s: float) -> dict[str, Any]:
    """Return tokens per second, per GPU, and the whole run's time and price where ``training.total_tokens`` is given.

    GPU-hours and price include the nodes of parameter servers.
    """
    training = job.workload.training
    tokens = training.global_batch * training.seq
    result: dict[str, Any] = {
        "tokens_per_s": tokens / step_time_s,
        "tokens_per_s_per_gpu": tokens / step_time_s / job.workload.n_ranks,
        "throughput_counts": "samples" if training.seq == 1 and job.workload.model.captured else "tokens",
    }
    if training.total_tokens is not None:
        seconds = training.total_tokens / tokens * step_time_s
        cluster = job.workload.cluster
        server_gpus = sum(map(cluster.gpus_at, job.workload.server_nodes))
        gpu_hours = seconds * (job.workload.n_ranks + server_gpus) / SECONDS_PER_HOUR
        price = cluster.price_per_gpu_hour
        result["run"] = {
            "tokens": training.total_tokens,
            "steps": math.ceil(training.total_tokens / tokens),
            "days": seconds / SECONDS_PER_DAY,
            "gpu_hours": gpu_hours,
            "cost": None if price is None else gpu_hours * price,
            "server_gpus": server_gpus,
        }
    return result


def efficiency(job: ComparedJob, step_time_s: float) -> dict[str, Any]:
    """Return FLOPs of the step and their share of all GPUs' peak (arXiv 2204.02311, appendix B, for MFU and HFU)."""
    available = job.workload.n_ranks * job.peak_flops_per_s * step_time_s
    return {
        "model_flops_per_step": job.flops.model,
        "model_flops_per_step_causal": job.flops.causal,
        "hardware_flops_per_step": job.flops.hardware,
        "mfu": job.flops.model / available,
        "mfu_causal": job.flops.causal / available,
        "hfu": job.flops.hardware / available,
        "model_flops_per_s_per_gpu": job.flops.model / step_time_s / job.workload.n_ranks,
        "peak_flops_per_s_per_gpu": job.peak_flops_per_s,
        "peak_precision": job.workload.training.precision,
        "fp8_peak_flops_per_s_per_gpu": job.fp8_peak_flops_per_s,
        "fp4_peak_flops_per_s_per_gpu": job.fp4_peak_flops_per_s,
    }
