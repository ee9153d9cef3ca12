"""Activity of ranks: the use of every moment of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.arrays import Bools, Floats, Ints, distinct
from simulator.program import COMPUTE_LANE
from simulator.timeline import CATEGORIES, Template, Timeline

#: Phases of a pipeline's own work: forward, whole backward, input gradient, weight gradient.
PIPELINE_PHASES = ("F", "B", "I", "W")
HOST = len(CATEGORIES)
_SOLID = HOST + 1
#: The first of these uses wins where several go on at once: a solid compute span, `CATEGORIES` in order, the host.
_PRIORITY = (_SOLID, *range(len(CATEGORIES)), HOST)

#: Columns of uses: span, start, end, use.
Uses = tuple[Ints, Floats, Floats, Ints]


@dataclass(frozen=True)
class Activity:
    """Each simulated rank's step, cut up by use.

    Where several uses go on at once, the first of these wins: compute, recompute, optimizer, communication in flight
    (tp, cp, ep, pp, dp), waiting for the host. The remainder is idle.

    ``spent_s``: seconds, one row per simulated rank (ascending), one column per `CATEGORIES` and one for the host.
    ``in_flight_s``: seconds in which each category runs, whatever else does; columns are `CATEGORIES`.
    ``spans_s``: seconds inside solid spans (zero for other spans), one row per span, columns as ``spent_s``.
    ``piece_*``: columns of the pieces that all other time is cut into: position of the rank, start, end, use.
    ``piece_in_pass``: the piece is used by a pass of a micro-batch.
    """

    timeline: Timeline
    spent_s: Floats
    in_flight_s: Floats
    spans_s: Floats
    piece_rank: Ints
    piece_start_s: Floats
    piece_end_s: Floats
    piece_use: Ints
    piece_in_pass: Bools

    @property
    def idle_s(self) -> Floats:
        """Seconds of the step without a use, one entry per simulated rank."""
        spent: Floats = self.spent_s.sum(axis=1)
        return np.maximum(self.timeline.windows_s() - spent, 0.0)


@dataclass(frozen=True)
class WeightedRanks:
    """The simulated ranks of one pipeline, and how many real ranks each stands for in it."""

    ranks: tuple[int, ...]
    weights: Floats


def weigh(timeline: Timeline, pipelines: Sequence[Sequence[int]]) -> tuple[WeightedRanks, ...]:
    """Divide the real ranks behind each simulated rank among the pipelines of that simulated rank.

    ``pipelines``: simulated ranks of each pipeline of the job, or of each distinct one. Raises ValueError where a
    simulated rank is in none.
    """
    counts = Counter(tuple(pipeline) for pipeline in pipelines)
    appearances: Counter[int] = Counter()
    for ranks, count in counts.items():
        for rank in ranks:
            appearances[rank] += count
    missing = [rank for rank in timeline.ranks if rank not in appearances]
    if missing:
        raise ValueError(f"simulated ranks {missing} are in no pipeline")
    return tuple(
        WeightedRanks(ranks, np.array([timeline.weight(rank) * count / appearances[rank] for rank in ranks]))
        for ranks, count in counts.items()
    )


def rank_positions(timeline: Timeline) -> Ints:
    """Return the position of each span's rank among the simulated ranks."""
    return np.searchsorted(np.array(timeline.ranks, dtype=np.int64), timeline.rank)


def mean_over_ranks(timeline: Timeline, values: Floats) -> Floats:
    """Return the mean over real ranks of values with one row (or entry) per simulated rank."""
    weights = np.array([timeline.weight(rank) for rank in timeline.ranks], dtype=np.float64)
    return np.asarray(weights @ values / weights.sum(), dtype=np.float64)


def reduced_per_rank(timeline: Timeline, values: Floats, where: Bools, reduce: np.ufunc, empty: float) -> Floats:
    """Return ``values`` of the spans ``where`` it is true, reduced per simulated rank; ``empty`` for a rank of none."""
    result = np.full(len(timeline.ranks), empty)
    reduce.at(result, rank_positions(timeline)[where], values[where])
    return result


