"""Figures of a trace: times by class, idle time and its causes, overlap, and how ranks differ.

Figures that HolisticTraceAnalysis (facebookresearch, ``hta/analyzers``) has too are defined as there. These are
compute, other busy and idle time of a rank, overlap of communication, and causes of idle time on a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.arrays import Floats
from simulator.timeline import covered_s
from simulator.traces.classes import CLASSES
from simulator.traces.meetings import meetings
from simulator.traces.overlap import busy_time
from simulator.traces.trace import GpuOps, RankTrace, RunTrace
from simulator.traces.windows import length_s, steps_of
from simulator.units import us

#: Shorter gaps lie between kernels that follow one another. HolisticTraceAnalysis compares 30 with microseconds,
#: although its documentation says nanoseconds (``_analyze_idle_time_for_stream``).
BACK_TO_BACK_S = 30 * us
#: Half of the finest tick of a profiler's clock: times closer than this are one.
_SAME_S = 0.5e-9


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """A stream: its busy time, and the time between its ops by cause.

    ``host_s``: the next op was launched after the last one had ended. ``back_to_back_s``: gaps shorter than
    `BACK_TO_BACK_S`. ``other_s``: all else, such as waits for another stream.
    """

    stream: str
    ops: int
    busy_s: float
    host_s: float
    back_to_back_s: float
    other_s: float


@dataclass(frozen=True, slots=True)
class RankFigures:
    """A rank, from its first op to its last.

    ``gpu_s`` = ``compute_s`` + ``other_busy_s`` + ``idle_s``. ``launch_bound_s``: the part of idle time in which the
    next op of any stream was not launched yet; None where launches are not recorded.
    ``communication_s`` is the time in which any communication runs, ``exposed_s`` what of it nothing else covers.
    ``overlap``: share of it beside computing kernels; None without communication.
    """

    rank: int
    step_s: float
    gpu_s: float
    compute_s: float
    other_busy_s: float
    idle_s: float
    launch_bound_s: float | None
    communication_s: float
    exposed_s: float
    overlap: float | None
    class_s: dict[str, float]
    streams: tuple[StreamFigures, ...]


@dataclass(frozen=True, slots=True)
class Straggling:
    """A rank in its communication with the other ranks of the trace.

    ``waits_s``: how much longer its kernels of communication run than those of the rank that comes last.
    ``last``: how often it comes last, of ``meetings``.
    """

    rank: int
    waits_s: float
    last: int
    meetings: int


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """All launches of the kernels of one name: ``seconds`` and ``launches`` are means over ranks."""

    name: str
    kernel_class: str
    seconds: float
    launches: float


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Figures of every rank, of how ranks wait for each other, and of the kernels that take most time."""

    steps: int
    ranks: tuple[RankFigures, ...]
    stragglers: tuple[Straggling, ...]
    kernels: tuple[KernelFigures, ...]


def figures(trace: RunTrace) -> TraceFigures:
    """Return the figures of a trace."""
    return TraceFigures(
        steps=len(steps_of(trace.ranks[0])),
        ranks=tuple(rank_figures(rank) for rank in trace.ranks),
        stragglers=stragglers(trace),
        kernels=kernel_figures(trace),
    )


def rank_figures(rank: RankTrace) -> RankFigures:
    """Return the figures of one rank."""
    ops = rank.ops
    start, end = ops.start_s, ops.end_s
    gpu_s = float(end.max() - start.min())
    busy = busy_time(start, end, ops.communicates, ops.computes)
    lengths = [length_s(rank, step) for step in steps_of(rank)]
    return RankFigures(
        rank=rank.rank,
        step_s=sum(lengths) / len(lengths),
        gpu_s=gpu_s,
        compute_s=busy.compute_s,
        other_busy_s=busy.busy_s - busy.compute_s,
        idle_s=gpu_s - busy.busy_s,
        launch_bound_s=_launch_bound_s(rank),
        communication_s=busy.communication_s,
        exposed_s=busy.exposed_s,
        overlap=busy.overlap,
        class_s=class_seconds(ops),
        streams=tuple(_stream(rank, code) for code in _by_use(ops)),
    )


