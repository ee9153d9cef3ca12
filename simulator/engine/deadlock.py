"""Says who waits for whom when nothing moves any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulator.program import PointToPoint, Program

if TYPE_CHECKING:
    from simulator.engine.rank import Meeting, Rank

_SHOWN = 16


def report(program: Program, ranks: Sequence[Rank]) -> str:
    """One line per blocked lane: the rank, its next operation, and what that waits for."""
    stuck = [(rank, lane) for rank in ranks for lane in rank.waits_for]
    lines = [f"deadlock: {len({rank.number for rank, _ in stuck})} rank(s) cannot go on"]
    for rank, lane in stuck[:_SHOWN]:
        step = program.roles[program.role_of[rank.number]].lanes[lane][rank.next_step[lane]]
        lines.append(f"  rank {rank.number}, lane {lane}, step {step.label}: waits for {_reason(rank, lane)}")
    if len(stuck) > _SHOWN:
        lines.append(f"  ... and {len(stuck) - _SHOWN} more lanes")
    return "\n".join(lines)


def _reason(rank: Rank, lane: str) -> str:
    what: str | Meeting = rank.waits_for[lane]
    if isinstance(what, str):
        return f"step {what} of the same rank, which has not ended"
    absent = [member for member in what.transfer.members if member not in {other.number for other in what.arrived}]
    who = ", ".join(f"rank {member}" for member in absent)
    tag = what.comm.tag if isinstance(what.comm, PointToPoint) else ""
    return f"{who} to call the other side of {what.comm.op} {what.comm.name!r} {tag}".rstrip()
