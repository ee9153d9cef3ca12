"""The step of a trace as a `Program`, which the engine plays.

A rank's host is a lane, and each of its streams another one; what they run is `RecordedWork`. A step of a stream waits
for the host's call that launches it and for the ops of other streams that the trace shows or suggests. A
communication of several ranks of the trace begins when the last of them has come. It then takes as long as it took the
rank that came last.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from simulator.program import Axis, Program, RecordedWork, Role, Step, numbered_axis
from simulator.traces.classes import CLASSES
from simulator.traces.lanes import LaneOp, RecordedLanes, add_meeting, add_op
from simulator.traces.meetings import meetings
from simulator.traces.order import OrderedOp, StepOrder, order_of
from simulator.traces.trace import EXCHANGE_CODES, RankTrace, RunTrace
from simulator.traces.what_if import WhatIf

HOST = "host"
_ALL_STREAMS = "all streams"


@dataclass(frozen=True)
class _Place:
    """The axis of a meeting, and its seconds once the last rank has come."""

    axis: str
    exchange_s: float


@dataclass(frozen=True)
class OrderedTrace:
    """The step of a trace, with the order of each rank and the operations in which ranks meet.

    ``begins_s``: when each rank begins the step, from the first one, by clocks that agree where ranks meet.
    """

    trace: RunTrace
    orders: tuple[StepOrder, ...]
    begins_s: tuple[float, ...]
    places: Mapping[tuple[int, int], _Place]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]


def ordered(trace: RunTrace) -> OrderedTrace:
    """Return the order of a trace of one step."""
    position = {rank.rank: at for at, rank in enumerate(trace.ranks)}
    axes: dict[tuple[Hashable, tuple[int, ...]], str] = {}
    places: dict[tuple[int, int], _Place] = {}
    late: list[list[float]] = [[] for _ in trace.ranks]
    for meeting in meetings(trace):
        members = tuple(position[rank] for rank in meeting.ops)
        axis = axes.setdefault((meeting.group, members), numbered_axis(Axis.PROCESS_GROUP, len(axes)))
        ops = [(at, op) for at, op in zip(members, meeting.ops.values(), strict=True)]
        place = _Place(axis, min(float(trace.ranks[at].ops.seconds[op]) for at, op in ops))
        first, first_op = ops[0]
        for at, op in ops:
            places[at, op] = place
            if first == 0:
                late[at].append(float(trace.ranks[at].ops.end_s[op] - trace.ranks[first].ops.end_s[first_op]))
    # All ranks see the end of an operation at once; by how much their clocks differ in it, clocks are wrong.
    starts = [
        rank.steps[0].start_s - (float(np.median(late[at])) if late[at] else 0.0) for at, rank in enumerate(trace.ranks)
    ]
    return OrderedTrace(
        trace=trace,
        orders=tuple(order_of(rank) for rank in trace.ranks),
        begins_s=tuple(start - min(starts) for start in starts),
        places=places,
        groups={axis: (members,) for (_, members), axis in axes.items()},
    )


def replay_program(step: OrderedTrace, change: WhatIf) -> Program:
    """Return the program of a step under a change."""
    n = len(step.trace.ranks)
    roles = tuple(Role(f"rank {step.trace.ranks[at].rank}", _RankLanes(step, at, change).lanes()) for at in range(n))
    groups = {str(Axis.RANK): tuple((at,) for at in range(n)), **step.groups}
    return Program(roles, tuple(range(n)), groups, name="trace")


class _RankLanes:
    """The lanes of one rank."""

    def __init__(self, step: OrderedTrace, at: int, change: WhatIf) -> None:
        self._step, self._at, self._change = step, at, change
        self._rank: RankTrace = step.trace.ranks[at]
        self._order = step.orders[at]
        self._exchanges = np.isin(self._rank.ops.code, EXCHANGE_CODES)
        self._lanes: RecordedLanes = {HOST: []}

    def lanes(self) -> dict[str, tuple[Step, ...]]:
        """Return lane -> steps."""
        for step in self._host():
            self._lanes[HOST].append(step)
        for op in self._sequence().tolist():
            self._add_op(op, self._order.ops[op])
        return {lane: tuple(steps) for lane, steps in self._lanes.items()}

    def _sequence(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the ops in the order in which lanes run them."""
        ops = self._rank.ops
        if self._change.overlap != "none":
            return np.arange(len(ops))
        return np.lexsort((ops.start_s, self._rank.begun_s))

    def _host(self) -> Iterator[Step]:
        begin_s, factor = self._step.begins_s[self._at], self._change.host
        yield Step("begin", RecordedWork("begin", seconds=begin_s, stream=HOST))
        for moment in self._order.host:
            name = self._rank.names[self._rank.calls.name[moment.call]]
            yield Step(f"h{moment.call}", RecordedWork(name, seconds=moment.work_s * factor, stream=HOST))
            if moment.awaited >= 0 and not self._skips(moment.awaited):
                awaited = (f"o{moment.awaited}",)
                yield Step(f"b{moment.call}", RecordedWork(f"{name} returns", stream=HOST), awaited)
        if self._order.host:
            yield Step("end", RecordedWork("end", seconds=self._order.tail_s * factor, stream=HOST))
        else:  # what is behind the ops is not known to be the host's
            last = tuple(f"o{op}" for op in self._last_ops() if not self._skips(op))
            yield Step("end", RecordedWork("end", seconds=self._order.tail_s, stream=HOST), last)

    def _last_ops(self) -> list[int]:
        """Return the last op of each stream."""
        streams = self._rank.ops.stream.tolist()
        return sorted({stream: op for op, stream in enumerate(streams)}.values())

    def _skips(self, awaited: int) -> bool:
        """Tell whether nothing waits for this op, as communication is to be hidden."""
        return self._change.overlap == "full" and bool(self._exchanges[awaited])

    def _add_op(self, op: int, ordered_op: OrderedOp) -> None:
        ops, rank = self._rank.ops, self._rank
        name, stream = rank.names[ops.name[op]], self._lane_of(op)
        after = ["begin" if ordered_op.call < 0 else f"h{ordered_op.call}"]
        after += [f"o{other}" for other in ordered_op.after if self._waits_for(op, other)]
        collective = rank.collectives[ops.collective[op]] if ops.collective[op] >= 0 else None
        factor = self._change.factor(rank.rank, CLASSES[ops.code[op]], collective)
        place = self._step.places.get((self._at, op))
        work_s = factor * (ordered_op.work_s if place is None else place.exchange_s)
        lane_op = LaneOp(op, name, stream, tuple(after), ordered_op.delay_s, work_s)
        if place is None:
            add_op(self._lanes, lane_op)
        else:
            add_meeting(self._lanes, lane_op, place.axis, place.axis)

    def _lane_of(self, op: int) -> str:
        if self._change.overlap == "none":
            return _ALL_STREAMS
        stream = self._rank.streams[self._rank.ops.stream[op]]
        return f"{stream} exchanges" if self._change.overlap == "full" and self._exchanges[op] else stream

    def _waits_for(self, op: int, other: int) -> bool:
        """Tell whether an op waits for one of another stream; in one lane it does anyhow."""
        if self._change.overlap == "none":
            return False
        return not (self._change.overlap == "full" and self._exchanges[other] and not self._exchanges[op])
