"""Reserved memory: a step replayed on PyTorch's caching allocator, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simulator.analysis.time.memory_curve import MemoryHistory, joined_entries
from simulator.analysis.training.activation_lifetimes import ActivationEvents
from simulator.analysis.training.stage_numbers import StageNumbers
from simulator.analysis.training.static_memory import StaticMemory
from simulator.analysis.training.step_requests import MemoryMoves, step_requests
from simulator.arrays import Bools, Ints, distinct, first_places
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

    ``events``: those of its ``curve``, as `events_of_ranks` returns them of all ranks. ``in_flight``: most
    (micro-batch, stage) activations held at once. ``limit``: bytes that CUDA has for the allocator.
    """

    curve: MemoryHistory
    events: ActivationEvents
    static: StaticMemory
    in_flight: int
    limit: float


def cached_bytes(timeline: Timeline, ranks: Sequence[ReplayedRank], *, compiled: bool) -> list[float]:
    """Return the most bytes reserved less the most allocated by each rank.

    Ranks that do the same in the same order are replayed once. ``compiled``: on the allocator in C.
    """
    moves = _moves(timeline, ranks)
    like = _first_alike(moves, ranks)
    chosen = distinct(like)
    place = first_places(chosen, len(ranks))
    moves = moves.rows(place[moves.rank] >= 0)
    moves = moves._replace(rank=place[moves.rank])
    static, limits = zip(*[(ranks[rank].static, ranks[rank].limit) for rank in chosen.tolist()], strict=True)
    most = step_requests(moves, ranks[0].events.kinds, static).most_bytes(limits, compiled=compiled)
    return [float(most[at].reserved - most[at].allocated) for at in place[like].tolist()]


def _moves(timeline: Timeline, ranks: Sequence[ReplayedRank]) -> MemoryMoves:
    rank, spans, begins = joined_entries([one.curve for one in ranks])
    event, starts = np.concatenate([one.events.place for one in ranks]), begins == 1
    stage, microbatch = timeline.stage[spans], timeline.microbatch[spans]
    in_parts = StageNumbers([one.static for one in ranks]).numbers_at(rank, stage) >= 0
    moves = MemoryMoves(
        rank=rank,
        starts=starts,
        stage=stage,
        microbatch=microbatch,
        nbytes=np.where(starts, timeline.alloc_bytes[spans], timeline.free_bytes[spans]),
        workspace_bytes=np.where(starts & ~in_parts, timeline.workspace_bytes[spans], 0.0),
        event=event,
        replayed=_are_replayed(ranks, rank, microbatch),
        updates=timeline.phase[spans] == "O",
    )
    return moves.rows((moves.nbytes != 0) | (moves.workspace_bytes != 0) | (event >= 0))


def _are_replayed(ranks: Sequence[ReplayedRank], rank: Ints, microbatch: Ints) -> Bools:
    """Tell of which micro-batches of a rank the passes are replayed: the first ones and the `LAST` ones."""
    is_there = np.zeros((len(ranks), microbatch.max(initial=0) + 2), dtype=np.bool_)
    is_there[rank, microbatch] = True
    is_there[:, -1] = False  # of what belongs to no micro-batch
    count = np.cumsum(is_there, axis=1)
    first = np.array([first_replayed(one.in_flight, max(len(one.static.parts), 1)) for one in ranks])
    chosen = is_there & ((count <= first[:, np.newaxis]) | (count > count[:, -1:] - LAST))
    return np.asarray(chosen[rank, microbatch], dtype=np.bool_)


def _first_alike(moves: MemoryMoves, ranks: Sequence[ReplayedRank]) -> Ints:
    """Return for each rank the place of the first that has the same moves, and the same room."""
    rows = np.stack([column.astype(np.float64) for column in moves[1:]], axis=1)
    first: dict[Hashable, int] = {}
    ends = np.searchsorted(moves.rank, np.arange(len(ranks) + 1)).tolist()
    keys = [
        (id(one.static), one.limit, rows[start:end].tobytes())
        for one, (start, end) in zip(ranks, pairwise(ends), strict=True)
    ]
    return np.array([first.setdefault(key, place) for place, key in enumerate(keys)])