def class_seconds(ops: GpuOps) -> dict[str, float]:
    """Return the seconds of all ops of each class that is there."""
    sums = np.bincount(ops.code, weights=ops.seconds, minlength=len(CLASSES))
    counts = np.bincount(ops.code, minlength=len(CLASSES))
    return {name: float(sums[code]) for code, name in enumerate(CLASSES) if counts[code]}


def _by_use(ops: GpuOps) -> list[int]:
    """Return the streams, the busiest first."""
    sums = np.bincount(ops.stream, weights=ops.seconds)
    return sorted(np.unique(ops.stream).tolist(), key=lambda code: (-sums[code], code))


def _stream(rank: RankTrace, code: int) -> StreamFigures:
    mine = rank.ops.stream == code
    start, end, launch = rank.ops.start_s[mine], rank.ops.end_s[mine], rank.launch_s[mine]
    before = np.maximum.accumulate(end)[:-1]
    gap = np.maximum(start[1:] - before, 0.0)
    for_host = launch[1:] > before + _SAME_S  # nan, where there is no launch, is not
    short = ~for_host & (gap < BACK_TO_BACK_S - _SAME_S)
    return StreamFigures(
        stream=rank.streams[code],
        ops=int(mine.sum()),
        busy_s=covered_s(start, end),
        host_s=float(gap[for_host].sum()),
        back_to_back_s=float(gap[short].sum()),
        other_s=float(gap[~for_host & ~short].sum()),
    )


def _launch_bound_s(rank: RankTrace) -> float | None:
    """Return the idle seconds of the whole GPU whose next op was launched only after they had begun."""
    if np.isnan(rank.launch_s).all():
        return None
    start, launch = rank.ops.start_s, rank.launch_s
    before: Floats = np.maximum.accumulate(rank.ops.end_s)[:-1]
    gap = np.maximum(start[1:] - before, 0.0)
    return float(gap[launch[1:] > before + _SAME_S].sum())


def stragglers(trace: RunTrace) -> tuple[Straggling, ...]:
    """Return how long each rank waits in communication for the others, and how often it is the last; none of one rank.

    The kernel of the rank that comes last is the shortest, whatever the clocks of ranks say.
    """
    matched = [meeting for meeting in meetings(trace) if len(meeting.ops) == len(trace.ranks) > 1]
    if not matched:
        return ()
    lengths = np.array(
        [[rank.ops.seconds[meeting.ops[rank.rank]] for rank in trace.ranks] for meeting in matched], dtype=np.float64
    )
    last = np.argmin(lengths, axis=1)
    waits = (lengths - lengths.min(axis=1, keepdims=True)).sum(axis=0)
    return tuple(
        Straggling(rank.rank, float(waits[at]), int((last == at).sum()), len(matched))
        for at, rank in enumerate(trace.ranks)
    )


def kernel_figures(trace: RunTrace) -> tuple[KernelFigures, ...]:
    """Return the kernels by name, those that take most time first."""
    seconds: dict[tuple[str, str], float] = {}
    launches: dict[tuple[str, str], int] = {}
    for rank in trace.ranks:
        pairs = rank.ops.name * len(CLASSES) + rank.ops.code
        distinct, number = np.unique(pairs, return_inverse=True)
        sums, counts = np.bincount(number, weights=rank.ops.seconds), np.bincount(number)
        for pair, total, count in zip(distinct.tolist(), sums.tolist(), counts.tolist(), strict=True):
            key = rank.names[pair // len(CLASSES)], CLASSES[pair % len(CLASSES)]
            seconds[key] = seconds.get(key, 0.0) + total
            launches[key] = launches.get(key, 0) + count
    n = len(trace.ranks)
    rows = [KernelFigures(*key, total / n, launches[key] / n) for key, total in seconds.items()]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.name)))
