"""The report of a deadlock: who waits for whom when nothing moves any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simulator.engine.rank import Awaited
from simulator.program import Comm, PointToPoint, Program, Role

_SHOWN = 16


class UncalledComm(NamedTuple):
    """A communication that ``missing``, numbers of ranks, have not called yet."""

    comm: Comm
    missing: Sequence[int]


class BlockedLane(NamedTuple):
    """A lane that cannot go on: its rank, the role of that, the step that the lane has come to.

    It waits for the step of a label, for communication, or for something else.
    """

    rank: int
    role: int
    lane: str
    next_step: int
    waits_for: str | UncalledComm | Awaited


def report(program: Program, blocked: Sequence[BlockedLane]) -> str:
    """Write one line per blocked lane: the rank, its next operation, and what that waits for."""
    lines = [f"deadlock: {len({one.rank for one in blocked})} rank(s) cannot go on"]
    for one in blocked[:_SHOWN]:
        lines.append(f"  rank {one.rank}, lane {one.lane}{_reason(program.roles[one.role], one)}")
    if len(blocked) > _SHOWN:
        lines.append(f"  ... and {len(blocked) - _SHOWN} more lanes")
    return "\n".join(lines)


def _reason(role: Role, blocked: BlockedLane) -> str:
    """Return the step that a lane has come to, and what it waits for."""
    waits_for = blocked.waits_for
    if isinstance(waits_for, Awaited):
        return f": waits for {waits_for.value}, asked for when a lane has run its steps of the last one"
    return f", step {role.lanes[blocked.lane][blocked.next_step].label}: waits for {_awaited(role, waits_for)}"


def _awaited(role: Role, waits_for: str | UncalledComm) -> str:
    if isinstance(waits_for, str):
        if all(step.label != waits_for for _, _, step in role.steps()):
            return f"step {waits_for} of the same rank, which never came"
        return f"step {waits_for} of the same rank, which has not ended"
    who = ", ".join(f"rank {member}" for member in waits_for.missing)
    comm = waits_for.comm
    tag = comm.tag if isinstance(comm, PointToPoint) else ""
    return f"{who} to call the other side of {comm.op} {comm.name!r} {tag}".rstrip()
