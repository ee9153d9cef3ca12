"""What moves bytes on a GPU shares its memory's time with the kernel beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simulator.costs.interference import memory_bytes
from simulator.engine.rank import Rank
from simulator.engine.representatives import Transfer
from simulator.network.flows import Network
from simulator.program import Comm, Program


class SharedMemory:
    """The memory of each GPU of a program that is played."""

    def __init__(self, program: Program, network: Network) -> None:
        self.program = program
        self.network = network

    def takes(self, rank: Rank, comm: Comm, transfer: Transfer) -> float:
        """The share of the time of its memory that ``comm`` takes while its bytes move at full speed."""
        assert rank.costs.beside is not None
        members = len(self.program.groups[comm.axis][self.program.group_index(comm.axis, rank.number)])
        seconds = transfer.plan.moving_s
        nbytes = memory_bytes(comm, members, transfer.wire_bytes)
        return rank.costs.beside.takes(nbytes / seconds) if seconds else 0.0

    def share(self, rank: Rank) -> None:
        """What moves beside its kernel has together what that leaves of the memory's time: who would take less than an
        equal part has it all, max-min. A collective is as fast as its slowest member; what it does not use where others
        or links hold it back is not handed on."""
        if rank.costs.beside is None or not rank.resident:
            return
        moving = [(meeting, meeting.motion) for meeting in rank.resident if meeting.motion is not None]
        part = equal_part([meeting.takes[rank] for meeting, _ in moving], rank.leaves)
        for meeting, motion in moving:
            takes = meeting.takes[rank]
            speed = part / takes if part < takes else 1.0
            if meeting.speeds.get(rank, 1.0) == speed:
                continue
            meeting.speeds[rank] = speed
            if (slowest := min(meeting.speeds.values())) != motion.speed:
                self.network.pace(motion, slowest)


def equal_part(takes: Sequence[float], leaves: float) -> float:
    """What none may have more of, so that all who would take these shares have ``leaves`` together; inf: there is
    enough for all."""
    left = leaves
    for nth, share in enumerate(sorted(takes)):
        part = left / (len(takes) - nth)
        if part < share:
            return part
        left -= share
    return math.inf
