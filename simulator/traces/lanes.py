"""Lanes of a program that plays what was recorded."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.program import Collective, CollectiveKind, Purpose, RecordedWork, Step

#: Lane -> its steps so far.
RecordedLanes = dict[str, list[Step]]


@dataclass(frozen=True, slots=True)
class LaneOp:
    """An op of a lane, behind the steps ``after``. Its last step is ``o`` and its number.

    ``delay_s``: from when all that has ended to its start. ``work_s``: from its start, or the last arrival where ranks
    meet, to its end.
    """

    number: int
    name: str
    lane: str
    after: tuple[str, ...]
    delay_s: float
    work_s: float


def add_op(lanes: RecordedLanes, op: LaneOp) -> None:
    """Add an op that waits for no other rank."""
    work = RecordedWork(op.name, seconds=op.delay_s + op.work_s, stream=op.lane)
    lanes.setdefault(op.lane, []).append(Step(f"o{op.number}", work, op.after))


def add_meeting(lanes: RecordedLanes, op: LaneOp, axis: str, meeting_lane: str) -> None:
    """Add an op in which the ranks of ``axis`` meet: its arrival, a barrier in ``meeting_lane``, and its work."""
    arrival = RecordedWork(f"{op.name} arrives", seconds=op.delay_s, stream=op.lane)
    barrier = Collective(op.name, CollectiveKind.BARRIER, 0.0, axis, Purpose.DATA, stream=meeting_lane)
    work = RecordedWork(op.name, seconds=op.work_s, stream=op.lane)
    lane = lanes.setdefault(op.lane, [])
    lane.append(Step(f"a{op.number}", arrival, op.after))
    lanes.setdefault(meeting_lane, []).append(Step(f"m{op.number}", barrier, (f"a{op.number}",)))
    lane.append(Step(f"o{op.number}", work, (f"m{op.number}",)))
