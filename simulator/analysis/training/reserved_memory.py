"""Reserved memory: a step replayed on PyTorch's caching allocator, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from simulator.analysis.time.memory_curve import MemoryHistory
from simulator.analysis.training.activation_lifetimes import ActivationEvent, ActivationEvents, have_parts
from simulator.analysis.training.memory_requests import FREED, MemoryRequests, RequestSequences
from simulator.analysis.training.part_requests import ROUNDING_BYTES
from simulator.analysis.training.replayed_stages import STEPS, ReplayedStages
from simulator.analysis.training.static_memory import BLAS_THREADS, StaticMemory
from simulator.arrays import Bools, Floats, Ints, distinct, first_places, row_numbers, run_starts
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

    ``events``: those of its ``curve``, as `events_of_ranks` returns them of all ranks. ``in_flight``: most (micro-batch,
    stage) activations held at once. ``limit``: bytes that CUDA has for the allocator.
    """

    curve: MemoryHistory
    events: ActivationEvents
    static: StaticMemory
    in_flight: int
    limit: float


class Moves(NamedTuple):
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


def cached_bytes(timeline: Timeline, ranks: Sequence[ReplayedRank], *, compiled: bool) -> list[float]:
    """Return the most bytes reserved less the most allocated by each rank.

    Ranks that do the same in the same order are replayed once. ``compiled``: on the allocator in C.
    """
    if not ranks:
        return []
    moves = _moves(timeline, ranks)
    like = _first_alike(moves, ranks)
    chosen = distinct(like)
    place = first_places(chosen, len(ranks))
    rows = place[moves.rank] >= 0
    moves = Moves(place[moves.rank[rows]], *[column[rows] for column in moves[1:]])
    static = [ranks[rank].static for rank in chosen.tolist()]
    most = step_requests(moves, ranks[0].events.kinds, static).most_bytes(
        [ranks[rank].limit for rank in chosen.tolist()], compiled=compiled
    )
    return [float(most[at].reserved - most[at].allocated) for at in place[like].tolist()]


def _moves(timeline: Timeline, ranks: Sequence[ReplayedRank]) -> Moves:
    spans, starts = (np.concatenate([getattr(one.curve, name) for one in ranks]) for name in ("span", "begins"))
    rank, starts = np.repeat(np.arange(len(ranks)), [len(one.curve.span) for one in ranks]), starts == 1
    event = np.concatenate([one.events.place for one in ranks])
    stage, microbatch = timeline.stage[spans], timeline.microbatch[spans]
    nbytes = np.where(starts, timeline.alloc_bytes[spans], timeline.free_bytes[spans])
    counts_itself = starts & ~have_parts([one.static for one in ranks], rank, stage)
    workspace = np.where(counts_itself, timeline.workspace_bytes[spans], 0.0)
    replayed, updates = _are_replayed(ranks, rank, microbatch), timeline.phase[spans] == "O"
    columns = rank, starts, stage, microbatch, nbytes, workspace, event, replayed, updates
    counts = np.flatnonzero((nbytes != 0) | (workspace != 0) | (event >= 0))
    return Moves(*[column[counts] for column in columns])


def _are_replayed(ranks: Sequence[ReplayedRank], rank: Ints, microbatch: Ints) -> Bools:
    """Tell of which micro-batches of a rank the passes are replayed: the first ones and the `LAST` ones."""
    is_there = np.zeros((len(ranks), microbatch.max(initial=0) + 2), dtype=np.bool_)
    is_there[rank, microbatch] = True
    is_there[:, -1] = False  # of what belongs to no micro-batch
    count = np.cumsum(is_there, axis=1)
    first = np.array([first_replayed(one.in_flight, max(len(one.static.parts), 1)) for one in ranks])
    chosen = is_there & ((count <= first[:, np.newaxis]) | (count > count[:, -1:] - LAST))
    return np.asarray(chosen[rank, microbatch], dtype=np.bool_)


def _first_alike(moves: Moves, ranks: Sequence[ReplayedRank]) -> Ints:
    """Return for each rank the place of the first that has the same moves, and the same room."""
    rows = np.stack([column.astype(np.float64) for column in moves[1:]], axis=1)
    first: dict[Hashable, int] = {}
    ends = np.searchsorted(moves.rank, np.arange(len(ranks) + 1)).tolist()
    keys = [(id(one.static), one.limit, rows[start:end].tobytes()) for one, start, end in zip(ranks, ends, ends[1:])]
    return np.array([first.setdefault(key, place) for place, key in enumerate(keys)])


