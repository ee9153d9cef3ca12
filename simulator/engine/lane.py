"""A lane of a simulated rank: a process that goes through its steps."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import cast

import simpy

from simulator.engine.block_pieces import CollectiveCall, OverlappedCall, Segment
from simulator.engine.coalescing import CoalescedBlocks
from simulator.engine.communicator import CommCall, Communicators
from simulator.engine.rank import Rank
from simulator.engine.recorder import BESIDE, WHOLE, CallTimes, PiecePosition, Recorder, Span
from simulator.engine.rendezvous import Rendezvous
from simulator.program import COMPUTE_LANE, Batch, Block, Comm, Step

Wait = Generator[simpy.Event, None, None]


class Lane:
    """A lane ``name`` of ``rank``, as a process on SimPy.

    Its steps wait for steps of other lanes, run kernels on the rank's GPU as the host launches them, and call
    communication.
    """

    def __init__(
        self,
        env: simpy.Environment,
        rank: Rank,
        name: str,
        blocks: CoalescedBlocks,
        communicators: Communicators,
        recorder: Recorder,
    ) -> None:
        self._env = env
        self._rank = rank
        self._name = name
        self._blocks = blocks
        self._communicators = communicators
        self._recorder = recorder
        self._calls: dict[int, CommCall] = {}  # by id of their communication
        self._is_compute = name == COMPUTE_LANE

    def go_through(self, steps: Iterable[Step], first: int = 0) -> Wait:
        """Run ``steps`` one after another; they stand in the lane from position ``first`` on."""
        rank = self._rank
        for index, step in enumerate(steps):
            rank.next_step[self._name] = first + index
            if self._is_compute:
                rank.host.synchronise(step.after)  # with batches that have ended: the host goes on from there
                rank.host.reach_step(index)
            yield from rank.wait_for_steps(self._name, step.after)
            if self._is_compute:
                rank.host.synchronise(step.after)  # with those that ended while the lane waited
            rank.waits_for[self._name] = step.label
            match step.op:
                case Block():
                    yield from self._run_block(step, step.op)
                case Comm():
                    yield from self._run_comm(step, step.op)
                case Batch():
                    yield from self._communicate(step, step.op.comms, self._env.now)
                    rank.host.end_batch(step.label, self._env.now)
            rank.end_step(self._name, step.label)
        if self._is_compute:
            rank.host.reach_step(-1)

    # Computation

    def _run_block(self, step: Step, block: Block) -> Wait:
        host = self._rank.host
        pieces = self._blocks.pieces(self._rank, self._name, block, step.phase)
        for number, piece in enumerate(pieces):
            position = PiecePosition(number == 0, number == len(pieces) - 1)
            if isinstance(piece, Segment):
                yield from self._compute(step, piece, position)
                continue
            posted_s = self._env.now
            host.issue(piece.issue_s)
            yield from self._wait_until(host.free_s)
            if isinstance(piece, CollectiveCall):
                yield from self._communicate(step, (piece.comm,), posted_s, position)
                if piece.comm.host_waits:
                    host.wait_until(self._env.now)
            else:
                yield from self._overlap(step, piece, posted_s, position)
            self._rank.waits_for[self._name] = step.label

    def _overlap(self, step: Step, piece: OverlappedCall, posted_s: float, position: PiecePosition) -> Wait:
        """Call the collective, compute, and wait for it. What the step allocates and frees goes with its kernels."""
        times, last = CallTimes(posted_s, self._env.now), len(piece.segments) - 1
        rendezvous = self._call(piece.comm)
        for number, segment in enumerate(piece.segments):
            inner = PiecePosition(position.first and number == 0, position.last and number == last)
            yield from self._compute(step, segment, inner)
        yield from self._wait_for(step, piece.comm, rendezvous, times, BESIDE)

    def _compute(self, step: Step, segment: Segment, position: PiecePosition) -> Wait:
        rank, posted_s = self._rank, self._env.now
        run = yield from rank.gpu.run(segment, rank.host.issue(segment.issue_s))
        if segment.host_waits:
            rank.host.wait_until(self._env.now)
        times = CallTimes(posted_s, run.start_s)
        span = self._record(step, self._name, position, segment.template, times, run.start_s, self._env.now)
        if run.stretched is not None:
            self._recorder.stretch(span, *run.stretched)

    # Communication

    def _run_comm(self, step: Step, comm: Comm) -> Wait:
        posted_s, host = self._env.now, self._rank.host
        if self._is_compute:
            host.issue_comm(comm, step.phase)
            yield from self._wait_until(host.free_s)
        else:
            yield from self._wait_until(host.issued_s(step.label))
        yield from self._communicate(step, (comm,), posted_s)

    def _communicate(self, step: Step, comms: Sequence[Comm], posted_s: float, position: PiecePosition = WHOLE) -> Wait:
        """Call ``comms``, which the lane came to at ``posted_s``, and wait for them."""
        times = CallTimes(posted_s, self._env.now)
        gpu = self._rank.gpu
        if gpu.communication_waits and not self._is_compute and any(comm.holds_sms for comm in comms):
            waited = yield from gpu.wait_for_sms()
            if waited:  # until now its kernel was not on the GPU
                times = CallTimes(self._env.now, self._env.now)
        calls = [(comm, self._call(comm)) for comm in comms]
        for comm, rendezvous in calls:
            yield from self._wait_for(step, comm, rendezvous, times, position)

    def _call(self, comm: Comm) -> Rendezvous:
        call = self._calls.get(id(comm))
        if call is None:
            call = self._calls[id(comm)] = self._communicators.prepare(self._rank, self._name, comm)
        return call.communicator.call(self._rank, call)

    def _wait_for(
        self, step: Step, comm: Comm, rendezvous: Rendezvous, times: CallTimes, position: PiecePosition
    ) -> Wait:
        """Wait until ``comm`` has ended, and record it."""
        if not rendezvous.done.processed:
            self._rank.waits_for[self._name] = rendezvous
            yield rendezvous.done
        template = self._recorder.store.comm_template(comm, rendezvous.planned.wire_bytes)
        departed_s, arrived_s = cast(tuple[float, float], rendezvous.done.value)
        self._record(step, comm.lane, position, template, times, departed_s, arrived_s)

    def _wait_until(self, time_s: float) -> Wait:
        if time_s > self._env.now:
            yield self._env.timeout(time_s - self._env.now)

    def _record(
        self,
        step: Step,
        lane: str,
        position: PiecePosition,
        template: int,
        times: CallTimes,
        start_s: float,
        end_s: float,
    ) -> int:
        index = self._rank.next_step[self._name]
        span = Span(self._rank.number, lane, index, step, position, template, times, start_s, end_s)
        return self._recorder.add(span)
