"""Runs that `python -m calibration train` recorded, to be compared."""

from __future__ import annotations

import datetime
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from calibration.compare.figures import Figures
from calibration.compare.kernels import PARTS, KernelColumns, measured_kernels
from calibration.compare.meetings import Meetings
from calibration.compare.record import Record, RunRecord, read_record
from calibration.gpus import driver_of
from calibration.train.record import timeline_of
from calibration.workloads import is_of
from simulator.config import Workload, load_workload
from simulator.errors import InputError
from simulator.hardware.device_names import is_of_type
from simulator.traces.classes import CLASSES, with_hand_over

#: Times of a timeline have so many seconds of rounding at each end, seconds of a record so large a share.
_ROUNDED_S, _ROUNDED = 1e-7, 1e-4


@dataclass(frozen=True)
class MeasuredRun:
    """A run: its record and kernels, or the ``reason`` why there is nothing to compare.

    There is no ``record`` where the run was never made, or its record cannot be read.
    """

    record: Record | None
    reason: str
    kernels: KernelColumns | None = None

    @property
    def date(self) -> datetime.datetime | None:
        return None if self.record is None else self.record.date

    @property
    def hardware(self) -> str:
        """The GPU and the software of the run, in a line."""
        environment = {} if self.record is None else self.record.environment
        parts = [environment.get("gpu")] + [
            f"{k} {environment[k]}" for k in ("torch", "cuda", "nccl") if environment.get(k)
        ]
        driver = driver_of(environment)
        return ", ".join(str(part) for part in [*parts, driver and f"driver {driver}"] if part)


def read_measured(directory: Path, path: Path, workload: Workload, meeting: Meetings) -> MeasuredRun:
    """Return the run of the file ``path``, simulated as ``workload``.

    A run has a reason where it failed, was skipped or was never made. So has a run of another workload or on other
    GPUs, or whose files are not those of such a run. ``meeting``: which ranks meet in it.
    """
    record, name = None, workload.name
    try:
        record = read_record(directory, name)
        if record is None:
            return MeasuredRun(None, "not run")
        if not isinstance(record, RunRecord):
            reason_text = " ".join(record.reason.split())
            return MeasuredRun(record, f"{record.status}: {reason_text}" if reason_text else record.status)
        if reason := unlike(record, path, workload):
            return MeasuredRun(record, reason)
        if record.n_gpus != workload.n_ranks:
            return MeasuredRun(record, f"run on {record.n_gpus} GPUs, not {workload.n_ranks}")
        timeline = timeline_of(directory, name)
        return MeasuredRun(record, "", _kernels(timeline, record, meeting) if timeline.exists() else None)
    except InputError as problem:
        return MeasuredRun(record, unusable(problem))


def unlike(record: Record, path: Path, workload: Workload) -> str:
    """Why a run is not of the file ``path`` as it is now, or not on the GPUs on which ``workload`` is simulated; empty
    where it is. What was measured without GPUs is of none; of what failed it may not be known."""
    if not is_of(record.workload.model_dump(), path, load_workload(path)):
        return "the workload file, or one that it names, has changed since it was run"
    gpu = record.environment.get("gpu")
    if gpu is None and isinstance(record, RunRecord):
        return "measured without a GPU"
    if gpu is not None and not all(is_of_type(str(gpu), simulated) for simulated in workload.gpu_types):
        return f"run on {gpu}, simulated on {', '.join(workload.gpu_types)}"
    return ""


def unusable(problem: InputError) -> str:
    """The reason of a run whose files cannot be used, in a line."""
    return f"its files cannot be used: {' '.join(str(problem).split())}"


def _kernels(path: Path, run: RunRecord, meeting: Meetings) -> KernelColumns:
    """Return the kernels of the timeline. Raises `InputError` where the record counts other ones."""
    kernels = measured_kernels(path, meeting)
    launches: Counter[tuple[int, int, str]] = Counter()
    seconds: defaultdict[tuple[int, int, str], float] = defaultdict(float)
    for rank in run.ranks:
        for kernel in rank.kernels:
            key = rank.rank, CLASSES.index(with_hand_over(kernel.name, kernel.kind)), kernel.kind
            launches[key] += kernel.launches
            seconds[key] += kernel.seconds
    keys = list(zip(kernels.rank.tolist(), kernels.code.tolist(), kernels.kind.tolist(), strict=True))
    counts = Counter(keys)
    lengths: defaultdict[tuple[int, int, str], float] = defaultdict(float)
    for key, length in zip(keys, (kernels.end_s - kernels.start_s).tolist(), strict=True):
        lengths[key] += length
    for key in sorted(launches | counts):
        same = np.isclose(lengths[key], seconds[key], rtol=_ROUNDED, atol=_ROUNDED_S * launches[key])
        if counts[key] != launches[key] or not same:
            what = f"{CLASSES[key[1]]} {key[2]}".strip()
            raise InputError(
                f"is not the timeline of this run: {what} kernels of rank {key[0]}",
                file=path,
                found=f"{counts[key]} of {lengths[key]:.6g} s",
                allowed=f"{launches[key]} of {seconds[key]:.6g} s, as the record says",
                fix="both files of one run",
            )
    return kernels


def profiled(run: RunRecord) -> float | None:
    """How many times as long as the timed steps the profiled one took, on the rank that took longest; None: not
    recorded."""
    steps_s = [
        rank.profile.step_s for rank in run.ranks if rank.profile is not None and rank.profile.step_s is not None
    ]
    return max(steps_s) / run.step_time_s.median if steps_s else None


def measured_figures(
    run: RunRecord,
    kernels: KernelColumns | None,
    flops_per_step: float,
    peak_flops_per_s: float,
    pipelines: Sequence[Sequence[int]],
) -> Figures:
    """``flops_per_step``: of the model, all ranks; ``peak_flops_per_s``: of one GPU. Memory is, as time, of the timed
    steps: in the second one of all DDP makes its buckets anew, and may have both sets of them for once. It is left out
    where it is not the run's alone."""
    ranks, step_s = run.ranks, run.step_time_s.median
    by_rank = [dict.fromkeys(CLASSES, 0.0) for _ in ranks]
    for class_seconds, rank in zip(by_rank, ranks, strict=True):
        for kernel in rank.kernels:
            class_seconds[with_hand_over(kernel.name, kernel.kind)] += kernel.seconds
    class_s = {name: tuple(class_seconds[name] for class_seconds in by_rank) for name in CLASSES}
    parts: dict[str, tuple[float, ...] | None] = dict.fromkeys(chain(*PARTS.values()))
    exposed = [rank.profile.exposed_s for rank in ranks if rank.profile is not None]
    return Figures(
        step_time_s=step_s,
        mfu=flops_per_step / (step_s * len(ranks) * peak_flops_per_s),
        peak_allocated_bytes=()
        if run.strange_memory
        else tuple(rank.memory.run_bytes for rank in ranks if rank.memory is not None),
        class_s={**class_s, **(parts if kernels is None else kernels.parts(len(ranks)))},
        exposed_s=statistics.fmean(exposed) if exposed else None,
        bubble=None if kernels is None else kernels.bubble(pipelines),
    )
