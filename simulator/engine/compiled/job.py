"""A program on the compiled event loop: its roles and ranks, and what the loop asks of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simulator.engine.block_pieces import BlockCutter, CollectiveCall, OverlappedCall, Piece, Segment
from simulator.engine.coalescing import CoalescedBlocks, PreparedBlock
from simulator.engine.communicator import planned_call
from simulator.engine.compiled import library
from simulator.engine.compiled.description import DescribedSteps, JobDescription, WorkOfHost
from simulator.engine.compiled.library import CallRecord, ShareRecord, WorkRecord
from simulator.engine.compiled.tables import Tables
from simulator.engine.growth import Growth, LaneShare, host_type
from simulator.engine.marks import marked_steps
from simulator.engine.placement import Placed
from simulator.engine.rank import PlacedRank
from simulator.engine.representatives import Representatives
from simulator.engine.templates import TemplateStore
from simulator.engine.traffic import CommCounts
from simulator.program import COMPUTE_LANE, Block, Comm, Extension, LaneSteps, Program


class FirstNumbers(NamedTuple):
    """The numbers of a job, and of its first role, rank and lane, on the loop."""

    job: int
    role: int
    rank: int
    lane: int


class CompiledJob:
    """A job of a compiled simulation, with ``first`` numbers; its simulated ``ranks`` have their ``lanes`` in a row."""

    def __init__(
        self,
        tables: Tables,
        first: FirstNumbers,
        placed: Placed,
        representatives: Representatives,
        ranks: Sequence[PlacedRank],
        coalesce: bool,
        description: JobDescription,
    ) -> None:
        self.store = TemplateStore()
        self.ranks = ranks
        self.lanes = [(rank, lane) for rank in ranks for lane in placed.program.roles[rank.role].lanes]
        self.first = first
        self._tables, self._handle = tables, tables.handle
        self.placed, self._representatives = placed, representatives
        self._description = description
        self._counts: CommCounts = Counter()
        cutter, roles = BlockCutter(placed.costs, self.store), placed.program.roles
        self._blocks = CoalescedBlocks(roles, representatives, tables.phases, cutter, self._counts, coalesce)
        self._growth = (
            None if placed.more is None else Growth(placed.program, placed.more(), placed.costs, ranks, self._blocks)
        )
        self._extension: Extension | None = None
        self._n_described: Counter[int] = Counter()  # additions of each role whose labels the loop has
        self._cuts: list[tuple[int, PreparedBlock]] = []
        #: Pieces by their id, with the number of the first of them; kept, so that no others have that id.
        self._pieces: dict[int, tuple[int, tuple[Piece, ...]]] = {}
        self._describe()

    @property
    def program(self) -> Program:
        """All that has been played."""
        return self.placed.program if self._growth is None else self._growth.program

    @property
    def steps(self) -> LaneSteps:
        """All steps by their number."""
        return self._description.steps

    def begin(self) -> None:
        """Let all lanes begin now."""
        self._tables.tell_kinds()
        grows = self._growth is not None
        asks = self._growth is not None and self._growth.has_no_steps
        self._handle.add("begin_job", self.first.job, grows, asks)

    def label(self, role: int, number: int) -> str:
        """Return the label of a role that has a number."""
        return list(self._description.roles[role].labels)[number]

    def members(self, rank: PlacedRank, kind: int) -> Sequence[int]:
        """Return the simulated ranks that must call a kind of communication that ``rank`` has called, or its peer."""
        comm: Comm = self._tables.comms.kinds.things[kind]
        return planned_call(self._representatives, rank, "", comm).planned.members

    # What the loop asks

    def meeting(self, lane: int, block: int) -> Sequence[int]:
        """Return the other lanes of a lane's rank, by their place in its role, that may meet it in a block."""
        rank, name = self._lane(lane)
        places = self._description.roles[rank.role].lanes
        return [places.index(other) for other in self._blocks.lanes_that_meet(rank, name, self._block(block))]

    def cut(self, lane: int, block: int, phase: int, idle: Sequence[int]) -> int:
        """Return the number of a block as a lane runs it in a phase, while others of its rank are ``idle``."""
        rank, _ = self._lane(lane)
        names = frozenset([self._description.roles[rank.role].lanes[place] for place in idle])
        prepared = self._blocks.prepare(rank, self._block(block), self._description.numbers.phases.things[phase], names)
        if id(prepared.pieces) not in self._pieces:
            self._pieces[id(prepared.pieces)] = self._add_pieces(prepared.pieces), prepared.pieces
        number = self._handle.add("add_cut", self._pieces[id(prepared.pieces)][0], len(prepared.pieces))
        self._cuts.append((number, prepared))
        return number

    def call(self, lane: int, kind: int) -> int:
        """Return the number of a lane's call of a kind of communication."""
        rank, name = self._lane(lane)
        comm: Comm = self._tables.comms.kinds.things[kind]
        group, meeting, planned, memory_demand = planned_call(self._representatives, rank, name, comm)
        channel = self.first.job, group, meeting
        counted = self.first.job, planned, comm.purpose
        record = CallRecord(
            memory_demand,
            kind,
            self._tables.channels.number(channel, channel),
            self._tables.planned(planned),
            self._tables.template(self.store, self.store.comm_template(comm, planned.wire_bytes)),
            self._tables.counts.number((self.first.job, id(planned), comm.purpose), counted),
        )
        return self._handle.add_record("add_call", record)

    def next_release(self, now: float) -> float | None:
        """Ask for an extension; return when it is released, or None where there is no more."""
        assert self._growth is not None
        self._extension = self._growth.next_extension(now)
        return None if self._extension is None else self._extension.release_s

    def hand_out(self) -> bool:
        """Give lanes their shares of the extension that came last; return whether it has no steps."""
        assert self._growth is not None
        assert self._extension is not None
        extension, growth = self._extension, self._growth
        before = {
            (role, lane): len(growth.shares(role, lane)) for role in extension.lanes for lane in self._names(role)
        }
        growth.add(extension)
        for (role, lane), had in before.items():
            for share in growth.shares(role, lane)[had:]:
                self._extend(role, lane, share)
        for role in extension.lanes:
            self._describe_labels(role)
        self._tables.tell_kinds()
        return extension.is_empty

    # What was played

    def marked_steps(self) -> list[list[int]]:
        """Return the steps of the first rank's compute lane at which marks are put, for periods that are repeated."""
        repetition = self.placed.repetition
        return [] if repetition is None else marked_steps(self.placed.program.roles[self.ranks[0].role], repetition)

    def runs(self) -> list[int]:
        """Return how often each prepared block was run so far."""
        return [self._handle.call("runs_of_cut", number) for number, _ in self._cuts]

    def counts(self, counted: Mapping[int, int], more_runs: Sequence[Sequence[int]] = ()) -> CommCounts:
        """Return how often each communication was made, from the numbers of counts and what the loop counted.

        ``more_runs``: further runs of the first prepared blocks, by training step.
        """
        for number, times in counted.items():
            job, planned, purpose = self._tables.counts.things[number]
            if job == self.first.job:
                self._counts[id(planned), purpose] += times
        for (_, prepared), runs in zip(self._cuts, self.runs(), strict=True):
            prepared.runs = runs
        for more_of_step in more_runs:
            for (_, prepared), more in zip(self._cuts, more_of_step, strict=False):
                prepared.runs += more
        self._blocks.finish()
        return self._counts

    # Description

    def _describe(self) -> None:
        description, first = self._description, self.first
        first_work: dict[int, int] = {}
        for role in description.roles:
            names = self._names(role)
            numbers = np.array([self._tables.comms.lane_name(name) for name in names], dtype=np.int32)
            compute = names.index(COMPUTE_LANE) if COMPUTE_LANE in names else -1
            address = self._handle.kept(numbers)
            self._handle.add("describe_role", first.role + role, first.job, len(names), address, compute)
            for lane in names:
                steps = description.lanes[role, lane]
                self._add_share(role, lane, steps, LaneShare(0, 0, (), 0.0, {}), -1)
            first_work[role] = self._add_work(description.work[role])
        next_lane = first.lane
        for number, rank in enumerate(self.ranks, first.rank):
            kind = list(description.kinds[rank.role]).index(host_type(rank))
            place = rank.number, first.role + rank.role, next_lane, kind, first_work[rank.role] + kind
            waits = rank.interference is not None and rank.interference.queues
            self._handle.call("describe_rank", number, *place, self._tables.interference(rank.interference), waits)
            next_lane += len(self._names(rank.role))
        for role in description.roles:
            self._describe_labels(role)

    def _extend(self, role: int, lane: str, share: LaneShare) -> None:
        """Give a lane of a role a share of an extension."""
        steps = self._description.lane_steps(role, lane, share.steps)
        work = -1
        if share.host_work:
            work = self._add_work(self._description.work_of_hosts(role, share.steps, share.host_work))
        self._add_share(role, lane, steps, share, work)

    def _add_share(self, role: int, lane: str, steps: DescribedSteps, share: LaneShare, first_work: int) -> None:
        record = ShareRecord(
            self._handle.kept(steps.steps),
            self._handle.kept(steps.after),
            self._handle.kept(steps.batches),
            share.release_s,
            share.number,
            share.first,
            len(steps.steps),
            steps.first_step,
            first_work,
        )
        self._handle.add_record("add_share", record, self.first.role + role, self._names(role).index(lane))

    def _add_work(self, works: Sequence[WorkOfHost]) -> int:
        """Add the work of hosts of each kind of a role; return the number of the first."""
        numbers = []
        for work in works:
            record = WorkRecord(*[self._handle.kept(column) for column in work])
            numbers.append(self._handle.add_record("add_work", record))
        return numbers[0]

    def _describe_labels(self, role: int) -> None:
        """Tell the loop of the labels of a role that are new."""
        numbers = self._description.roles[role]
        if self._n_described[role] == numbers.n_additions:
            return
        columns = numbers.columns_since(self._n_described[role])
        self._n_described[role] = numbers.n_additions
        sizes, addresses = (len(numbers.labels), len(columns.label)), [column.ctypes.data for column in columns]
        self._handle.add("describe_labels", self.first.role + role, *sizes, *addresses)

    def _add_pieces(self, pieces: Sequence[Piece]) -> int:
        """Add the pieces of a block, each overlapped call before the segments beside it; return the first's number."""
        rows: list[tuple[float | int, ...]] = []
        for piece in pieces:
            match piece:
                case Segment():
                    rows.append(self._segment_row(piece))
                case CollectiveCall():
                    kind = self._tables.comms.kind(piece.comm)
                    rows.append((0.0, piece.issue_s, 0.0, library.COLLECTIVE_CALL, -1, kind, 0, 0, 0))
                case OverlappedCall():
                    kind, n = self._tables.comms.kind(piece.comm), len(piece.segments)
                    rows.append((0.0, piece.issue_s, 0.0, library.OVERLAPPED_CALL, -1, kind, n, 0, 0))
                    rows += [self._segment_row(segment) for segment in piece.segments]
        self._tables.tell_kinds()
        array = np.array(rows, dtype=library.PIECE)
        return self._handle.add("add_pieces", len(array), array.ctypes.data)

    def _segment_row(self, segment: Segment) -> tuple[float | int, ...]:
        template = self._tables.template(self.store, segment.template)
        times = segment.seconds, segment.issue_s, segment.tail_s
        return (*times, library.SEGMENT, template, -1, 0, segment.host_waits, 0)

    def _names(self, role: int) -> list[str]:
        return self._description.roles[role].lanes

    def _lane(self, number: int) -> tuple[PlacedRank, str]:
        return self.lanes[number - self.first.lane]

    def _block(self, number: int) -> Block:
        block: Block = self._description.numbers.blocks.things[number]
        return block
