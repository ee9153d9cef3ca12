"""Results of the commands on traces, as plain data under the names of the JSON output."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from simulator.output.envelope import envelope
from simulator.output.stream_gantt import StreamRow
from simulator.traces.classes import CLASSES
from simulator.traces.compare import Comparison, missing_classes
from simulator.traces.figures import figures
from simulator.traces.job_stragglers import StragglerFigures
from simulator.traces.job_trace import JobTrace
from simulator.traces.replay import Replay
from simulator.traces.trace import RunTrace

#: Kernels that are listed where nothing else is asked for.
TOP = 10


def shown(trace: RunTrace, top: int = TOP) -> dict[str, Any]:
    """Return the figures of a trace, with the ``top`` kernels that take most time."""
    content = asdict(figures(trace))
    content["kernels"] = content["kernels"][:top]
    return envelope("trace show", trace.missing, files=list(trace.files), gpu=trace.ranks[0].gpu, **content)


def compared(comparison: Comparison, warnings: list[str]) -> dict[str, Any]:
    """Return both sides and their classes; ``warnings`` are what the files lack."""
    sides = [asdict(side) for side in comparison.sides]
    for side in sides:
        del side["kernels"]
    return envelope(
        "trace compare",
        warnings,
        sides=sides,
        classes=[{**asdict(row), "ratio": row.ratio} for row in comparison.rows],
        missing=missing_classes(comparison),
        kernels_alone=[
            [{"name": name, "seconds": seconds} for name, seconds in kernels] for kernels in comparison.alone
        ],
    )


def replayed(trace: RunTrace, played: Replay, warnings: list[str]) -> dict[str, Any]:
    """Return the step as recorded, as played and as changed."""
    return envelope(
        "trace replay",
        warnings,
        files=list(trace.files),
        ranks=[rank.rank for rank in trace.ranks],
        error=played.error,
        **asdict(played),
    )


def job_stragglers(job: JobTrace, figures: StragglerFigures) -> dict[str, Any]:
    """Return the steps of a job with and without stragglers."""
    content = asdict(figures)
    return envelope(
        "trace stragglers",
        file=job.file,
        stages=job.stages,
        replicas=job.replicas,
        error=figures.error,
        delays=figures.delays,
        slowdown=figures.slowdown,
        **content,
    )


def stream_rows(trace: RunTrace) -> list[StreamRow]:
    """Return a row per stream of each rank for `simulator.output.stream_gantt`."""
    rows = []
    for rank in trace.ranks:
        for code in np.unique(rank.ops.stream).tolist():
            ops = rank.ops.select(rank.ops.stream == code)
            boxes = {
                CLASSES[kind]: (ops.start_s[ops.code == kind], ops.end_s[ops.code == kind])
                for kind in np.unique(ops.code).tolist()
            }
            rows.append(StreamRow(f"rank {rank.rank} {rank.streams[code]}", boxes))
    return rows
