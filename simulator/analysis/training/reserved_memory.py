"""Reserved memory: a step replayed on PyTorch's caching allocator, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from simulator.analysis.time.memory_curve import MemoryHistory
from simulator.analysis.training.activation_lifetimes import ActivationEvent, ActivationEvents
from simulator.analysis.training.memory_requests import FREED, MemoryRequests, RequestSequences
from simulator.analysis.training.part_requests import ROUNDING_BYTES
from simulator.analysis.training.replayed_stages import STEPS, ReplayedStages
from simulator.analysis.training.static_memory import BLAS_THREADS, StaticMemory
from simulator.arrays import Bools, Floats, Ints, distinct, is_any, row_numbers, run_starts
from simulator.timeline import Timeline

#: Of a long step, the micro-batches in flight are replayed this many times from the start; later ones repeat them.
ROUNDS = 2
#: Last micro-batches that are replayed.
LAST = 2


def first_replayed(in_flight: int, chunks: int) -> int:
    """Return how many of the first micro-batches are replayed.

    ``in_flight``: most (micro-batch, stage) activations held at once. ``chunks``: stages of the rank.
    """
    return ROUNDS * math.ceil(in_flight / chunks) + 2


def replay_microbatches(in_flight: int, chunks: int) -> int:
    """Return the micro-batches of a step whose replay equals that of any longer step.

    The first ones are released before the last ones are saved. Arguments as in `first_replayed`.
    """
    return first_replayed(in_flight, chunks) + math.ceil(in_flight / chunks) + LAST


class ReplayedRank(NamedTuple):
    """A rank whose steps are replayed.

    ``events``: the `activation_events` of its ``curve``. ``in_flight``: most (micro-batch, stage) activations held at
    once. ``limit``: bytes that CUDA has for the allocator.
    """

    curve: MemoryHistory
    events: ActivationEvents
    static: StaticMemory
    in_flight: int
    limit: float


class Moves(NamedTuple):
    """Starts and ends of a rank's spans that move bytes, in order; a row of each column for one.

    ``event``: place of its effect on activations among those of the rank, -1 without any. ``updates``: the span is the
    optimizer's.
    """

    starts: Bools
    stage: Ints
    microbatch: Ints
    nbytes: Floats
    workspace_bytes: Floats
    updates: Bools
    event: Ints


def cached_bytes(timeline: Timeline, ranks: Sequence[ReplayedRank], *, compiled: bool) -> list[float]:
    """Return the most bytes reserved less the most allocated by each rank.

    Ranks that do the same in the same order are replayed once. ``compiled``: on the allocator in C.
    """
    stages, keys = ReplayedStages(), list[Hashable]()
    played: dict[Hashable, tuple[MemoryRequests, float]] = {}
    for rank in ranks:
        moves, replayed = _moves(timeline, rank), _replayed_microbatches(timeline, rank)
        key = id(rank.static), rank.limit, replayed, rank.events.kinds, *[column.tobytes() for column in moves]
        keys.append(key)
        if key not in played:
            played[key] = step_requests(moves, rank.events.kinds, rank.static, replayed, stages), rank.limit
    most = {key: requests.most_bytes(limit, compiled=compiled) for key, (requests, limit) in played.items()}
    return [float(most[key].reserved - most[key].allocated) for key in keys]


def _replayed_microbatches(timeline: Timeline, rank: ReplayedRank) -> frozenset[int]:
    microbatch = timeline.microbatch[rank.curve.span]
    numbers = distinct(microbatch[microbatch >= 0])
    first = first_replayed(rank.in_flight, max(len(rank.static.parts), 1))
    return frozenset((*numbers[:first].tolist(), *numbers[first:][-LAST:].tolist()))


def _moves(timeline: Timeline, rank: ReplayedRank) -> Moves:
    spans, starts, event = rank.curve.span, rank.curve.begins == 1, rank.events.place
    stage = timeline.stage[spans]
    nbytes = np.where(starts, timeline.alloc_bytes[spans], timeline.free_bytes[spans])
    workspace = np.where(starts & ~is_any(stage, rank.static.parts), timeline.workspace_bytes[spans], 0.0)
    updates = timeline.phase[spans] == "O"
    columns = starts, stage, timeline.microbatch[spans], nbytes, workspace, updates, event
    counts = np.flatnonzero((nbytes != 0) | (workspace != 0) | (event >= 0))
    return Moves(*[column[counts] for column in columns])


def step_requests(
    moves: Moves,
    kinds: Sequence[ActivationEvent],
    static: StaticMemory,
    replayed: Container[int],
    stages: ReplayedStages,
) -> MemoryRequests:
    """Return the requests of a rank before and in `STEPS` steps of ``moves``.

    Of passes they are those for tensors of the micro-batches that are ``replayed``. ``kinds``: effects that the moves
    name. ``stages``: of all ranks of a job.
    """
    requests = TimedRequests(stages.sequences, len(moves.starts))
    _add_static(requests, moves, static)
    beside_bytes = _add_passes(requests, moves, kinds, static, replayed, stages)
    _add_others(requests, moves, kinds, beside_bytes)
    return requests.in_order()


class TimedRequests:
    """Sequences of requests by when they come; of those at the same time, the ones that are added first.

    Time -1 is before the first step. Each step begins a time before its first move, and ends one behind its last.
    """

    def __init__(self, sequences: RequestSequences, n_moves: int) -> None:
        self.sequences, self.n_slots = sequences, 0
        self.begins = (n_moves + 2) * np.arange(STEPS)
        self._rows: list[Ints] = []

    def new_slots(self, n: int) -> int:
        """Return the first of ``n`` slots that nothing else has."""
        self.n_slots += n
        return self.n_slots - n

    def add(self, times: Ints | int, numbers: Ints | int, first_slots: Ints | int) -> None:
        """Let sequences come at ``times``, those of ``numbers``; -1 is none. Their slots 0 are ``first_slots``."""
        rows = np.stack([column.ravel() for column in np.broadcast_arrays(times, numbers, first_slots)])
        self._rows.append(rows[:, rows[1] >= 0])

    def in_order(self) -> MemoryRequests:
        """Return all requests by their times."""
        times, *order = np.concatenate(self._rows, axis=1)
        return MemoryRequests(self.sequences, np.stack(order)[:, np.argsort(times, kind="stable")], self.n_slots)


def _add_static(requests: TimedRequests, moves: Moves, static: StaticMemory) -> None:
    """Add the tensors that exist before the first step, and the states that the first update makes."""
    state, states = static.state, static.first_update_tensors
    sizes = [
        *(state.weights, static.gradients, state.optimizer - sum(states)),
        *(static.placeholders, static.bucket, static.receives),
        *(static.workspaces / BLAS_THREADS,) * BLAS_THREADS,
    ]
    sizes = [nbytes for nbytes in sizes if nbytes > ROUNDING_BYTES]
    first_update = int(np.argmax(moves.updates)) if moves.updates.any() else len(moves.updates)
    for time, tensors in ((-1, sizes), (1 + first_update, states)):
        requests.add(time, requests.sequences.tensors(tensors), requests.new_slots(len(tensors)))


def _add_passes(
    requests: TimedRequests,
    moves: Moves,
    kinds: Sequence[ActivationEvent],
    static: StaticMemory,
    replayed: Container[int],
    stages: ReplayedStages,
) -> Floats:
    """Add the tensors of passes; return the bytes of other tensors that each move moves, shape (steps, moves)."""
    beside_bytes = np.repeat(moves.nbytes[np.newaxis], STEPS, axis=0)
    at = np.flatnonzero(moves.event >= 0)
    place = row_numbers(moves.stage[at], moves.microbatch[at])
    by_place = np.argsort(place, kind="stable")
    at, starts = at[by_place], run_starts(place[by_place])
    if not len(at):
        return beside_bytes
    stage_of = {stage: stages.stage_with(parts) for stage, parts in static.parts.items()}
    events = [kinds[event] for event in moves.event[at].tolist()]
    histories, slots = [], []
    ends = [*starts.tolist(), len(at)]
    for first, end, stage, microbatch in zip(
        ends, ends[1:], moves.stage[at[starts]].tolist(), moves.microbatch[at[starts]].tolist()
    ):
        histories.append(stage_of[stage].history(tuple(events[first:end]), microbatch in replayed))
        slots.append(requests.new_slots(stage_of[stage].n_slots))
    numbers = np.concatenate([history.requests for history in histories], axis=1)
    requests.add(requests.begins[:, np.newaxis] + 1 + at, numbers, np.repeat(slots, np.diff(ends)))
    left, by_start = np.array([history.left for history in histories]), np.argsort(at[starts])
    requests.add(requests.begins[1:], left[by_start, :-1], np.array(slots)[by_start, np.newaxis])
    beside_bytes[:, at] -= np.concatenate([history.nbytes for history in histories], axis=1)
    return beside_bytes


class _OtherTensors:
    """Tensors that are no activations, such as gathered parameters; (bytes, slot) of each, the youngest last."""

    def __init__(self, requests: TimedRequests) -> None:
        self._requests = requests
        self._tensors: list[tuple[float, int]] = []
        self._freed = requests.sequences.describe(FREED)
        self.rows: list[tuple[int, int, int]] = []

    def allocate(self, time: int, nbytes: float) -> None:
        """Allocate a tensor."""
        if nbytes > ROUNDING_BYTES:
            self._tensors.append((nbytes, self._new_tensor(time, nbytes)))

    def need(self, time: int, nbytes: float) -> None:
        """Allocate a tensor of a moment, and free it."""
        if nbytes > ROUNDING_BYTES:
            self._free_tensor(time, self._new_tensor(time, nbytes))

    def free(self, time: int, nbytes: float) -> None:
        """Free ``nbytes``: the youngest tensor of this size, else the youngest smaller ones.

        A part of the youngest tensor is freed for the rest. A step of no length ends before it starts, and frees
        nothing.
        """
        tensors = self._tensors
        same_size = [at for at, (size, _) in enumerate(tensors) if abs(size - nbytes) <= ROUNDING_BYTES]
        for at in same_size[-1:] or range(len(tensors) - 1, -1, -1):
            if tensors[at][0] <= nbytes + ROUNDING_BYTES:
                size, slot = tensors.pop(at)
                self._free_tensor(time, slot)
                nbytes -= size
        if nbytes > ROUNDING_BYTES and tensors:
            size, slot = tensors.pop()
            self._free_tensor(time, slot)
            self.allocate(time, size - nbytes)

    def _new_tensor(self, time: int, nbytes: float) -> int:
        """Allocate a tensor; return its slot."""
        slot = self._requests.new_slots(1)
        self.rows.append((time, self._requests.sequences.tensors([nbytes]), slot))
        return slot

    def _free_tensor(self, time: int, slot: int) -> None:
        self.rows.append((time, self._freed, slot))


def _add_others(requests: TimedRequests, moves: Moves, kinds: Sequence[ActivationEvent], beside_bytes: Floats) -> None:
    """Add the tensors that are no activations: bytes of moves that have no event, and those beyond an event's."""
    leaves = np.array([*(kind.effect == "release" for kind in kinds), False])[moves.event]  # its last entry is -1's
    tensors = _OtherTensors(requests)
    counts = (np.abs(beside_bytes) > ROUNDING_BYTES) | (moves.workspace_bytes > ROUNDING_BYTES)
    for step, at in zip(*[column.tolist() for column in np.nonzero(counts)], strict=True):
        time, nbytes = int(requests.begins[step]) + 1 + at, float(beside_bytes[step, at])
        if moves.starts[at]:
            tensors.allocate(time, nbytes)
            tensors.need(time, float(moves.workspace_bytes[at]))
        else:
            tensors.free(time, nbytes)
            if leaves[at]:
                tensors.allocate(time, -nbytes)  # gradients that a pass leaves
    if tensors.rows:
        requests.add(*np.array(tensors.rows).T)
