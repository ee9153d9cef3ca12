"""The report of a deadlock: who waits for whom when nothing moves any more."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.engine.rank import Rank
from simulator.program import PointToPoint, Program

_SHOWN = 16


def report(program: Program, ranks: Sequence[Rank]) -> str:
    """Write one line per blocked lane: the rank, its next operation, and what that waits for."""
    stuck = [(rank, lane) for rank in ranks for lane in rank.waits_for]
    lines = [f"deadlock: {len({rank.number for rank, _ in stuck})} rank(s) cannot go on"]
    for rank, lane in stuck[:_SHOWN]:
        step = program.roles[rank.role].lanes[lane][rank.next_step[lane]]
        lines.append(f"  rank {rank.number}, lane {lane}, step {step.label}: waits for {_reason(rank, lane)}")
    if len(stuck) > _SHOWN:
        lines.append(f"  ... and {len(stuck) - _SHOWN} more lanes")
    return "\n".join(lines)


def _reason(rank: Rank, lane: str) -> str:
    waits_for = rank.waits_for[lane]
    if isinstance(waits_for, str):
        return f"step {waits_for} of the same rank, which has not ended"
    who = ", ".join(f"rank {member}" for member in waits_for.missing)
    comm = waits_for.comm
    tag = comm.tag if isinstance(comm, PointToPoint) else ""
    return f"{who} to call the other side of {comm.op} {comm.name!r} {tag}".rstrip()
