"""What every moment of a rank's step is spent on: the one cut of the time axis that all shares are read from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.program import COMPUTE_LANE
from simulator.timeline import CATEGORIES, Floats, Ints, Template, Timeline

#: Phases of a pipeline's own work: forward, whole backward, input gradient, weight gradient.
PIPELINE_PHASES = ("F", "B", "I", "W")
HOST = len(CATEGORIES)
_SOLID = HOST + 1
#: Earlier uses win where several go on at once: a whole compute span, then `CATEGORIES` in order, then the host.
_PRIORITY = (_SOLID, *range(len(CATEGORIES)), HOST)

Bools = NDArray[np.bool_]
Items = tuple[Ints, Floats, Floats, Ints]  # span, start, end, use


@dataclass(frozen=True)
class Activity:
    """Each simulated rank's step cut up by priority: compute, recompute, optimizer, then communication in flight
    (tp, cp, ep, pp, dp), then waiting for the host; what is left is idle.

    ``spent_s``: seconds, one row per simulated rank (ascending), one column per `CATEGORIES` and one for the host.
    ``in_flight_s``: the same shape less the host: seconds in which each category runs, whatever else does.
    ``spans_s``: one row per span, the columns of ``spent_s``: seconds inside spans that nothing overlaps or hides
    (zero for other spans). ``piece_*``: the cut of all other time, as columns (position of the rank, start, end, use,
    and whether a span of the pipeline's own work, one of `PIPELINE_PHASES`, is what it is used for).
    """

    timeline: Timeline
    spent_s: Floats
    in_flight_s: Floats
    spans_s: Floats
    piece_rank: Ints
    piece_start_s: Floats
    piece_end_s: Floats
    piece_use: Ints
    piece_own: Bools

    @property
    def idle_s(self) -> Floats:
        """Seconds of the step in which a rank does none of it, one entry per simulated rank."""
        spent: Floats = self.spent_s.sum(axis=1)
        return np.maximum(self.timeline.windows_s() - spent, 0.0)


@dataclass(frozen=True)
class Weighted:
    """One pipeline: its simulated ranks, and how many real ranks each stands for in it."""

    ranks: tuple[int, ...]
    weights: Floats


def weigh(timeline: Timeline, pipelines: Sequence[Sequence[int]]) -> tuple[Weighted, ...]:
    """Share the real ranks that each simulated rank stands for among the pipelines that it appears in.

    ``pipelines`` holds simulated ranks: either every pipeline of the job with its members replaced by the ranks that
    stand for them, or each distinct one once. Raises ValueError where a simulated rank is in none.
    """
    counts = Counter(tuple(pipeline) for pipeline in pipelines)
    seen: Counter[int] = Counter()
    for ranks, count in counts.items():
        for rank in ranks:
            seen[rank] += count
    missing = [rank for rank in timeline.ranks if rank not in seen]
    if missing:
        raise ValueError(f"simulated ranks {missing} are in no pipeline")
    return tuple(
        Weighted(ranks, np.array([timeline.weight(rank) * count / seen[rank] for rank in ranks]))
        for ranks, count in counts.items()
    )


def rank_positions(timeline: Timeline) -> Ints:
    """Per span: the position of its rank among the simulated ranks."""
    return np.searchsorted(np.array(timeline.ranks, dtype=np.int64), timeline.rank)


def mean_over_ranks(timeline: Timeline, values: Floats) -> Floats:
    """Mean over real ranks of one row (or entry) per simulated rank."""
    weights = np.array([timeline.weight(rank) for rank in timeline.ranks], dtype=np.float64)
    return np.asarray(weights @ values / weights.sum(), dtype=np.float64)


def reduced_per_rank(timeline: Timeline, values: Floats, where: Any, reduce: np.ufunc, empty: float) -> Floats:
    result = np.full(len(timeline.ranks), empty)
    reduce.at(result, rank_positions(timeline)[where], values[where])
    return result


def activity(timeline: Timeline) -> Activity:
    """Cut up every simulated rank's step.

    Spans that run straight through need no rows: where nothing on another lane has a higher priority than what is
    inside a compute-lane span, its template's sums are its share. Only the remaining spans are cut in time.
    """
    position = rank_positions(timeline)
    n_ranks, n_categories = len(timeline.ranks), len(CATEGORIES)
    solid = _solid_spans(timeline, position)
    spans_s = _shares_of(timeline, solid)

    items = [_solid_items(timeline, solid), *_cut_items(timeline, ~solid), _launch_items(timeline)]
    span, start, end, use = (np.concatenate(column) for column in zip(*items, strict=True))
    keep = end > start
    span, start, end, use = span[keep], start[keep], end[keep], use[keep]
    own = own_work(timeline)[span]

    piece_rank, piece_start, piece_end, active, active_own = _sweep(position[span], start, end, use, own)
    piece_s = piece_end - piece_start
    winner = np.array(_PRIORITY)[np.argmax(active[list(_PRIORITY)], axis=0)]
    won_by_own = active_own[winner, np.arange(len(winner))]
    spent = _sum_by(position, spans_s, n_ranks)
    in_flight = spent[:, :n_categories] + _sum_by(position, _hidden_of(timeline, solid), n_ranks)
    np.add.at(spent, (piece_rank[winner != _SOLID], winner[winner != _SOLID]), piece_s[winner != _SOLID])
    for category in range(n_categories):
        in_flight[:, category] += np.bincount(piece_rank, weights=piece_s * active[category], minlength=n_ranks)
    other = winner != _SOLID
    return Activity(
        timeline,
        spent,
        in_flight,
        spans_s,
        piece_rank[other],
        piece_start[other],
        piece_end[other],
        winner[other],
        won_by_own[other],
    )


def _sum_by(position: Ints, values: Floats, n: int) -> Floats:
    columns = [np.bincount(position, weights=values[:, c], minlength=n) for c in range(values.shape[1])]
    return np.stack(columns, axis=1)


def own_work(timeline: Timeline) -> Bools:
    """Per span: whether it is the pipeline's own work, a pass of a micro-batch."""
    return np.asarray(np.isin(timeline.phase, PIPELINE_PHASES), dtype=np.bool_)


def compute_lane_spans(timeline: Timeline) -> Bools:
    """Per span: whether it ran on the compute lane."""
    code = timeline.lane_names.index(COMPUTE_LANE) if COMPUTE_LANE in timeline.lane_names else -1
    return np.asarray(timeline.lane == code, dtype=np.bool_)


def _solid_spans(timeline: Timeline, position: Ints) -> Bools:
    """Compute-lane spans whose shares need no cut: their ops come before whatever other lanes do, or nothing on another
    lane of the rank goes on beside them. (Waiting inside a stretched span comes after everything.)"""
    compute = compute_lane_spans(timeline)
    highest = np.array([t.category.max() if len(t) else 0 for t in timeline.templates], dtype=np.int64)
    lowest = np.array([t.category.min() if len(t) else 0 for t in timeline.templates], dtype=np.int64)
    elsewhere = lowest[timeline.template[~compute]]
    limit = int(elsewhere.min()) if len(elsewhere) else len(CATEGORIES)
    first = highest[timeline.template] < limit
    first[list(timeline.stretched)] = False
    # Times of all ranks on one axis, so that one search serves them all.
    axis = position * (2 * timeline.length_s + 1)
    starts, ends = np.sort((timeline.start_s + axis)[~compute]), np.sort((timeline.end_s + axis)[~compute])
    begun = np.searchsorted(starts, timeline.end_s + axis, side="left")
    over = np.searchsorted(ends, timeline.start_s + axis, side="right")
    return compute & (first | (begun <= over))


def _shares_of(timeline: Timeline, solid: Bools) -> Floats:
    """Seconds per category and for the host inside each solid span, zero for the others."""
    by_category = np.array([t.by_category for t in timeline.templates]).reshape(-1, len(CATEGORIES))
    shares = np.zeros((len(solid), len(CATEGORIES) + 1))
    shares[solid, :HOST] = by_category[timeline.template[solid]]
    for span, (start, end) in timeline.stretched.items():
        if solid[span]:
            template = timeline.templates[timeline.template[span]]
            shares[span, :HOST] = np.bincount(template.category, weights=template.shown(start, end), minlength=HOST)
            shares[span, HOST] = timeline.end_s[span] - timeline.start_s[span] - shares[span, :HOST].sum()
    return shares


def _hidden_of(timeline: Timeline, solid: Bools) -> Floats:
    """Seconds per category inside each solid span that go on beside its own kernels."""
    hidden = np.zeros((len(solid), HOST))
    for code, template in enumerate(timeline.templates):
        if not template.beside:
            continue
        for span in np.flatnonzero(solid & (timeline.template == code)).tolist():
            start, end = timeline.stretched.get(span, (template.start_s, template.end_s))
            seconds = end - start - template.shown(start, end)
            hidden[span] = np.bincount(template.category, weights=seconds, minlength=HOST)
    return hidden


def _solid_items(timeline: Timeline, solid: Bools) -> Items:
    spans = np.flatnonzero(solid)
    return spans, timeline.start_s[spans], timeline.end_s[spans], np.full(len(spans), _SOLID)


def _launch_items(timeline: Timeline) -> Items:
    """Where a span waits for the host to launch its first op; what it waits for after that are its peers."""
    spans = np.flatnonzero(timeline.launched_s > timeline.posted_s)
    return spans, timeline.posted_s[spans], timeline.launched_s[spans], np.full(len(spans), HOST)


def _runs(span: Ints, category: Ints, start: Floats, end: Floats, tolerance: float) -> Items:
    """Merge neighbouring rows of one span and category that have no gap between them."""
    gap = start[1:] > end[:-1] + tolerance
    new = np.concatenate(([True], (span[1:] != span[:-1]) | (category[1:] != category[:-1]) | gap))
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(span)) - 1
    return span[first], start[first], end[last], category[first]


