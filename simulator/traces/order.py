"""The order in which a rank's step ran: what every op and every call of the host waited for.

An op begins when its stream has come to it, its launch has begun, and the ops that its stream waits for have ended.
What is left between that and its recorded start is kept as its delay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simulator.arrays import Bools, Floats, Ints
from simulator.traces.trace import RankTrace
from simulator.units import us

#: Clocks of old traces count whole microseconds, so that an end may lie so far behind the start that it allows.
ROUNDING_S = 1.5 * us
#: Delays up to this length are usual between a launch and its kernel; behind longer ones another stream is looked for.
#: Assumed: several times the microseconds that a launch takes, and far less than the kernels that a stream waits for.
USUAL_DELAY_S = 20 * us


@dataclass(frozen=True, slots=True)
class OrderedOp:
    """A GPU op: index of the call that launches it (-1: none) and of the ops on other streams that it waits for.

    ``delay_s``: from when all that has ended until it starts. ``work_s``: from then to its end.
    """

    call: int
    after: tuple[int, ...]
    delay_s: float
    work_s: float


@dataclass(frozen=True, slots=True)
class HostMoment:
    """A call of the host, ``work_s`` after the one before it. The host goes on when op ``awaited`` has ended; -1:
    at once."""

    call: int
    work_s: float
    awaited: int


@dataclass(frozen=True)
class StepOrder:
    """The order of a step: its ops as `GpuOps` has them, the calls of its host, and the host's ``tail_s`` at its end.

    Without calls ``tail_s`` counts from the end of the last op: nothing tells what the host did before.
    All host threads count as one that makes the calls in their order, for threads of a training step take turns.
    """

    ops: tuple[OrderedOp, ...]
    host: tuple[HostMoment, ...]
    tail_s: float

    @property
    def unexplained_s(self) -> float:
        """Seconds of all delays beyond `USUAL_DELAY_S`."""
        return sum(op.delay_s for op in self.ops if op.delay_s > USUAL_DELAY_S)


def order_of(rank: RankTrace) -> StepOrder:
    """Return the order of the one step that ``rank`` holds."""
    (step,) = rank.steps
    ops, launch = rank.ops, rank.launch_s
    launched = np.where(np.isnan(launch), step.start_s, np.maximum(launch, step.start_s))
    after, earlier = _awaited_by_streams(rank), _EarlierOps(rank)
    guessed = _follow_waits(rank) if not len(rank.waits.call) else np.zeros(len(ops), dtype=bool)
    ends: dict[int, float] = {}
    ordered: list[OrderedOp] = []
    # The last launch among all that an op follows, itself included: the host has made it when the op ends.
    behind: list[int] = ops.call.tolist()
    last_of: dict[int, int] = {}
    for op in range(len(ops)):
        start, end, stream = float(ops.start_s[op]), float(ops.end_s[op]), int(ops.stream[op])
        ready = max(float(launched[op]), ends.get(stream, step.start_s))
        awaited = [other for other in after.get(op, ()) if other < op and ops.end_s[other] <= start + ROUNDING_S]
        if guessed[op] or (not awaited and start - ready > USUAL_DELAY_S):
            awaited += earlier.last_to_end(op, ready)
        ready = max([ready, *[float(ops.end_s[other]) for other in awaited]])
        work_s = max(end - max(start, ready), 0.0)
        ordered.append(OrderedOp(int(ops.call[op]), tuple(awaited), max(start - ready, 0.0), work_s))
        ends[stream] = max(ends.get(stream, 0.0), end)
        behind[op] = last_of[stream] = max(behind[op], last_of.get(stream, -1), *[behind[other] for other in awaited])
    host, tail_s = _host(rank, behind)
    return StepOrder(tuple(ordered), host, tail_s)


def _awaited_by_streams(rank: RankTrace) -> dict[int, list[int]]:
    """Return for each op the ops of other streams that the trace says its stream waits for."""
    launch, stream = rank.launch_s, rank.ops.stream
    after: dict[int, list[int]] = {}
    waits = rank.waits
    for call, waiting, recorded, awaited in zip(waits.call, waits.stream, waits.recorded, waits.awaited, strict=True):
        behind = np.flatnonzero((stream == waiting) & (launch > rank.calls.start_s[call]))
        before = np.flatnonzero((stream == awaited) & (launch < rank.calls.start_s[recorded]))
        if len(behind) and len(before) and waiting != awaited:
            first, last = behind[np.argmin(launch[behind])], before[np.argmax(launch[before])]
            after.setdefault(int(first), []).append(int(last))
    return after


def _follow_waits(rank: RankTrace) -> Bools:
    """Return which ops the host launched right after it let a stream wait for an event."""
    waits, launch = rank.calls.start_s[rank.calls.are("wait")], rank.launch_s
    launches = np.unique(launch[~np.isnan(launch)])
    return _last_before(waits, launch) > _last_before(launches, launch)


def _last_before(times: Floats, moments: Floats) -> Floats:
    """Return the last of the ascending ``times`` before each moment; minus infinity where there is none."""
    return np.concatenate(([-np.inf], times))[np.searchsorted(times, moments)]


class _EarlierOps:
    """The ops of a rank in the order in which they end."""

    def __init__(self, rank: RankTrace) -> None:
        self._ops, self._launch = rank.ops, rank.launch_s
        self._by_end = np.argsort(rank.ops.end_s, kind="stable")
        self._ends = rank.ops.end_s[self._by_end]

    def last_to_end(self, op: int, ready_s: float) -> list[int]:
        """Return the op of another stream that ended last between ``ready_s`` and the start of ``op``, if any.

        Ops that were launched after ``op`` cannot be what it waits for.
        """
        ops = self._ops
        low, high = np.searchsorted(self._ends, (ready_s, ops.start_s[op] + ROUNDING_S), side="right")
        for other in self._by_end[low:high][::-1].tolist():
            launched_later = self._launch[other] > self._launch[op]
            if ops.stream[other] != ops.stream[op] and other < op and not launched_later:
                return [other]
        return []


def _host(rank: RankTrace, behind: list[int]) -> tuple[tuple[HostMoment, ...], float]:
    """Return the calls of the host in order, and its seconds from the last one to the end of the step.

    ``behind``: the last call that each op follows. No earlier call can have waited for the op.
    """
    (step,) = rank.steps
    reached, moments = step.start_s, []
    for call, ended in _moments(rank):
        awaited = ended if ended >= 0 and behind[ended] <= call else -1
        start = max(float(rank.calls.start_s[call]), reached)
        moments.append(HostMoment(call, start - reached, awaited))
        reached = start if awaited < 0 else max(start, float(rank.ops.end_s[awaited]))
    if not moments:
        reached = float(rank.ops.end_s.max())
    return tuple(moments), max(step.end_s - reached, 0.0)


def _moments(rank: RankTrace) -> Iterator[tuple[int, int]]:
    """Yield the calls that launch ops of the step or wait for them, with the op that each waits for, or -1."""
    (step,) = rank.steps
    calls, ops = rank.calls, rank.ops
    copies: dict[int, list[int]] = {}
    for op in np.flatnonzero(ops.is_copy & (ops.call >= 0)).tolist():
        copies.setdefault(int(ops.call[op]), []).append(op)
    launching = np.isin(np.arange(len(calls)), ops.call)
    copying, waiting = calls.are("copy"), calls.are("synchronize")
    inside = (calls.start_s >= step.start_s) & (calls.start_s < step.end_s)
    for call in np.flatnonzero(inside | launching).tolist():
        if launching[call]:
            mine = np.array(copies.get(call, []) if copying[call] else [], dtype=np.int64)
            yield call, _waited_for(rank, call, mine)
        elif waiting[call]:
            awaited = _waited_for(rank, call, np.flatnonzero(rank.launch_s < calls.start_s[call]))
            if awaited >= 0:
                yield call, awaited


def _waited_for(rank: RankTrace, call: int, candidates: Ints) -> int:
    """Return the op of ``candidates`` whose end the call waited for; -1 where none ended while it lasted."""
    start, end, ends = rank.calls.start_s[call], rank.calls.end_s[call], rank.ops.end_s[candidates]
    ended = np.flatnonzero((ends > start) & (ends <= end + ROUNDING_S))
    return int(candidates[ended[np.argmax(ends[ended])]]) if len(ended) else -1
