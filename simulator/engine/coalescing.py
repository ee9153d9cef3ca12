"""Coalescing: collectives of a block that nothing can delay join the kernels around them in one segment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from simulator.engine.block_pieces import BlockCutter, CommLength, Piece
from simulator.engine.rank import PlacedRank, Rank
from simulator.engine.representatives import PlannedComm, Representatives
from simulator.engine.traffic import CommCounts
from simulator.network.plan import Plan
from simulator.program import Beside, Block, Comm, Compute, Role, Step, comm_of


class PlansAlone(Protocol):
    """A network as coalescing asks it, of plans that have their links to themselves (`simulator.network.flows`)."""

    def alone_s(self, plan: Plan) -> float: ...

    def add_alone(self, plan: Plan, times: int) -> None: ...


@dataclass(eq=False)
class PreparedBlock:
    """A block as one rank runs it, ``runs`` times so far; ``fixed`` are its collectives of known length."""

    pieces: tuple[Piece, ...]
    fixed: list[tuple[PlannedComm, str]]
    runs: int = 0


class _CalledComm(NamedTuple):
    """A communication as a rank calls it.

    ``meets``: the lanes whose communication may meet it, where all of that is this rank's; else none.
    """

    comm: Comm
    planned: PlannedComm
    meets: frozenset[str]


class CoalescedBlocks:
    """The blocks of a program as its ranks run them.

    A collective has a known length where everything that crosses its links is called by one rank from one lane: then no
    two are in flight together. Other lanes do not count while they wait for a step of this lane.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        representatives: Representatives,
        network: PlansAlone,
        cutter: BlockCutter,
        counts: CommCounts,
        coalesce: bool,
    ) -> None:
        self._representatives = representatives
        self._network = network
        self._cutter = cutter
        self._counts = counts
        self._coalesce = coalesce
        self._lanes_of_axis = [_lanes_of_axis(role) for role in roles]
        self._roles = roles
        self._labels: dict[tuple[int, str], set[str]] = {}
        self._other_lanes: dict[tuple[int, int], tuple[str, ...]] = {}
        self._prepared: dict[tuple[int, int, str, frozenset[str]], PreparedBlock] = {}
        self._comms: dict[tuple[int, int], _CalledComm] = {}

    def pieces(self, rank: Rank, lane: str, block: Block, phase: str) -> tuple[Piece, ...]:
        """Return the pieces in which ``lane`` runs ``block`` now, in a step of this phase, and count the run."""
        key = rank.number, id(block)
        if key not in self._other_lanes:
            self._other_lanes[key] = self.lanes_that_meet(rank.placed, lane, block)
        labels = self._labels_of(rank.role, lane)
        idle = frozenset([other for other in self._other_lanes[key] if rank.is_idle_until(other, labels)])
        prepared = self._prepared.get((*key, phase, idle))
        if prepared is None:
            prepared = self.prepare(rank.placed, block, phase, idle)
        prepared.runs += 1
        return prepared.pieces

    def add_steps(self, role: int, lane: str, steps: Sequence[Step]) -> None:
        """Let a lane of a role have further steps."""
        self._labels_of(role, lane).update(step.label for step in steps)

    def _labels_of(self, role: int, lane: str) -> set[str]:
        """Return the labels of all steps of a lane."""
        if (role, lane) not in self._labels:
            self._labels[role, lane] = {step.label for step in self._roles[role].lanes[lane]}
        return self._labels[role, lane]

    @property
    def runs(self) -> list[int]:
        """How often each prepared block was run, in the order in which they were prepared."""
        return [prepared.runs for prepared in self._prepared.values()]

    def add_runs(self, runs: Iterable[int]) -> None:
        """Count further runs of the first prepared blocks."""
        for prepared, more in zip(self._prepared.values(), runs, strict=False):
            prepared.runs += more

    def finish(self) -> None:
        """Add to the records of traffic what the collectives of known length have moved."""
        runs: dict[int, int] = {}  # of each plan, by its id
        plans: dict[int, Plan] = {}
        for prepared in self._prepared.values():
            for planned, purpose in prepared.fixed:
                self._counts[id(planned), purpose] += prepared.runs
                plans[id(planned.plan)] = planned.plan
                runs[id(planned.plan)] = runs.get(id(planned.plan), 0) + prepared.runs
        for number, plan in plans.items():
            self._network.add_alone(plan, runs[number])

    def lanes_that_meet(self, rank: PlacedRank, lane: str, block: Block) -> tuple[str, ...]:
        """Return the other lanes of ``rank`` whose communication may meet that of ``block``."""
        # The first kernel tells when its lane came to a block, and so has to stand at its beginning.
        if not self._coalesce or not isinstance(block.ops[0], Compute):
            return ()
        lanes = [self._called(rank, comm).meets for comm in block.comms]
        return tuple(sorted(frozenset().union(*lanes) - {lane}))

    def _called(self, rank: PlacedRank, comm: Comm) -> _CalledComm:
        key = rank.number, id(comm)
        called = self._comms.get(key)
        if called is None:
            planned = self._representatives.plan_of(comm, rank.number, rank.positions[comm.axis])
            lanes = self._lanes_of_axis[rank.role]
            meets = frozenset().union(*(lanes[axis] for axis in planned.met_on))
            called = self._comms[key] = _CalledComm(comm, planned, meets)
        return called

    def prepare(self, rank: PlacedRank, block: Block, phase: str, idle: frozenset[str]) -> PreparedBlock:
        """Cut ``block`` for a step of this phase; nothing is in flight meanwhile on ``idle``, other lanes of the rank.

        `finish` counts its runs.
        """
        lengths: dict[int, CommLength] = {}
        alone: dict[int, tuple[PlannedComm, str]] = {}
        fixed: list[tuple[PlannedComm, str]] = []
        for op in block.ops:
            if isinstance(op, Compute):
                continue
            if id(op) not in lengths:  # layers share their ops
                comm = comm_of(op)
                _, planned, meets = self._called(rank, comm)
                # What goes on beside kernels may slow them, which is played as it happens.
                plays_out = comm.host_waits or (rank.interference is not None and isinstance(op, Beside))
                is_fixed = self._coalesce and not plays_out and len(meets - idle) == 1
                if is_fixed:
                    alone[id(op)] = planned, comm.purpose
                seconds = self._network.alone_s(planned.plan) if is_fixed else None
                lengths[id(op)] = CommLength(seconds, planned.wire_bytes)
            if id(op) in alone:
                fixed.append(alone[id(op)])
        prepared = PreparedBlock(self._cutter.pieces(block, phase, rank.speed, lengths, self._coalesce), fixed)
        self._prepared[rank.number, id(block), phase, idle] = prepared
        return prepared


def _lanes_of_axis(role: Role) -> dict[str, set[str]]:
    """Return for each axis the lanes of a role that communicate on it, now or in extensions."""
    lanes: dict[str, set[str]] = {}
    for lane, comm in role.comms:
        lanes.setdefault(comm.axis, set()).add(lane)
    return lanes
