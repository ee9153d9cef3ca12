"""What moves bytes on a GPU shares its memory's time with the kernel beside it."""

from __future__ import annotations

from simulator.costs.interference import memory_bytes
from simulator.engine.rank import Rank
from simulator.engine.world import Transfer
from simulator.network.flows import Network
from simulator.program import Comm, Program


class SharedMemory:
    """The memory of each GPU of a program that is played."""

    def __init__(self, program: Program, network: Network) -> None:
        self.program = program
        self.network = network
        self._taken: dict[tuple[int, str, str], float] = {}

    def takes(self, rank: Rank, comm: Comm, transfer: Transfer) -> float:
        """The share of the time of its memory that ``comm`` takes while its bytes move at full speed."""
        key = id(transfer), comm.op, rank.runs.gpu
        if key not in self._taken:
            assert rank.costs.beside is not None
            members = len(self.program.groups[comm.axis][self.program.group_index(comm.axis, rank.number)])
            seconds = transfer.plan.moving_s
            nbytes = memory_bytes(comm, members, transfer.wire_bytes)
            self._taken[key] = rank.costs.beside.takes(nbytes / seconds) if seconds else 0.0
        return self._taken[key]

    def share(self, rank: Rank) -> None:
        """What moves beside its kernel has together what that leaves of the memory's time. A collective is as fast as
        its slowest member."""
        speed = rank.leaves / rank.takes if rank.leaves < rank.takes else 1.0
        for meeting in rank.resident:
            if meeting.motion is None or meeting.speeds.get(rank, 1.0) == speed:
                continue
            meeting.speeds[rank] = speed
            if (slowest := min(meeting.speeds.values())) != meeting.motion.speed:
                self.network.pace(meeting.motion, slowest)