def step_requests(moves: Moves, kinds: Sequence[ActivationEvent], static: Sequence[StaticMemory]) -> MemoryRequests:
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

    def __init__(self, moves: Moves, n_ranks: int) -> None:
        self.sequences, self.n_slots = RequestSequences(), 0
        n_moves = np.bincount(moves.rank, minlength=n_ranks)
        taken = 1 + STEPS * (n_moves + 2)
        self.before = np.cumsum(taken) - taken
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


def _add_static(requests: TimedRequests, moves: Moves, static: Sequence[StaticMemory]) -> None:
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
    requests: TimedRequests, moves: Moves, kinds: Sequence[ActivationEvent], static: Sequence[StaticMemory]
) -> Floats:
    """Add the tensors of passes; return the bytes of other tensors that each move moves, shape (steps, moves)."""
    beside_bytes = np.repeat(moves.nbytes[np.newaxis], STEPS, axis=0)
    at = np.flatnonzero(moves.event >= 0)
    if not len(at):
        return beside_bytes
    owned = row_numbers(moves.rank[at], moves.stage[at], moves.microbatch[at])
    by_owner = np.argsort(owned, kind="stable")
    at, starts = at[by_owner], run_starts(owned[by_owner])  # micro-batch by micro-batch of each stage of each rank
    lengths = np.diff(starts, append=len(at))
    within = np.arange(len(at)) - np.repeat(starts, lengths)
    stages = ReplayedStages(requests.sequences)
    stage_numbers = stages.numbers([one.parts for one in static])[moves.rank[at], moves.stage[at]]
    run, first_of_run = _alike_neighbours(row_numbers(stage_numbers, moves.replayed[at], moves.event[at]), starts)
    histories = []
    for place in first_of_run.tolist():
        events = [kinds[event] for event in moves.event[at[starts[place] :][: lengths[place]]].tolist()]
        stage = stages.stages[stage_numbers[starts[place]]]
        histories.append(stage.history(tuple(events), bool(moves.replayed[at[starts[place]]])))
    begins = np.cumsum(lengths[first_of_run]) - lengths[first_of_run]
    events_of_all = np.repeat(begins[run], lengths) + within
    n_slots = np.array([stage.n_slots for stage in stages.stages])[stage_numbers[starts]]
    slots = requests.new_slots(int(n_slots.sum())) + np.cumsum(n_slots) - n_slots
    numbers, nbytes = (
        np.concatenate([getattr(one, name) for one in histories], axis=1) for name in ("requests", "nbytes")
    )
    requests.add(requests.moves[:, at], numbers[:, events_of_all], np.repeat(slots, lengths))
    left, by_start = np.array([one.left for one in histories])[run], np.argsort(at[starts])
    again = requests.begins[moves.rank[at[starts]], 1:]
    requests.add(again[by_start], left[by_start, :-1], slots[by_start, np.newaxis])
    beside_bytes[:, at] -= nbytes[:, events_of_all]
    return beside_bytes


def _alike_neighbours(values: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Cut ``values`` up at ``starts``; return the number of each piece's run of equal neighbours, and its first piece.

    >>> [column.tolist() for column in _alike_neighbours(np.array([7, 3, 7, 3, 7, 7, 3]), np.array([0, 2, 4, 5]))]
    [[0, 0, 1, 2], [0, 2, 3]]
    """
    lengths = np.diff(starts, append=len(values))
    before = np.concatenate((starts[:1], starts[:-1]))  # of the first piece, itself
    same = values == values[np.arange(len(values)) + np.repeat(before - starts, lengths)]
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


def _add_others(requests: TimedRequests, moves: Moves, kinds: Sequence[ActivationEvent], beside_bytes: Floats) -> None:
    """Add the tensors that are no activations: bytes of moves that have no event, and those beyond an event's."""
    leaves = np.array([*(kind.effect == "release" for kind in kinds), False])[moves.event]  # its last entry is -1's
    counts = (np.abs(beside_bytes) > ROUNDING_BYTES) | (moves.workspace_bytes > ROUNDING_BYTES)
    steps, at = np.nonzero(counts)
    columns = moves.rank[at], requests.moves[steps, at], beside_bytes[steps, at]
    of_move = moves.starts[at], moves.workspace_bytes[at], leaves[at]
    freed, of_rank = requests.sequences.describe(FREED), dict[int, _OtherTensors]()
    for rank, time, nbytes, starts, workspace, leaves in zip(
        *[column.tolist() for column in (*columns, *of_move)], strict=True
    ):
        tensors = of_rank.setdefault(rank, _OtherTensors(requests, freed))
        if starts:
            tensors.allocate(time, nbytes)
            tensors.need(time, workspace)
        else:
            tensors.free(time, nbytes)
            if leaves:
                tensors.allocate(time, -nbytes)  # gradients that a pass leaves
    rows = [row for tensors in of_rank.values() for row in tensors.rows]
    requests.add(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)