def activity(timeline: Timeline) -> Activity:
    """Cut up every simulated rank's step.

    A solid span needs no rows: the sums of its template are its shares. The remaining spans alone are cut in time.
    """
    position = rank_positions(timeline)
    n_ranks, n_categories = len(timeline.ranks), len(CATEGORIES)
    solid = _solid_spans(timeline, position)
    spans_s = _solid_seconds(timeline, solid)

    uses = [_uses_of_solid(timeline, solid), *_uses_of_cut(timeline, ~solid), _waits_for_launch(timeline)]
    span, start, end, use = (np.concatenate(column) for column in zip(*uses, strict=True))
    keep = end > start
    span, start, end, use = span[keep], start[keep], end[keep], use[keep]
    in_pass = pass_spans(timeline)[span]

    piece_rank, piece_start, piece_end, active, active_in_pass = _sweep(position[span], start, end, use, in_pass)
    piece_s = piece_end - piece_start
    winner = np.zeros(len(piece_s), dtype=np.int64)
    for code in reversed(_PRIORITY):
        winner[active[code]] = code
    won_by_pass = active_in_pass[winner, np.arange(len(winner))]
    spent = _sum_by(position, spans_s, n_ranks)
    in_flight = spent[:, :n_categories] + _sum_by(position, _hidden_seconds(timeline, solid), n_ranks)
    other = winner != _SOLID
    np.add.at(spent.reshape(-1), (piece_rank * spent.shape[1] + winner)[other], piece_s[other])
    for category in np.flatnonzero(active[:n_categories].any(axis=1)).tolist():
        in_flight[:, category] += np.bincount(piece_rank, weights=piece_s * active[category], minlength=n_ranks)
    return Activity(
        timeline,
        spent,
        in_flight,
        spans_s,
        piece_rank[other],
        piece_start[other],
        piece_end[other],
        winner[other],
        won_by_pass[other],
    )


def _sum_by(position: Ints, values: Floats, n: int) -> Floats:
    """Return the sums of the rows of ``values`` at each position below ``n``, shape (n, columns)."""
    sums = np.zeros((n, values.shape[1]))
    for column in np.flatnonzero(values.any(axis=0)).tolist():
        sums[:, column] = np.bincount(position, weights=values[:, column], minlength=n)
    return sums


def pass_spans(timeline: Timeline) -> Bools:
    """Tell for each span whether it belongs to a pass of a micro-batch."""
    return np.asarray(np.isin(timeline.phase, PIPELINE_PHASES), dtype=np.bool_)


def compute_lane_spans(timeline: Timeline) -> Bools:
    """Tell for each span whether it ran on the compute lane."""
    code = timeline.lane_names.index(COMPUTE_LANE) if COMPUTE_LANE in timeline.lane_names else -1
    return np.asarray(timeline.lane == code, dtype=np.bool_)


def _solid_spans(timeline: Timeline, position: Ints) -> Bools:
    """Tell for each span whether it is solid: a span of the compute lane whose shares need no cut.

    Its ops win over all uses on other lanes, or no other lane of the rank is busy meanwhile. Waiting inside a stretched
    span never wins.
    """
    compute = compute_lane_spans(timeline)
    highest = np.array([t.category.max() if len(t) else 0 for t in timeline.templates], dtype=np.int64)
    lowest = np.array([t.category.min() if len(t) else 0 for t in timeline.templates], dtype=np.int64)
    elsewhere = lowest[timeline.template[~compute]]
    limit = int(elsewhere.min()) if len(elsewhere) else len(CATEGORIES)
    first = highest[timeline.template] < limit
    first[list(timeline.stretched)] = False
    # Times of all ranks lie on one axis, so that one search serves all.
    axis = position * (2 * timeline.length_s + 1)
    starts, ends = np.sort((timeline.start_s + axis)[~compute]), np.sort((timeline.end_s + axis)[~compute])
    begun = np.searchsorted(starts, timeline.end_s + axis, side="left")
    over = np.searchsorted(ends, timeline.start_s + axis, side="right")
    return compute & (first | (begun <= over))


def _solid_seconds(timeline: Timeline, solid: Bools) -> Floats:
    """Return the seconds per category and for the host inside each solid span, zero for the others."""
    by_category = np.array([t.by_category for t in timeline.templates]).reshape(-1, len(CATEGORIES))
    shares = np.zeros((len(solid), len(CATEGORIES) + 1))
    shares[solid, :HOST] = by_category[timeline.template[solid]]
    for span, (start, end) in timeline.stretched.items():
        if solid[span]:
            template = timeline.templates[timeline.template[span]]
            shares[span, :HOST] = np.bincount(template.category, weights=template.exposed(start, end), minlength=HOST)
            shares[span, HOST] = timeline.end_s[span] - timeline.start_s[span] - shares[span, :HOST].sum()
    return shares


def _hidden_seconds(timeline: Timeline, solid: Bools) -> Floats:
    """Return the seconds per category inside each solid span that its kernels hide."""
    hidden = np.zeros((len(solid), HOST))
    for code, template in enumerate(timeline.templates):
        if not template.beside:
            continue
        for span in np.flatnonzero(solid & (timeline.template == code)).tolist():
            start, end = timeline.stretched.get(span, (template.start_s, template.end_s))
            seconds = end - start - template.exposed(start, end)
            hidden[span] = np.bincount(template.category, weights=seconds, minlength=HOST)
    return hidden


