"""Requests to the allocator in steps that are replayed: those of passes, of all other tensors, and of what stays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.analysis.training.activation_lifetimes import ActivationEvent
from simulator.analysis.training.memory_requests import FREED, MemoryRequests, RequestSequences
from simulator.analysis.training.part_requests import ROUNDING_BYTES
from simulator.analysis.training.replayed_stages import STEPS, ReplayedStage, StageHistory
from simulator.analysis.training.stage_numbers import StageNumbers
from simulator.analysis.training.static_memory import BLAS_THREADS, StaticMemory
from simulator.arrays import Bools, Floats, Ints, ranges, row_numbers, run_starts


class MemoryMoves(NamedTuple):
    """Starts and ends of spans that move bytes, rank by rank in order; a row of each column for one.

    ``rank``: place of the rank among all. ``event``: place of the effect on activations among those of the ranks, -1
    without any. ``replayed``: the micro-batch is. ``updates``: the span is the optimizer's.
    """

    rank: Ints
    starts: Bools
    stage: Ints
    microbatch: Ints
    nbytes: Floats
    workspace_bytes: Floats
    event: Ints
    replayed: Bools
    updates: Bools

    def rows(self, chosen: Ints | Bools) -> MemoryMoves:
        """Return some of the moves."""
        return MemoryMoves._make([column[chosen] for column in self])


def step_requests(
    moves: MemoryMoves, kinds: Sequence[ActivationEvent], static: Sequence[StaticMemory]
) -> MemoryRequests:
    """Return the requests of ranks before and in `STEPS` steps of ``moves``.

    Of passes they are those for tensors of the micro-batches that are replayed. ``kinds``: effects that the moves name.
    ``static``: of each rank.
    """
    requests = TimedRequests(moves, len(static))
    _add_static(requests, moves, static)
    beside_bytes = _add_passes(requests, moves, kinds, static)
    _add_others(requests, moves, kinds, beside_bytes)
    return requests.in_order()


class TimedRequests:
    """Sequences of requests by when they come; of those at the same time, the ones that are added first.

    Times grow from rank to rank. ``before``: of each rank, the time before its first step. ``begins``, ``ends``: of its
    steps, shape (ranks, steps). ``moves``: of each move in each step, shape (steps, moves).
    """

    def __init__(self, moves: MemoryMoves, n_ranks: int) -> None:
        self.sequences, self.n_slots = RequestSequences(), 0
        n_moves = np.bincount(moves.rank, minlength=n_ranks)
        times_of_rank = 1 + STEPS * (n_moves + 2)
        self.before = np.cumsum(times_of_rank) - times_of_rank
        self.begins = self.before[:, np.newaxis] + 1 + np.outer(n_moves + 2, np.arange(STEPS))
        self.ends = self.begins + 1 + n_moves[:, np.newaxis]
        first_moves = np.cumsum(n_moves) - n_moves
        self.moves = (self.begins + 1 - first_moves[:, np.newaxis])[moves.rank].T + np.arange(len(moves.rank))
        self.rows: list[Ints] = []

    def new_slots(self, n: int) -> int:
        """Return the first of ``n`` slots that nothing else has."""
        self.n_slots += n
        return self.n_slots - n

    def add(self, times: Ints, numbers: Ints, first_slots: Ints) -> None:
        """Let sequences of ``numbers`` come at ``times``; -1 is none. Their slots 0 are ``first_slots``."""
        rows = np.stack([column.ravel() for column in np.broadcast_arrays(times, numbers, first_slots)])
        self.rows.append(rows[:, rows[1] >= 0])

    def in_order(self) -> MemoryRequests:
        """Return all requests by their times."""
        rows = np.concatenate(self.rows, axis=1)
        times, *order = rows[:, np.argsort(rows[0], kind="stable")]
        firsts = np.searchsorted(times, (*self.before.tolist(), np.iinfo(np.int64).max))
        return MemoryRequests(self.sequences, np.stack(order), firsts, self.n_slots)


def _add_static(requests: TimedRequests, moves: MemoryMoves, static: Sequence[StaticMemory]) -> None:
    """Add the tensors that exist before the first step, and the states that the first update makes."""
    first_update, updates = requests.ends[:, 0].copy(), np.flatnonzero(moves.updates)[::-1]
    first_update[moves.rank[updates]] = requests.moves[0, updates]  # of values for one rank numpy keeps the last
    rows = []
    for one, before, update in zip(static, requests.before.tolist(), first_update.tolist(), strict=True):
        for time, sizes in ((before, _sizes_before(one)), (update, one.first_update_tensors)):
            rows.append((time, requests.sequences.tensors(sizes), requests.new_slots(len(sizes))))
    requests.add(*np.array(rows).T)


def _sizes_before(static: StaticMemory) -> tuple[float, ...]:
    """Return the bytes of the tensors that exist before the first step."""
    state = static.state
    sizes = (
        *(state.weights, static.gradients, state.optimizer - sum(static.first_update_tensors)),
        *(static.placeholders, static.bucket, static.receives),
        *(static.workspaces / BLAS_THREADS,) * BLAS_THREADS,
    )
    return tuple(nbytes for nbytes in sizes if nbytes > ROUNDING_BYTES)


def _add_passes(
    requests: TimedRequests, moves: MemoryMoves, kinds: Sequence[ActivationEvent], static: Sequence[StaticMemory]
) -> Floats:
    """Add the tensors of passes; return the bytes of other tensors that each move moves, shape (steps, moves)."""
    beside_bytes = np.repeat(moves.nbytes[np.newaxis], STEPS, axis=0)
    at = np.flatnonzero(moves.event >= 0)
    if not len(at):
        return beside_bytes
    pass_number = row_numbers(moves.rank[at], moves.stage[at], moves.microbatch[at])
    by_pass = np.argsort(pass_number, kind="stable")
    at, starts = at[by_pass], run_starts(pass_number[by_pass])  # those of one micro-batch in one stage of one rank
    lengths = np.diff(starts, append=len(at))
    histories, numbers, n_slots = _histories(requests.sequences, moves.rows(at), kinds, static, starts)
    slots = requests.new_slots(int(n_slots.sum())) + np.cumsum(n_slots) - n_slots
    begins = np.cumsum([0, *[history.nbytes.shape[1] for history in histories]])[numbers]
    event = ranges(begins, lengths)  # among those of all histories
    sequences = np.concatenate([history.requests for history in histories], axis=1)
    requests.add(requests.moves[:, at], sequences[:, event], np.repeat(slots, lengths))
    left, by_start = np.array([history.left for history in histories])[numbers], np.argsort(at[starts])
    next_begins = requests.begins[moves.rank[at[starts]], 1:]
    requests.add(next_begins[by_start], left[by_start, :-1], slots[by_start, np.newaxis])
    beside_bytes[:, at] -= np.concatenate([history.nbytes for history in histories], axis=1)[:, event]
    return beside_bytes


def _histories(
    sequences: RequestSequences,
    moves: MemoryMoves,
    kinds: Sequence[ActivationEvent],
    static: Sequence[StaticMemory],
    starts: Ints,
) -> tuple[list[StageHistory], Ints, Ints]:
    """Return the histories of micro-batches; of each micro-batch in a stage, the number of its own and the slots there.

    ``moves``: those of passes, which come to the next micro-batch or stage at ``starts``. Of neighbours with equal
    events the first tells the history of all.
    """
    numbered = StageNumbers(static)
    stages = [ReplayedStage(parts, sequences) for parts in numbered.parts]
    stage = numbered.numbers_at(moves.rank, moves.stage)
    numbers, first = _alike_neighbours(row_numbers(stage, moves.replayed.astype(np.int64), moves.event), starts)
    ends, histories = np.append(starts[1:], len(stage)), []
    for start, end in zip(starts[first].tolist(), ends[first].tolist(), strict=True):
        events = tuple([kinds[event] for event in moves.event[start:end].tolist()])
        histories.append(stages[stage[start]].history(events, bool(moves.replayed[start])))
    return histories, numbers, np.array([one.n_slots for one in stages])[stage[starts]]


def _alike_neighbours(values: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Cut ``values`` up at ``starts``; return the number of each piece's run of equal neighbours, and its first piece.

    >>> [column.tolist() for column in _alike_neighbours(np.array([7, 3, 7, 3, 7, 7, 3]), np.array([0, 2, 4, 5]))]
    [[0, 0, 1, 2], [0, 2, 3]]
    """
    lengths = np.diff(starts, append=len(values))
    before = np.concatenate((starts[:1], starts[:-1]))  # of the first piece, itself
    same = values == values[ranges(before, lengths)]
    alike = np.logical_and.reduceat(same, starts) & (lengths == np.concatenate((lengths[:1], lengths[:-1])))
    alike[0] = False
    return np.cumsum(~alike) - 1, np.flatnonzero(~alike)


