"""One program being played: its lanes as processes on SimPy, which meet in communication."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Hashable
from dataclasses import dataclass
from typing import NamedTuple, cast

import simpy

from simulator.cluster import Cluster, Gpu
from simulator.engine.blocks import CommOp, CommTime, Meet, MeetBeside, Piece, Run, Running, TemplateStore
from simulator.engine.deadlock import report
from simulator.engine.host import Errand, HostSpeeds, agenda, host_speeds
from simulator.engine.kernel_times import times_of
from simulator.engine.memory import SharedMemory
from simulator.engine.placement import Kind, Placed
from simulator.engine.rank import INSTANT_s, Meeting, Rank, UnderWay, left_from
from simulator.engine.recorder import BESIDE, WHOLE, Called, Clocks, Ends, Recorder
from simulator.engine.representatives import Cast, Transfer
from simulator.errors import DeadlockError
from simulator.network.flows import Network
from simulator.program import (
    COMPUTE_LANE,
    Batch,
    Beside,
    Block,
    Comm,
    Compute,
    PointToPoint,
    ProgramError,
    Role,
    Step,
    comm_of,
    comms_of,
)

Wait = Generator[simpy.Event, None, None]


@dataclass(eq=False)
class _Prepared:
    """A block as one rank runs it; ``fixed`` are the in-line collectives of known length, ``runs`` counts its runs."""

    pieces: tuple[Piece, ...]
    fixed: list[tuple[Transfer, str]]
    runs: int = 0


class _Call(NamedTuple):
    """A call of one rank on one lane: ``key`` is the same for all who meet, ``takes`` as in `Meeting`."""

    key: tuple[object, ...]
    transfer: Transfer
    takes: float


class Play:
    """One program being played. ``done``: how often each transfer (by id) was made for each purpose."""

    def __init__(
        self,
        env: simpy.Environment,
        network: Network,
        placed: Placed,
        cast: Cast,
        cluster: Cluster,
        coalesce: bool,
        clocks: Clocks,
    ) -> None:
        self.program = placed.program
        self.costs = placed.costs
        self.cast = cast
        self.coalesce = coalesce
        self.clocks = clocks
        self.env = env
        self.network = network
        self.memory = SharedMemory(placed.program, network)
        self.store = TemplateStore(placed.costs)
        self.recorder = Recorder()
        self.done: Counter[tuple[int, str]] = Counter()
        self._meetings: dict[tuple[object, ...], list[Meeting]] = {}
        self._prepared: dict[tuple[int, int, str, frozenset[str]], _Prepared] = {}
        self._calls: dict[tuple[int, str, int], _Call] = {}
        self._sharing: dict[tuple[int, int], tuple[str, ...]] = {}
        self._lanes_of_axis = [_lanes_of_axis(role) for role in placed.program.roles]
        self._labels = [
            {lane: {s.label for s in steps} for lane, steps in role.lanes.items()} for role in self.program.roles
        ]
        self._agendas: dict[tuple[int, str, HostSpeeds], tuple[Errand, ...]] = {}
        self.ranks = [self._rank(number, cluster.gpus[placed.gpus[number]]) for number in cast.like]

    def _rank(self, number: int, gpu: Gpu) -> Rank:
        positions = {
            axis: self.program.groups[axis][index].index(number)
            for axis in self.program.groups
            if (index := self.program.group_index(axis, number)) >= 0
        }
        role, costs = self.program.role_of[number], self.costs.of(gpu.type)
        host = host_speeds(gpu)
        runs = Running(gpu.type, gpu.speed_scale, self.clocks[Kind.of(role, gpu)], host)
        key = role, gpu.type, host
        if key not in self._agendas:
            self._agendas[key] = agenda(self.program.roles[role], costs, host)
        return Rank(number, runs, host, costs, positions, self._agendas[key])

    def begin(self) -> None:
        """Every lane of every simulated rank begins now."""
        for rank in self.ranks:
            for lane, steps in self.program.roles[self.program.role_of[rank.number]].lanes.items():
                self.env.process(self._lane(rank, lane, steps))

    def end(self) -> None:
        """Nothing moves any more. Raises `DeadlockError` where some rank still waits."""
        if any(rank.waits_for for rank in self.ranks):
            raise DeadlockError(report(self.program, self.ranks))
        for prepared in self._prepared.values():
            for transfer, purpose in prepared.fixed:
                self.done[id(transfer), purpose] += prepared.runs
                self.network.add_alone(transfer.plan, prepared.runs)

    def _lane(self, rank: Rank, lane: str, steps: tuple[Step, ...]) -> Wait:
        errands = rank.errands if lane == COMPUTE_LANE else ()
        for index, step in enumerate(steps):
            rank.next_step[lane] = index
            rank.synchronise(step.after if errands else ())
            if errands:
                rank.go_on(errands[index])
            for label in step.after:
                if label not in rank.ended:
                    rank.waits_for[lane] = label
                    if label not in rank.waiters:
                        rank.waiters[label] = self.env.event()
                    yield rank.waiters[label]
            rank.synchronise(step.after if errands else ())
            rank.waits_for[lane] = step.label
            match step.op:
                case Block():
                    yield from self._block(rank, lane, index, step)
                case Comm():
                    posted = self.env.now
                    if lane == COMPUTE_LANE:
                        yield from self._launch(rank, rank.host.issue_s(rank.costs, step.op, step.phase))
                    elif rank.issued_s.get(step.label, 0.0) > posted:
                        yield self.env.timeout(rank.issued_s[step.label] - posted)
                    yield from self._communicate(rank, lane, index, step, (step.op,), posted)
                case Batch():
                    yield from self._communicate(rank, lane, index, step, step.op.comms, self.env.now)
                    rank.synchronised_s[step.label] = self.env.now
            del rank.waits_for[lane]
            rank.ended.add(step.label)
            if step.label in rank.waiters:
                rank.waiters.pop(step.label).succeed()
        if errands:
            rank.go_on(errands[-1])

    # Communication

    def _communicate(
        self, rank: Rank, lane: str, index: int, step: Step, comms: tuple[Comm, ...], posted: float, ends: Ends = WHOLE
    ) -> Wait:
        """Call ``comms``, which the lane came to at ``posted``, and wait for them."""
        called = Called(posted, self.env.now)
        beside = rank.costs.beside
        if beside is not None and beside.queues and lane != COMPUTE_LANE and any(comm.holds_sms for comm in comms):
            waited = yield from self._find_room(rank)
            if waited:  # until now its kernel was not on the GPU
                called = Called(self.env.now, self.env.now)
        meetings = [self._arrive(rank, lane, comm) for comm in comms]
        for comm, meeting in zip(comms, meetings, strict=True):
            yield from self._await(rank, lane, index, step, comm, meeting, called, ends)

    def _await(
        self, rank: Rank, lane: str, index: int, step: Step, comm: Comm, meeting: Meeting, called: Called, ends: Ends
    ) -> Wait:
        """Until ``comm`` has ended."""
        if not meeting.done.processed:
            rank.waits_for[lane] = meeting
            yield meeting.done
        template = self.store.comm_template(comm, meeting.transfer.wire_bytes)
        began, ended = cast(tuple[float, float], meeting.done.value)
        self.recorder.span(rank.number, comm.lane, index, step, ends, template, called, began, ended)

    def _arrive(self, rank: Rank, lane: str, comm: Comm) -> Meeting:
        """Call ``comm``: its kernel is on the GPU from now on; the last member to call sets the bytes in motion.

        The stream of a send, which holds nothing while it waits (`Comm.spins`), waits on here, for the receive that its
        next transfer with that neighbour would wait for as well.
        """
        key, transfer, takes = self._call(rank, lane, comm)
        waiting = self._meetings.setdefault(key, [])
        meeting = next((other for other in waiting if rank not in other.arrived), None)
        if meeting is None:
            meeting = Meeting(comm, transfer, self.env.event())
            waiting.append(meeting)
        else:
            _check_match(rank, comm, meeting)
        meeting.arrived.append(rank)
        meeting.takes[rank] = takes
        if comm.spins:
            rank.resident.append(meeting)
            self._reconsider_speed(rank)
        if len(meeting.arrived) == len(transfer.members):
            waiting.remove(meeting)
            if not waiting:
                del self._meetings[key]
            self._depart(meeting)
        return meeting

    def _call(self, rank: Rank, lane: str, comm: Comm) -> _Call:
        """What does not change from call to call."""
        known = rank.number, lane, id(comm)
        if known in self._calls:
            return self._calls[known]
        position = rank.positions[comm.axis]
        group = self.cast.group_key[comm.axis][rank.number]
        # Transfers meet by their ends and tag, collectives by the order of calls on a communicator, as in NCCL.
        key: tuple[object, ...]
        if isinstance(comm, PointToPoint):
            ends = (position, comm.peer) if comm.sends else (comm.peer, position)
            key = (comm.axis, group, *ends, comm.tag)
        else:
            key = (comm.axis, group, lane)
        transfer = self.cast.transfer(comm, rank.number, position)
        takes = self.memory.takes(rank, comm, transfer) if rank.costs.beside is not None and comm.holds_sms else 0.0
        self._calls[known] = _Call(key, transfer, takes)
        return self._calls[known]

    def _depart(self, meeting: Meeting) -> None:
        began = self.env.now
        self.done[id(meeting.transfer), meeting.comm.purpose] += 1
        holders = meeting.arrived if meeting.comm.holds_sms else []
        for rank in holders:
            if meeting not in rank.resident:
                rank.resident.append(meeting)

        def land() -> None:
            for rank in holders:
                rank.resident.remove(meeting)
                self._reconsider_speed(rank)
                self.memory.share(rank)
            meeting.motion = None  # else each holds the other until garbage is searched for
            meeting.done.succeed((began, self.env.now))

        meeting.motion = self.network.transfer(meeting.transfer.plan, land)
        for rank in holders:
            self._reconsider_speed(rank)
            self.memory.share(rank)

    def _reconsider_speed(self, rank: Rank) -> None:
        """What is on the GPU beside its computation has changed: wake that if it changes its speed. What is not under
        way yet asks when it begins."""
        if rank.under_way is None or rank.costs.beside is None:
            return
        before = rank.load, rank.takes
        rank.load, rank.takes = _load_on(rank)
        if (rank.load, rank.takes) != before:
            rank.under_way.disturb()

    def _find_room(self, rank: Rank) -> Generator[simpy.Event, None, bool]:
        """Wait until the kernel under way has ended: until then it holds the SMs that communication needs. So does one
        that begins at this instant: it stands in its stream already, where communication waits for an event of another.
        Whether there was one."""
        yield self.env.timeout(2 * INSTANT_s)
        if rank.under_way is None or not rank.under_way.computes(self.env.now):
            return False
        room = self.env.event()
        rank.queued.append(room)
        rank.under_way.disturb()
        yield room
        return True

    # Computation

    def _block(self, rank: Rank, lane: str, index: int, step: Step) -> Wait:
        assert isinstance(step.op, Block)
        pieces = self._prepare(rank, lane, step.op, step.phase)
        for number, piece in enumerate(pieces):
            ends = Ends(number == 0, number == len(pieces) - 1)
            if isinstance(piece, Run):
                yield from self._compute(rank, lane, index, step, piece, ends)
                continue
            posted = self.env.now
            yield from self._launch(rank, piece.launch_s)
            if isinstance(piece, Meet):
                yield from self._communicate(rank, lane, index, step, (piece.comm,), posted, ends)
                if piece.comm.host_waits:
                    rank.host_s = max(rank.host_s, self.env.now)
            else:
                yield from self._beside(rank, lane, index, step, piece, posted, ends)
            rank.waits_for[lane] = step.label

    def _beside(
        self, rank: Rank, lane: str, index: int, step: Step, piece: MeetBeside, posted: float, ends: Ends
    ) -> Wait:
        """Call the collective, compute, and wait for it. What the step holds goes with its kernels."""
        called, last = Called(posted, self.env.now), len(piece.runs) - 1
        meeting = self._arrive(rank, lane, piece.comm)
        for number, run in enumerate(piece.runs):
            of_run = Ends(ends.first and number == 0, ends.last and number == last)
            yield from self._compute(rank, lane, index, step, run, of_run)
        yield from self._await(rank, lane, index, step, piece.comm, meeting, called, BESIDE)

    def _compute(self, rank: Rank, lane: str, index: int, step: Step, run: Run, ends: Ends) -> Wait:
        return (self._run_disturbed if rank.costs.beside else self._run)(rank, lane, index, step, run, ends)

    def _launch(self, rank: Rank, seconds: float) -> Wait:
        """Wait until the host has launched one op of a step of the compute lane, which takes it so long."""
        rank.host_s += seconds
        if rank.host_s > self.env.now:
            yield self.env.timeout(rank.host_s - self.env.now)

    def _prepare(self, rank: Rank, lane: str, block: Block, phase: str) -> tuple[Piece, ...]:
        at = rank.number, id(block)
        if at not in self._sharing:
            # When its lane came to a block is told by its first kernel, which then has to stand at its beginning.
            varies = self.coalesce and isinstance(block.ops[0], Compute)
            comms = [comm_of(op) for op in block.ops if varies and not isinstance(op, Compute)]
            self._sharing[at] = tuple(sorted(set().union(*(self._callers(rank, comm) for comm in comms)) - {lane}))
        idle = frozenset([other for other in self._sharing[at] if self._idle(rank, other, lane)])
        key = (*at, phase, idle)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._price(rank, block, phase, idle)
        prepared.runs += 1
        return prepared.pieces

    def _idle(self, rank: Rank, other: str, lane: str) -> bool:
        """Whether a lane does nothing until a step of ``lane`` has ended that has not: as long as the one under way
        lasts nothing that it calls is in flight."""
        if other not in rank.next_step:  # it begins at this instant
            return False
        waits_for = rank.waits_for.get(other)
        labels = self._labels[self.program.role_of[rank.number]][lane]
        return waits_for is None or (waits_for in labels and waits_for not in rank.ended)

    def _callers(self, rank: Rank, comm: Comm) -> set[str]:
        """The lanes whose communication may meet ``comm``, where all of that is this rank's; else none."""
        lanes = self._lanes_of_axis[self.program.role_of[rank.number]]
        transfer = self.cast.transfer(comm, rank.number, rank.positions[comm.axis])
        return set().union(*(lanes[axis] for axis in transfer.met_on))

    def _price(self, rank: Rank, block: Block, phase: str, idle: frozenset[str]) -> _Prepared:
        """``idle``: other lanes on which nothing is in flight meanwhile."""
        lengths: dict[CommOp, CommTime] = {}
        fixed: list[tuple[Transfer, str]] = []
        for op in block.ops:
            if isinstance(op, Compute):
                continue
            comm = comm_of(op)
            transfer = self.cast.transfer(comm, rank.number, rank.positions[comm.axis])
            # What goes on beside kernels may slow them, which is played as it happens.
            ahead = self.coalesce and not comm.host_waits and not (rank.costs.beside and isinstance(op, Beside))
            free = ahead and len(self._callers(rank, comm) - idle) == 1
            if free:
                fixed.append((transfer, comm.purpose))
            lengths[op] = CommTime(self.network.alone_s(transfer.plan) if free else None, transfer.wire_bytes)
        runs = rank.runs._replace(phase=phase)
        return _Prepared(self.store.pieces(block, runs, lengths, self.coalesce), fixed)

    def _run(self, rank: Rank, lane: str, index: int, step: Step, run: Run, ends: Ends) -> Wait:
        posted = self.env.now
        template = self.store.templates[run.template]
        host, rank.host_s = rank.host_s, rank.host_s + run.launch_s
        start = max(posted, host + float(template.launch_s[0]))
        end = max(start + run.seconds, host + run.tail_s)
        yield self.env.timeout(end - posted)
        span = self.recorder.span(
            rank.number, lane, index, step, ends, run.template, Called(posted, start), start, self.env.now
        )
        if end > start + run.seconds * (1 + 1e-12):
            self.recorder.stretch(span, *template.play(host + template.launch_s, start))

    def _run_disturbed(self, rank: Rank, lane: str, index: int, step: Step, run: Run, outer: Ends) -> Wait:
        """As `_run`, on a GPU whose speed changes when communication beside it starts or ends."""
        leaves, kernels = self.store.leaves(run.template), self.store.computes[run.template]
        begin = now = self.env.now
        host_s, rank.host_s = rank.host_s, rank.host_s + run.launch_s
        rank.load, rank.takes = _load_on(rank)
        load, pace = rank.load, self.store.pace(run.template, rank.load)
        course = pace.course(host_s, 0, None, now)
        courses, start, last = [course], course.at_s + course.start[0], len(kernels) - 1
        while True:
            until = min(course.under_way(now), last) if rank.queued else last  # communication waits for a kernel's end
            end = max(course.at_s + course.end[until], now)
            rank.leaves, changes_s = math.inf, math.inf
            if rank.takes and rank.takes > leaves.min():
                rank.leaves, changes_s = left_from(leaves, course, now)
            self.memory.share(rank)
            timer = self.env.timeout(min(end, changes_s) - now)
            rank.under_way = under_way = UnderWay(course, kernels, timer)
            yield timer
            now = self.env.now
            if now >= end or (changes_s >= end and not under_way.disturbed):
                while rank.queued:
                    rank.queued.pop().succeed()
                if until == last:
                    break
            if rank.load == load:
                continue
            # Ops that have ended stay; the one under way keeps what is left of its work.
            first = min(course.under_way(now), last)
            begun = course.begun(first, now)
            left_s = (course.at_s + course.end[first] - now) * pace.speed[first] if begun else None
            load, pace = rank.load, self.store.pace(run.template, rank.load)
            course = pace.course(host_s, first, left_s, now)
            courses.append(course)
        rank.under_way, rank.leaves = None, math.inf
        self.memory.share(rank)
        span = self.recorder.span(rank.number, lane, index, step, outer, run.template, Called(begin, start), start, now)
        if now - start > run.seconds * (1 + 1e-12):
            self.recorder.stretch(span, *times_of(courses))