def _uses_of_solid(timeline: Timeline, solid: Bools) -> Uses:
    spans = np.flatnonzero(solid)
    return spans, timeline.start_s[spans], timeline.end_s[spans], np.full(len(spans), _SOLID)


def _waits_for_launch(timeline: Timeline) -> Uses:
    """Return the waits of spans for the launch of their first op."""
    spans = np.flatnonzero(timeline.launched_s > timeline.posted_s)
    return spans, timeline.posted_s[spans], timeline.launched_s[spans], np.full(len(spans), HOST)


def _runs(span: Ints, category: Ints, start: Floats, end: Floats, tolerance: float) -> Uses:
    """Merge neighbouring rows of one span and category without a gap between them."""
    gap = start[1:] > end[:-1] + tolerance
    new = np.concatenate(([True], (span[1:] != span[:-1]) | (category[1:] != category[:-1]) | gap))
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(span)) - 1
    return span[first], start[first], end[last], category[first]


def _template_runs(template: Template) -> tuple[Floats, Floats, Ints]:
    starts, ends = template.start_s, template.end_s
    _, start, end, category = _runs(np.zeros(len(ends), np.int64), template.category, starts, ends, 0.0)
    return start, end, category


def _uses_of_cut(timeline: Timeline, cut: Bools) -> list[Uses]:
    """Return the runs of one category inside the ``cut`` spans, and waits for the host inside stretched ones."""
    straight = cut.copy()
    straight[list(timeline.stretched)] = False
    uses: list[Uses] = []
    for index in np.unique(timeline.template[straight]):
        spans = np.flatnonzero(straight & (timeline.template == index))
        run_start, run_end, category = _template_runs(timeline.templates[index])
        if len(category) == 1:
            uses.append((spans, timeline.start_s[spans], timeline.end_s[spans], np.repeat(category, len(spans))))
            continue
        shape = (len(spans), len(category))
        start = timeline.start_s[spans, None] + run_start
        end = timeline.start_s[spans, None] + run_end
        uses.append((np.repeat(spans, shape[1]), start.ravel(), end.ravel(), np.broadcast_to(category, shape).ravel()))
    stretched = [span for span in timeline.stretched if cut[span]]
    if stretched:
        uses += _uses_of_stretched(timeline, np.array(stretched, dtype=np.int64))
    return uses


def _uses_of_stretched(timeline: Timeline, spans: Ints) -> list[Uses]:
    """Return stretched spans as runs; gaps in them are waits for the host's next launch on the compute lane."""
    rows = [timeline.stretched[int(span)] for span in spans]
    category = np.concatenate([timeline.templates[timeline.template[span]].category for span in spans])
    row_span = np.repeat(spans, [len(start) for start, _ in rows])
    start = np.concatenate([start for start, _ in rows])
    end = np.concatenate([end for _, end in rows])
    runs = _runs(row_span, category, start, end, 1e-12 * timeline.step_time_s)
    run_span, run_start, run_end, _ = runs
    opens = np.concatenate(([True], run_span[1:] != run_span[:-1]))
    before = np.where(opens, timeline.start_s[run_span], np.concatenate(([0.0], run_end[:-1])))
    waits = compute_lane_spans(timeline)[run_span] & (run_start > before)
    return [runs, (run_span[waits], before[waits], run_start[waits], np.full(int(waits.sum()), HOST))]


def _sweep(
    rank: Ints, start: Floats, end: Floats, use: Ints, in_pass: Bools
) -> tuple[Ints, Floats, Floats, Bools, Bools]:
    """Cut each rank's time at every start and end of a use.

    Returns rank, start and end of the intervals, and two arrays of booleans (uses x intervals): the use goes on, and it
    goes on ``in_pass``. Intervals without a use are left out.
    """
    times = np.concatenate((start, end))
    ranks = np.concatenate((rank, rank))
    uses = np.concatenate((use, use))
    delta = np.concatenate((np.ones(len(start), dtype=np.int32), np.full(len(end), -1, dtype=np.int32)))
    order = np.lexsort((times, ranks))
    times, ranks, uses, delta = times[order], ranks[order], uses[order], delta[order]
    delta_in_pass = np.where(np.concatenate((in_pass, in_pass))[order], delta, 0)
    active, active_in_pass = np.zeros((2, _SOLID + 1, max(len(times) - 1, 0)), dtype=np.bool_)
    for code in distinct(uses).tolist():
        for goes_on, change in ((active, delta), (active_in_pass, delta_in_pass)):
            goes_on[code] = np.cumsum(np.where(uses == code, change, 0))[:-1] > 0
    keep = (ranks[1:] == ranks[:-1]) & (times[1:] > times[:-1]) & active.any(axis=0)
    return ranks[:-1][keep], times[:-1][keep], times[1:][keep], active[:, keep], active_in_pass[:, keep]
