"""Figures of a trace: times by class, idle time and its causes, overlap, and how ranks differ.

Figures that HolisticTraceAnalysis (facebookresearch, ``hta/analyzers``) has too are defined as there. These are
compute, other busy and idle time of a rank, overlap of communication, and causes of idle time on a stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.arrays import Floats
from simulator.timeline import covered_s
from simulator.traces.classes import CLASSES
from simulator.traces.meetings import meetings
from simulator.traces.overlap import busy_time
from simulator.traces.trace import GpuOps, RankTrace, RunTrace
from simulator.traces.windows import in_steps, length_s, step_ops, steps_of
from simulator.units import us

#: Shorter gaps lie between kernels that follow one another. HolisticTraceAnalysis compares 30 with microseconds,
#: although its documentation says nanoseconds (``_analyze_idle_time_for_stream``).
BACK_TO_BACK_S = 30 * us
#: Half of the finest tick of a profiler's clock: times closer than this are one.
_SAME_S = 0.5e-9
#: Lengths that differ by less are equal: both ends of each are rounded to a tick.
_TIE_S = 2.5e-9


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """A stream: its busy time, and the time between its ops by cause.

    ``host_s``: the next op was launched after the last one had ended; None where launches are not recorded.
    ``back_to_back_s``: gaps shorter than `BACK_TO_BACK_S`. ``other_s``: all else, such as waits for another stream.
    """

    stream: str
    ops: float
    busy_s: float
    host_s: float | None
    back_to_back_s: float
    other_s: float


@dataclass(frozen=True, slots=True)
class RankFigures:
    """A rank in a step, from its first op to its last: the mean over its steps.

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


#: Fields of `RankFigures` that are seconds and always there.
_SECONDS = ("step_s", "gpu_s", "compute_s", "other_busy_s", "idle_s", "communication_s", "exposed_s")


@dataclass(frozen=True, slots=True)
class Straggling:
    """A rank in its communication with the other ranks of the trace.

    ``waits_s``: how much longer its kernels of communication run than those of the rank that comes last, per step.
    ``last``: how often it comes last by itself, of ``meetings`` in a step.
    """

    rank: int
    waits_s: float
    last: float
    meetings: float


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """All launches of the kernels of one name: ``seconds`` and ``launches`` are means over ranks and steps."""

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
    """Return the figures of a trace; those of marked steps do not count what runs outside of them."""
    inside = RunTrace(tuple(in_steps(rank) for rank in trace.ranks))
    return TraceFigures(
        steps=len(steps_of(trace.ranks[0])),
        ranks=tuple(rank_figures(rank) for rank in trace.ranks),
        stragglers=stragglers(inside),
        kernels=kernel_figures(inside),
    )


def rank_figures(rank: RankTrace) -> RankFigures:
    """Return the figures of one rank in a mean step."""
    steps = steps_of(rank)
    if len(steps) == 1:
        return _step_figures(step_ops(rank, steps[0]))
    return _mean([_step_figures(step_ops(rank, step)) for step in steps])


def _mean(steps: Sequence[RankFigures]) -> RankFigures:
    """Return the mean of a rank's steps; a stream or class that a step lacks counts as 0 there."""
    n = len(steps)

    def total(name: str) -> float:
        return math.fsum(getattr(step, name) for step in steps)

    lates = [step.launch_bound_s for step in steps if step.launch_bound_s is not None]
    communication_s = total("communication_s")
    hidden_s = math.fsum(step.overlap * step.communication_s for step in steps if step.overlap is not None)
    streams: dict[str, list[StreamFigures]] = {}
    for step in steps:
        for stream in step.streams:
            streams.setdefault(stream.stream, []).append(stream)
    names = dict.fromkeys(name for step in steps for name in step.class_s)
    return RankFigures(
        rank=steps[0].rank,
        launch_bound_s=sum(lates) / n if lates else None,
        overlap=hidden_s / communication_s if communication_s else None,
        class_s={name: sum(step.class_s.get(name, 0.0) for step in steps) / n for name in names},
        streams=tuple(_mean_stream(parts, n) for parts in streams.values()),
        **{name: total(name) / n for name in _SECONDS},
    )


def _mean_stream(parts: Sequence[StreamFigures], n: int) -> StreamFigures:
    """Return the mean of a stream over ``n`` steps."""
    facts = {
        name: sum(getattr(part, name) for part in parts) / n for name in ("ops", "busy_s", "back_to_back_s", "other_s")
    }
    hosts = [part.host_s for part in parts if part.host_s is not None]
    return StreamFigures(parts[0].stream, host_s=sum(hosts) / n if hosts else None, **facts)


def _step_figures(rank: RankTrace) -> RankFigures:
    """Return the figures of the one step that ``rank`` holds."""
    (step,) = rank.steps
    ops = rank.ops
    start, end = ops.start_s, ops.end_s
    gpu_s = float(end.max() - start.min())
    busy = busy_time(start, end, ops.communicates, ops.computes)
    return RankFigures(
        rank=rank.rank,
        step_s=length_s(rank, step),
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
        host_s=None if np.isnan(launch).all() else float(gap[for_host].sum()),
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
    shortest = np.sort(lengths, axis=1)
    last = np.where(shortest[:, 1] - shortest[:, 0] > _TIE_S, np.argmin(lengths, axis=1), -1)
    steps = len(steps_of(trace.ranks[0]))
    waits = (lengths - lengths.min(axis=1, keepdims=True)).sum(axis=0)
    return tuple(
        Straggling(rank.rank, float(waits[at]) / steps, int((last == at).sum()) / steps, len(matched) / steps)
        for at, rank in enumerate(trace.ranks)
    )


def kernel_figures(trace: RunTrace) -> tuple[KernelFigures, ...]:
    """Return the kernels by name, those that take most time first."""
    seconds: dict[tuple[str, str], float] = {}
    launches: dict[tuple[str, str], float] = {}
    n = len(trace.ranks)
    for rank in trace.ranks:
        steps = len(steps_of(rank))
        pairs = rank.ops.name * len(CLASSES) + rank.ops.code
        distinct, number = np.unique(pairs, return_inverse=True)
        sums, counts = np.bincount(number, weights=rank.ops.seconds), np.bincount(number)
        for pair, total, count in zip(distinct.tolist(), sums.tolist(), counts.tolist(), strict=True):
            key = rank.names[pair // len(CLASSES)], CLASSES[pair % len(CLASSES)]
            seconds[key] = seconds.get(key, 0.0) + total / steps
            launches[key] = launches.get(key, 0) + count / steps
    rows = [KernelFigures(*key, total / n, launches[key] / n) for key, total in seconds.items()]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.name)))
