"""The report of a deadlock: who waits for whom when nothing moves any more."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.engine.rank import Awaited, Rank
from simulator.engine.rendezvous import Rendezvous
from simulator.program import PointToPoint, Program, Role

_SHOWN = 16


def report(program: Program, ranks: Sequence[Rank]) -> str:
    """Write one line per blocked lane: the rank, its next operation, and what that waits for."""
    stuck = [(rank, lane) for rank in ranks for lane in rank.waits_for]
    lines = [f"deadlock: {len({rank.number for rank, _ in stuck})} rank(s) cannot go on"]
    for rank, lane in stuck[:_SHOWN]:
        lines.append(f"  rank {rank.number}, lane {lane}{_blocked(program.roles[rank.role], rank, lane)}")
    if len(stuck) > _SHOWN:
        lines.append(f"  ... and {len(stuck) - _SHOWN} more lanes")
    return "\n".join(lines)


def _blocked(role: Role, rank: Rank, lane: str) -> str:
    """Return the step that ``lane`` has come to, and what it waits for."""
    waits_for = rank.waits_for[lane]
    if isinstance(waits_for, Awaited):
        return f": waits for {waits_for.value}, asked for when a lane has run its steps of the last one"
    return f", step {role.lanes[lane][rank.next_step[lane]].label}: waits for {_reason(role, waits_for)}"


def _reason(role: Role, waits_for: str | Rendezvous) -> str:
    if isinstance(waits_for, str):
        if all(step.label != waits_for for _, _, step in role.steps()):
            return f"step {waits_for} of the same rank, which never came"
        return f"step {waits_for} of the same rank, which has not ended"
    who = ", ".join(f"rank {member}" for member in waits_for.missing)
    comm = waits_for.comm
    tag = comm.tag if isinstance(comm, PointToPoint) else ""
    return f"{who} to call the other side of {comm.op} {comm.name!r} {tag}".rstrip()
