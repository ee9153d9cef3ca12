"""What `python -m calibration train` recorded of a run (its keys: `calibration.train.record`), to be compared."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from calibration.compare.figures import Figures
from calibration.compare.kernels import CLASSES, PARTS, Kernels, measured_class, measured_kernels
from calibration.compare.meetings import Meetings
from simulator.config.files import read_text
from simulator.errors import InputError

FORMAT = 1


@dataclass(frozen=True)
class Measured:
    """A run: what was recorded of it and its kernels, or the ``reason`` why there is nothing to compare.

    ``date``: when it was made, None where it never was; ``workload_sha256``: of the workload file that it ran.
    """

    record: Mapping[str, Any]
    path: Path
    date: datetime.datetime | None
    workload_sha256: str
    reason: str
    kernels: Kernels | None

    @property
    def hardware(self) -> str:
        """What it ran on, in a line."""
        found = self.record.get("environment", {})
        parts = [found.get("gpu")] + [f"{k} {found[k]}" for k in ("torch", "cuda", "nccl") if found.get(k)]
        driver = found.get("driver")
        return ", ".join(str(part) for part in [*parts, driver and f"driver {driver}"] if part)


def read_measured(directory: Path, name: str, workload_sha256: str, known: Meetings) -> Measured:
    """The run ``name``; one that failed, was skipped, never made or made of another workload file has a reason.
    ``known``: which ranks meet in it.

    Raises `InputError` where a file is not a record of a run.
    """
    path = directory / f"{name}.json"
    if not path.exists():
        return Measured({}, path, None, "", "not run", None)
    try:
        record = json.loads(read_text(path))
        if record["format"] != FORMAT:
            raise InputError("of another format", file=path, key="format", found=record["format"], allowed=FORMAT)
        date = datetime.datetime.fromisoformat(record["date"])
        date = date if date.tzinfo else date.replace(tzinfo=datetime.UTC)
        ran = record["workload"]["sha256"]
        reason = "" if record["status"] == "ok" else f"{record['status']}: {' '.join(record['reason'].split())}"
    except (ValueError, TypeError, KeyError) as problem:
        fix = "python -m calibration train writes one"
        raise InputError(f"no record of a run: {problem!r}", file=path, fix=fix) from None
    if not reason and ran != workload_sha256:
        reason = "the workload file has changed since it was run"
    timeline = directory / f"{name}.timeline.csv.gz"
    kernels = measured_kernels(timeline, known) if not reason and timeline.exists() else None
    return Measured(record, path, date, ran, reason, kernels)


def measured_figures(
    run: Measured, flops_per_step: float, peak_flops_per_s: float, pipelines: Sequence[Sequence[int]]
) -> Figures:
    """``flops_per_step``: of the model, all ranks; ``peak_flops_per_s``: of one GPU. Memory is, as time, of the timed
    steps: in the second one of all DDP makes its buckets anew, and may have both sets of them for once. Raises
    `InputError`."""
    record, ranks = run.record, run.record.get("ranks", [])
    try:
        step_s = float(record["step_time_s"]["median"])
        class_s = dict.fromkeys(CLASSES, 0.0)
        for kernel in (kernel for rank in ranks for kernel in rank["kernels"]):
            class_s[measured_class(kernel["class"], kernel["kind"])] += kernel["seconds"] / len(ranks)
        parts: dict[str, float | None] = dict.fromkeys(chain(*PARTS.values()))
        exposed = [rank["profile"]["exposed_s"] for rank in ranks if rank["profile"]]
        peaks = tuple(float(rank["memory"]["steady_allocated_bytes"]) for rank in ranks if rank["memory"])
        return Figures(
            step_time_s=step_s,
            mfu=flops_per_step / (step_s * len(ranks) * peak_flops_per_s),
            peak_allocated_bytes=peaks,
            class_s={**class_s, **(run.kernels.parts(len(ranks)) if run.kernels is not None else parts)},
            exposed_s=statistics.fmean(exposed) if exposed else None,
            bubble=run.kernels.bubble(pipelines) if run.kernels is not None else None,
        )
    except (TypeError, KeyError, ZeroDivisionError) as problem:
        raise InputError(f"an incomplete record of a run: {problem!r}", file=run.path) from None