def _load_on(rank: Rank) -> tuple[Hashable, float]:
    """The load of what is on the GPU beside its computation, and the share of its memory's time that it takes."""
    assert rank.costs.beside is not None
    waiting = [meeting.comm for meeting in rank.resident if meeting.motion is None]
    moving = [meeting for meeting in rank.resident if meeting.motion is not None]
    load = rank.costs.beside.load(waiting, [meeting.comm for meeting in moving])
    return load, sum(meeting.takes[rank] for meeting in moving)


def _check_match(rank: Rank, comm: Comm, meeting: Meeting) -> None:
    """Two ranks that call different things on one communicator would hang or corrupt data on a real machine."""
    other = meeting.comm
    pair = isinstance(comm, PointToPoint)
    if comm.nbytes != other.nbytes or (comm.op == other.op) == pair:
        raise ProgramError(
            f"rank {rank.number} calls {comm.name!r} ({comm.op}, {comm.nbytes:.0f} bytes) on axis '{comm.axis}' where "
            f"rank {meeting.arrived[0].number} calls {other.name!r} ({other.op}, {other.nbytes:.0f} bytes)"
        )


def _lanes_of_axis(role: Role) -> dict[str, set[str]]:
    """Per axis, the lanes of a role that communicate on it."""
    lanes: dict[str, set[str]] = {}
    for lane, steps in role.lanes.items():
        for op in {id(step.op): step.op for step in steps}.values():
            for comm in comms_of(op):
                lanes.setdefault(comm.axis, set()).add(lane)
    return lanes
