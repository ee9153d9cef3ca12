"""Columns that a reader fills event by event, and the `RankTrace` that they become."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.arrays import Bools, Floats, Ints
from simulator.traces.classes import CLASSES, with_hand_over
from simulator.traces.trace import GpuOps, HostCalls, RankTrace, StreamWaits, TracedCollective, TracedStep
from simulator.units import us

NO_LAUNCHES = "launches are not recorded, so that nothing is known of waits for the host"
NO_STEPS = "no step is marked (ProfilerStep), so that all of it counts as one step"
NO_BYTES = "bytes of communication are not recorded"
NO_WAITS = "waits between streams are not recorded (cuda_sync), so that their order is inferred from calls and times"

_OPTIMIZER, _COPY = CLASSES.index("optimizer"), CLASSES.index("copy")
#: Classes of kernels that a mark of the optimizer makes the optimizer's.
_MAY_UPDATE = tuple(CLASSES.index(name) for name in ("matmul", "attention", "memory"))


def _floats() -> array[float]:
    return array("d")


def _ints() -> array[int]:
    return array("q")


@dataclass
class RankColumns:
    """Events of one rank: times in microseconds of its clock, names and streams as numbers."""

    op_start: array[float] = field(default_factory=_floats)
    op_end: array[float] = field(default_factory=_floats)
    #: Name, class, stream, correlation, collective and whether it is a copy, of one op after another.
    op_facts: array[int] = field(default_factory=_ints)
    call_start: array[float] = field(default_factory=_floats)
    call_end: array[float] = field(default_factory=_floats)
    #: Name, kind, thread and correlation of one call after another.
    call_facts: array[int] = field(default_factory=_ints)
    #: Correlation of the waiting call, stream, correlation of the call that recorded the event, awaited stream.
    waits: list[tuple[int, int, int, int]] = field(default_factory=list)
    steps: list[tuple[str, float, float]] = field(default_factory=list)
    #: Stream (-1 on the host), start and end of ranges of the optimizer.
    optimizer_marks: list[tuple[int, float, float]] = field(default_factory=list)
    #: Start and end of calls of communication on the host, and the collective.
    comm_calls: list[tuple[float, float, int]] = field(default_factory=list)

    def add_op(self, start: float, end: float, facts: tuple[int, int, int, int, int, int]) -> None:
        """Add a kernel, copy or memset."""
        self.op_start.append(start)
        self.op_end.append(end)
        self.op_facts.extend(facts)

    def add_call(self, start: float, end: float, facts: tuple[int, int, int, int]) -> None:
        """Add a call of the host."""
        self.call_start.append(start)
        self.call_end.append(end)
        self.call_facts.extend(facts)

    @property
    def first_us(self) -> float:
        """The earliest event."""
        starts = [min(column) for column in (self.op_start, self.call_start) if column]
        return min([*starts, *[start for _, start, _ in self.steps]])


def rank_trace(
    columns: RankColumns,
    *,
    rank: int,
    file: str,
    gpu: str,
    world_size: int,
    names: tuple[str, ...],
    streams: tuple[str, ...],
    collectives: tuple[TracedCollective, ...],
    begin_s: float,
) -> RankTrace:
    """Return the trace of ``rank``, whose first event is at ``begin_s``."""
    first = columns.first_us

    def seconds(times: Sequence[float] | array[float]) -> Floats:
        return (np.array(times, dtype=np.float64) - first) * us + begin_s

    call_facts = np.array(columns.call_facts, dtype=np.int64).reshape(-1, 4)
    order = np.argsort(seconds(columns.call_start), kind="stable")
    calls = HostCalls(
        seconds(columns.call_start)[order], seconds(columns.call_end)[order], *call_facts[order, :3].T.copy()
    )
    call_of = _first_of(call_facts[order, 3])
    op_facts = np.array(columns.op_facts, dtype=np.int64).reshape(-1, 6)
    ops = _ops(seconds(columns.op_start), seconds(columns.op_end), op_facts, call_of)
    comm_calls = [(*seconds(times).tolist(), number) for *times, number in columns.comm_calls]
    ops.collective[:] = _told_by_calls(ops, calls, collectives, comm_calls)
    ops.code[:] = _with_hand_overs(ops, collectives)
    marks = [(number, *seconds(times).tolist()) for number, *times in columns.optimizer_marks]
    ops.code[:] = np.where(np.isin(ops.code, _MAY_UPDATE) & _updates(ops, calls, marks), _OPTIMIZER, ops.code)
    waits = [
        (call_of[call], waiting, call_of[recorded], awaited)
        for call, waiting, recorded, awaited in columns.waits
        if call in call_of and recorded in call_of
    ]
    steps = sorted((start, end, text) for text, start, end in columns.steps)
    return RankTrace(
        rank=rank,
        file=file,
        gpu=gpu,
        world_size=world_size,
        names=names,
        streams=streams,
        collectives=collectives,
        ops=ops,
        calls=calls,
        waits=StreamWaits(*np.array(waits, dtype=np.int64).reshape(-1, 4).T.copy()),
        steps=tuple(TracedStep(text, *seconds((start, end)).tolist()) for start, end, text in steps),
        missing=tuple(_missing(columns, ops, calls, collectives)),
    )


def _ops(start_s: Floats, end_s: Floats, facts: Ints, call_of: Mapping[int, int]) -> GpuOps:
    """Return ops by start; ``facts`` as in `RankColumns`, ``call_of``: correlation -> call."""
    order = np.lexsort((end_s, start_s))
    name, code, stream, correlation, collective, copies = facts[order].T
    return GpuOps(
        start_s=start_s[order],
        end_s=end_s[order],
        name=name.copy(),
        code=code.copy(),
        stream=stream.copy(),
        call=np.array([call_of.get(number, -1) for number in correlation.tolist()], dtype=np.int64),
        collective=collective.copy(),
        is_copy=copies.astype(bool),
    )


def _first_of(correlations: Ints) -> dict[int, int]:
    """Return the first call of each correlation."""
    first: dict[int, int] = {}
    for index, number in enumerate(correlations.tolist()):
        if number >= 0:
            first.setdefault(number, index)
    return first


def _told_by_calls(
    ops: GpuOps,
    calls: HostCalls,
    collectives: Sequence[TracedCollective],
    comm_calls: Sequence[tuple[float, float, int]],
) -> Ints:
    """Return the collective of each op; kernels that do not name their bytes have that of the call around their launch.

    A kernel belongs to the last call of communication that had begun when it was launched, and had not ended.
    """
    codes = ops.collective.copy()
    comm_calls = sorted(comm_calls)
    begins = np.array([start for start, _, _ in comm_calls])
    for op in np.flatnonzero((codes >= 0) & (ops.call >= 0)).tolist():
        if collectives[codes[op]].nbytes:
            continue
        launched = calls.start_s[ops.call[op]]
        at = int(np.searchsorted(begins, launched, side="right")) - 1
        if at >= 0 and launched <= comm_calls[at][1]:
            codes[op] = comm_calls[at][2]
    return codes


def _with_hand_overs(ops: GpuOps, collectives: Sequence[TracedCollective]) -> Ints:
    """Return the class of each op, now that calls have told of communication what its kernels do not say."""
    codes = np.array([CLASSES.index(with_hand_over("communication", one.kind)) for one in collectives], dtype=np.int64)
    communicates = (ops.collective >= 0) & (ops.code == CLASSES.index("communication"))
    return np.where(communicates, codes[ops.collective], ops.code) if len(codes) else ops.code


def _updates(ops: GpuOps, calls: HostCalls, marks: Sequence[tuple[int, float, float]]) -> Bools:
    """Return which ops run inside the optimizer's ranges: those on the GPU, or by their launches those on the host."""
    inside = np.zeros(len(ops), dtype=bool)
    on_gpu = any(stream >= 0 for stream, _, _ in marks)
    launched = np.where(ops.call >= 0, calls.start_s[ops.call] if len(calls) else np.nan, np.nan)
    for stream, start, end in marks:
        if on_gpu and stream >= 0:
            inside |= (ops.stream == stream) & (ops.start_s >= start) & (ops.start_s < end)
        elif not on_gpu:
            inside |= (launched >= start) & (launched < end)
    return inside


def _missing(
    columns: RankColumns,
    ops: GpuOps,
    calls: HostCalls,
    collectives: Sequence[TracedCollective],
) -> list[str]:
    missing = []
    if not (ops.call >= 0).any():
        missing.append(NO_LAUNCHES)
    if not columns.steps:
        missing.append(NO_STEPS)
    used = {number for number in np.unique(ops.collective).tolist() if number >= 0}
    if any(not collectives[number].nbytes and collectives[number].operation != "barrier" for number in used):
        missing.append(NO_BYTES)
    if not columns.waits and calls.are("wait").any() and len(np.unique(ops.stream)) > 1:
        missing.append(NO_WAITS)
    return missing