class _OtherTensors:
    """Tensors that are no activations, such as gathered parameters; (bytes, slot) of each, the youngest last."""

    def __init__(self, requests: TimedRequests, freed: int) -> None:
        self._requests, self._freed = requests, freed
        self._tensors: list[tuple[float, int]] = []
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
        self.rows.append((time, self._requests.sequences.tensors((nbytes,)), slot))
        return slot

    def _free_tensor(self, time: int, slot: int) -> None:
        self.rows.append((time, self._freed, slot))


def _add_others(
    requests: TimedRequests, moves: MemoryMoves, kinds: Sequence[ActivationEvent], beside_bytes: Floats
) -> None:
    """Add the tensors that are no activations: bytes of moves that have no event, and those beyond an event's."""
    may_leave = np.array([*(kind.effect == "release" for kind in kinds), False])[moves.event]  # the last is that of -1
    counts = (np.abs(beside_bytes) > ROUNDING_BYTES) | (moves.workspace_bytes > ROUNDING_BYTES)
    steps, at = np.nonzero(counts)
    columns = moves.rank[at], requests.moves[steps, at], beside_bytes[steps, at]
    per_move = moves.starts[at], moves.workspace_bytes[at], may_leave[at]
    freed = requests.sequences.describe(FREED)
    tensors_of_rank = defaultdict[int, _OtherTensors](lambda: _OtherTensors(requests, freed))
    rows = zip(*[column.tolist() for column in (*columns, *per_move)], strict=True)
    for rank, time, nbytes, starts, workspace, leaves_gradients in rows:
        tensors = tensors_of_rank[rank]
        if starts:
            tensors.allocate(time, nbytes)
            tensors.need(time, workspace)
        else:
            tensors.free(time, nbytes)
            if leaves_gradients:
                tensors.allocate(time, -nbytes)
    sequences = [row for tensors in tensors_of_rank.values() for row in tensors.rows]
    requests.add(*np.array(sequences, dtype=np.int64).reshape(-1, 3).T)
