"""Memory over time: bytes that a rank's steps hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.timeline import Timeline

#: Times closer than this are equal, but for the order of their sums.
_MOMENT_s = 1e-12


class MemoryHistory(NamedTuple):
    """Memory of a rank's steps over time; one entry per start or end of a span.

    ``times``: seconds, ascending. ``held_bytes``, ``workspace_bytes``: bytes held, and bytes of workspace, from then
    on. ``span``: the span that starts (``begins`` is 1) or ends (0) then.
    """

    times: Floats
    held_bytes: Floats
    workspace_bytes: Floats
    span: Ints
    begins: Ints


class JoinedEntries(NamedTuple):
    """Entries of some ranks' curves, one curve behind another: place of the rank among all, span, and ``begins``."""

    rank: Ints
    span: Ints
    begins: Ints


def joined_entries(curves: Sequence[MemoryHistory]) -> JoinedEntries:
    """Return the entries of ``curves``, one curve behind another."""
    rank = np.repeat(np.arange(len(curves)), [len(curve.span) for curve in curves])
    span, begins = (np.concatenate([getattr(curve, name) for curve in curves]) for name in ("span", "begins"))
    return JoinedEntries(rank, span, begins)


def memory_curve(timeline: Timeline, rank: int) -> MemoryHistory:
    """Return the memory that a rank's steps take over the step; see `memory_curves`."""
    return _curves(timeline, timeline.spans_of(rank), (rank,))[0]


def memory_curves(timeline: Timeline) -> dict[int, MemoryHistory]:
    """Return the memory that each simulated rank's steps take over the step.

    A span takes ``alloc_bytes`` at its start and frees ``free_bytes`` at its end. It needs ``workspace_bytes`` in
    between. Spans that end at a moment free their bytes before others that start then take theirs. Where a step is
    several spans in a row its workspace stays while the lane waits between them, into however many it is cut.
    """
    ranks = tuple(timeline.ranks)
    return dict(zip(ranks, _curves(timeline, np.arange(len(timeline.rank)), ranks), strict=True))


def _curves(timeline: Timeline, spans: Ints, ranks: Sequence[int]) -> list[MemoryHistory]:
    """Return the memory of ``ranks``, which are all that have ``spans``."""
    times = np.concatenate((timeline.end_s[spans], _begins_s(timeline, spans)))
    kept = np.concatenate((-timeline.free_bytes[spans], timeline.alloc_bytes[spans]))
    workspace = np.concatenate((-timeline.workspace_bytes[spans], timeline.workspace_bytes[spans]))
    begins = np.repeat(np.array([0, 1], dtype=np.int64), len(spans))
    both = np.concatenate((spans, spans))
    rank = timeline.rank[both]
    order = np.lexsort((times, rank))
    is_later = np.diff(times[order], prepend=0.0) > _MOMENT_s
    moment = np.cumsum(is_later | (np.diff(rank[order], prepend=-1) > 0))
    order = order[np.lexsort((begins[order], moment))]
    times, kept, workspace = (column[order] for column in (times, kept, workspace))
    both, begins = both[order], begins[order]
    cuts = np.searchsorted(rank[order], (*ranks, np.iinfo(np.int64).max))
    return [
        MemoryHistory(
            np.maximum.accumulate(times[here]),
            np.cumsum(kept[here]),
            np.cumsum(workspace[here]),
            both[here],
            begins[here],
        )
        for here in itertools.starmap(slice, itertools.pairwise(cuts.tolist()))
    ]


def digest_without_times(timeline: Timeline, curve: MemoryHistory) -> bytes:
    """Return a digest of a curve's entries but for their times.

    Ranks with equal ones hold the same tensors in the same order. Times count by the order of entries alone.
    """
    columns = (timeline.stage, timeline.microbatch, timeline.phase, timeline.part_code, timeline.lane)
    entries = (curve.begins, curve.held_bytes, curve.workspace_bytes, *(column[curve.span] for column in columns))
    digest = sha256()
    for entry in entries:
        digest.update(entry.tobytes())
    return digest.digest()


def _begins_s(timeline: Timeline, spans: Ints) -> Floats:
    """Return when each span takes its bytes: at its start, or when its lane comes to it if it goes on with a step."""
    begins_s = timeline.start_s[spans].copy()
    in_row = np.flatnonzero(timeline.workspace_bytes[spans] > 0)
    places = np.stack((timeline.rank[spans], timeline.lane[spans], timeline.label_code[spans]))[:, in_row]
    goes_on = in_row[1:][(places[:, 1:] == places[:, :-1]).all(axis=0)]
    begins_s[goes_on] = timeline.posted_s[spans][goes_on]
    return begins_s