def _template_runs(template: Template) -> tuple[Floats, Floats, Ints]:
    starts, ends = template.start_s, template.end_s
    _, start, end, category = _runs(np.zeros(len(ends), np.int64), template.category, starts, ends, 0.0)
    return start, end, category


def _cut_items(timeline: Timeline, cut: Bools) -> list[Items]:
    """The runs of one category inside spans that are not solid, and the host's gaps inside stretched ones."""
    straight = cut.copy()
    straight[list(timeline.stretched)] = False
    items: list[Items] = []
    for index in np.unique(timeline.template[straight]):
        spans = np.flatnonzero(straight & (timeline.template == index))
        run_start, run_end, category = _template_runs(timeline.templates[index])
        if len(category) == 1:
            items.append((spans, timeline.start_s[spans], timeline.end_s[spans], np.repeat(category, len(spans))))
            continue
        shape = (len(spans), len(category))
        start = timeline.start_s[spans, None] + run_start
        end = timeline.start_s[spans, None] + run_end
        items.append((np.repeat(spans, shape[1]), start.ravel(), end.ravel(), np.broadcast_to(category, shape).ravel()))
    stretched = [span for span in timeline.stretched if cut[span]]
    if stretched:
        items += _stretched_items(timeline, np.array(stretched, dtype=np.int64))
    return items


