"""Communicators: which calls of ranks belong together, and when their bytes depart and arrive."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import simpy

from simulator.engine.gpu import SimulatedGpu
from simulator.engine.group_comms import ends_of
from simulator.engine.memory_bandwidth import memory_demand
from simulator.engine.rank import PlacedRank, Rank
from simulator.engine.rendezvous import Rendezvous
from simulator.engine.representatives import PlannedComm, Representatives
from simulator.engine.traffic import CommCounts
from simulator.network.flows import Network
from simulator.program import Comm, PointToPoint, ProgramError


class PlannedCall(NamedTuple):
    """The call of a communication by a lane, whatever its tag.

    ``group``: axis and key of the caller's group. There transfers match by their ends and tag, and collectives by the
    order of calls of a lane, as on a communicator of NCCL: ``meeting`` names the ends, or the lane. ``memory_demand``:
    share of the time of the caller's memory that the bytes take at full speed.
    """

    group: tuple[str, int]
    meeting: Hashable
    planned: PlannedComm
    memory_demand: float


def planned_call(representatives: Representatives, rank: PlacedRank, lane: str, comm: Comm) -> PlannedCall:
    """Return how a lane of ``rank`` calls ``comm``."""
    position, members = rank.positions[comm.axis], rank.group_sizes[comm.axis]
    planned = representatives.plan_of(comm, rank.number, position)
    return PlannedCall(
        (comm.axis, representatives.group_key[comm.axis][rank.number]),
        ends_of(comm, position) if isinstance(comm, PointToPoint) else lane,
        planned,
        memory_demand(rank.interference, comm, members, planned),
    )


class CommCall(NamedTuple):
    """A call of a communication by a lane, the same each time.

    Calls on one ``channel`` of the communicator match in the order in which they are made. ``memory_demand``: see
    `PlannedCall`.
    """

    communicator: Communicator
    channel: Hashable
    comm: Comm
    planned: PlannedComm
    memory_demand: float


class Communicator:
    """The communicator of one group: it matches the calls of members, and sets bytes in motion when all have called."""

    def __init__(self, env: simpy.Environment, network: Network, counts: CommCounts) -> None:
        self._env = env
        self._network = network
        self._counts = counts
        self._incomplete: dict[Hashable, list[Rendezvous]] = {}
        self._gpus: dict[int, SimulatedGpu] = {}

    def join(self, rank: Rank) -> None:
        """Let a rank of the group join: its communication is to run on its GPU."""
        self._gpus[rank.number] = rank.gpu

    def call(self, caller: Rank, call: CommCall) -> Rendezvous:
        """Call a communication: its kernel is on the GPU from now on; the last call sets the bytes in motion.

        The stream of a send holds nothing while it waits (`Comm.spins`). It waits on in the simulation, for the receive
        that its next transfer with that neighbour would wait for as well.
        """
        comm, planned = call.comm, call.planned
        queue = self._incomplete.setdefault(call.channel, [])
        rendezvous = next((other for other in queue if caller.number not in other.callers), None)
        if rendezvous is None:
            rendezvous = Rendezvous(self._network, comm, planned, self._env.event())
            queue.append(rendezvous)
        else:
            _check_match(caller, comm, rendezvous)
        rendezvous.callers[caller.number] = call.memory_demand
        if comm.spins:
            caller.gpu.spin(rendezvous)
        if len(rendezvous.callers) == len(planned.members):
            queue.remove(rendezvous)
            if not queue:
                del self._incomplete[call.channel]
            self._depart(rendezvous)
        return rendezvous

    def _depart(self, rendezvous: Rendezvous) -> None:
        self._counts[id(rendezvous.planned), rendezvous.comm.purpose] += 1
        on_end = partial(self._arrive, rendezvous, self._env.now)
        transmission = self._network.transfer(rendezvous.planned.plan, on_end)
        if rendezvous.done.triggered:  # a group of one has nothing to move
            return
        rendezvous.transmission = transmission
        if rendezvous.comm.holds_sms:
            for number, memory_demand in rendezvous.callers.items():
                self._gpus[number].move_bytes(rendezvous, memory_demand)

    def _arrive(self, rendezvous: Rendezvous, departed_s: float) -> None:
        rendezvous.transmission = None  # else each holds the other until garbage is searched for
        if rendezvous.comm.holds_sms:
            for number in rendezvous.callers:
                self._gpus[number].release(rendezvous)
        rendezvous.done.succeed((departed_s, self._env.now))


class Communicators:
    """The communicators of a program that is played, one per group and axis."""

    def __init__(
        self,
        env: simpy.Environment,
        network: Network,
        representatives: Representatives,
        counts: CommCounts,
    ) -> None:
        self._env = env
        self._network = network
        self._representatives = representatives
        self._counts = counts
        self._communicators: dict[tuple[str, int], Communicator] = {}

    def prepare(self, rank: Rank, lane: str, comm: Comm) -> CommCall:
        """Return the call of ``comm`` by a lane of ``rank``."""
        key, meeting, planned, memory_demand = planned_call(self._representatives, rank.placed, lane, comm)
        if key not in self._communicators:
            self._communicators[key] = Communicator(self._env, self._network, self._counts)
        self._communicators[key].join(rank)
        channel = meeting, comm.tag if isinstance(comm, PointToPoint) else ""
        return CommCall(self._communicators[key], channel, comm, planned, memory_demand)


def _check_match(caller: Rank, comm: Comm, rendezvous: Rendezvous) -> None:
    """Raise `ProgramError` where ranks call different things: a real machine would hang or corrupt data."""
    other = rendezvous.comm
    paired = isinstance(comm, PointToPoint)
    if comm.nbytes != other.nbytes or (comm.op == other.op) == paired:
        raise mismatch(caller.number, comm, next(iter(rendezvous.callers)), other)


def mismatch(caller: int, comm: Comm, first_caller: int, other: Comm) -> ProgramError:
    """Return the error of two ranks that call different things."""
    return ProgramError(
        f"rank {caller} calls {comm.name!r} ({comm.op}, {comm.nbytes:.0f} bytes) on axis '{comm.axis}' "
        f"where rank {first_caller} calls {other.name!r} ({other.op}, {other.nbytes:.0f} bytes)"
    )