def _stretched_items(timeline: Timeline, spans: Ints) -> list[Items]:
    """Stretched spans as runs; on the compute lane, what they wait for inside is the host's next launch."""
    rows = [timeline.stretched[int(span)] for span in spans]
    category = np.concatenate([timeline.templates[timeline.template[span]].category for span in spans])
    of_span = np.repeat(spans, [len(start) for start, _ in rows])
    start = np.concatenate([start for start, _ in rows])
    end = np.concatenate([end for _, end in rows])
    runs = _runs(of_span, category, start, end, 1e-12 * timeline.step_time_s)
    of_run, run_start, run_end, _ = runs
    opens = np.concatenate(([True], of_run[1:] != of_run[:-1]))
    before = np.where(opens, timeline.start_s[of_run], np.concatenate(([0.0], run_end[:-1])))
    waits = compute_lane_spans(timeline)[of_run] & (run_start > before)
    return [runs, (of_run[waits], before[waits], run_start[waits], np.full(int(waits.sum()), HOST))]


def _sweep(rank: Ints, start: Floats, end: Floats, use: Ints, own: Bools) -> tuple[Ints, Floats, Floats, Bools, Bools]:
    """Elementary intervals of each rank between neighbouring starts and ends, and which uses go on in each.

    Returns rank, start, end (entries), active and active for ``own`` items (uses x entries); intervals in which nothing
    goes on are left out.
    """
    times = np.concatenate((start, end))
    ranks = np.concatenate((rank, rank))
    uses = np.concatenate((use, use))
    delta = np.concatenate((np.ones(len(start), dtype=np.int32), np.full(len(end), -1, dtype=np.int32)))
    order = np.lexsort((times, ranks))
    times, ranks, uses, delta = times[order], ranks[order], uses[order], delta[order]
    mine = np.where(np.concatenate((own, own))[order], delta, 0)
    active, active_own = (
        np.stack([np.cumsum(np.where(uses == u, change, 0))[:-1] > 0 for u in range(_SOLID + 1)])
        for change in (delta, mine)
    )
    keep = (ranks[1:] == ranks[:-1]) & (times[1:] > times[:-1]) & active.any(axis=0)
    return ranks[:-1][keep], times[:-1][keep], times[1:][keep], active[:, keep], active_own[:, keep]
