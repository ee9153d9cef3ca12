"""Figures of a step: bubble, breakdown of the time, communication, links, activations held. Functions of a Timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.analysis.activity import (
    HOST,
    Activity,
    Weighted,
    compute_lane_spans,
    mean_over_ranks,
    own_work,
    rank_positions,
    weigh,
)
from simulator.analysis.links import links_of_purpose
from simulator.timeline import CATEGORIES, COMMUNICATION, FIRST_COMMUNICATION, Floats, Ints, Timeline

#: What a pipeline's rank is busy with: the rest of its window is bubble.
_BUSY = [CATEGORIES.index(kind) for kind in ("compute", "recompute", "tp", "cp", "ep")]

#: What follows the pipeline's own work in a step.
_TAIL = [CATEGORIES.index(kind) for kind in ("optimizer", "dp")]


@dataclass(frozen=True)
class Bubble:
    """Idle time of pipelines: ``fraction`` of ranks x window, and ``ratio`` to the time in which they are busy."""

    fraction: float
    ratio: float


def bubble(activity: Activity, pipelines: Sequence[Sequence[int]]) -> Bubble:
    """The pipeline bubble, as arXiv 2104.04473 (section 2.2) defines it: idle over ideal time is (p - 1) / m for GPipe
    and 1F1B with equal stages and free communication.

    ``pipelines``: the simulated ranks of each data-parallel replica (see `weigh`). A pipeline's window runs from the
    first op of any of its ranks to the end of the last F, B, I or W of any; busy are compute, recompute and exposed tp,
    cp and ep communication of those phases in it. Of a steady state each rank's window is the period, less what the
    gradients' reduction and the optimizer take of it, which lie outside the window of a single step.
    """
    timeline = activity.timeline
    position = {rank: index for index, rank in enumerate(timeline.ranks)}
    own = own_work(timeline)
    busy_in_spans = np.bincount(
        rank_positions(timeline),
        weights=np.where(own, activity.spans_s[:, _BUSY].sum(axis=1), 0.0),
        minlength=len(position),
    )
    tail = activity.spent_s[:, _TAIL].sum(axis=1)
    first = _per_rank(timeline, timeline.start_s, np.ones_like(own), np.minimum, np.inf)
    last = _per_rank(timeline, timeline.end_s, own, np.maximum, 0.0)
    busy_piece = activity.piece_own & np.isin(activity.piece_use, _BUSY)
    rank, start, end = (
        column[busy_piece] for column in (activity.piece_rank, activity.piece_start_s, activity.piece_end_s)
    )
    idle = busy = total = 0.0
    for pipeline in weigh(timeline, pipelines):
        members = np.array([position[r] for r in pipeline.ranks])
        opens, closes = first[members].min(), last[members].max()
        clipped = np.maximum(np.minimum(end, closes) - np.maximum(start, opens), 0.0)
        spent = (busy_in_spans + np.bincount(rank, weights=clipped, minlength=len(position)))[members]
        window = np.full(len(members), max(closes - opens, 0.0))
        if timeline.period_s is not None:
            window = timeline.windows_s()[members] - tail[members]
        idle += float(pipeline.weights @ (window - spent))
        busy += float(pipeline.weights @ spent)
        total += float(pipeline.weights @ window)
    idle = max(idle, 0.0)  # a difference of sums
    return Bubble(fraction=idle / total if total else 0.0, ratio=idle / busy if busy else 0.0)


def _per_rank(timeline: Timeline, values: Floats, where: Any, reduce: np.ufunc, empty: float) -> Floats:
    result = np.full(len(timeline.ranks), empty)
    reduce.at(result, rank_positions(timeline)[where], values[where])
    return result


def time_breakdown(activity: Activity, pipelines: Sequence[Sequence[int]]) -> dict[str, Any]:
    """``time_breakdown_s``: seconds of the step by what a rank does, mean over real ranks; the leaves sum to the step.

    Idle time is bubble (a peer has not produced yet) until the last op of the rank's pipeline ends, and ``other``
    afterwards: the replica has nothing left to do while others finish. In a steady state it always has.
    """
    timeline = activity.timeline
    spent = mean_over_ranks(timeline, activity.spent_s)
    idle = float(mean_over_ranks(timeline, activity.idle_s))
    finished = _per_rank(timeline, timeline.end_s, np.ones(len(timeline.rank), dtype=bool), np.maximum, 0.0)
    steady = timeline.period_s is not None
    other = 0.0 if steady else _after_pipeline(timeline, weigh(timeline, pipelines), finished)
    return {
        "compute": float(spent[0]),
        "recompute": float(spent[1]),
        "optimizer": float(spent[2]),
        "exposed": {kind: float(spent[code]) for code, kind in enumerate(COMMUNICATION, start=FIRST_COMMUNICATION)},
        "host": max(float(spent[HOST]), 0.0),  # a difference of sums
        "bubble": max(idle - other, 0.0),
        "other": other,
    }


def _after_pipeline(timeline: Timeline, pipelines: tuple[Weighted, ...], finished: Floats) -> float:
    position = {rank: index for index, rank in enumerate(timeline.ranks)}
    seconds = weight = 0.0
    for pipeline in pipelines:
        end = max(finished[position[rank]] for rank in pipeline.ranks)
        seconds += float(pipeline.weights.sum()) * (timeline.step_time_s - float(end))
        weight += float(pipeline.weights.sum())
    return seconds / weight


def communication(activity: Activity) -> dict[str, dict[str, Any]]:
    """Per kind: ``bytes_per_gpu`` (sent on the wire; of offload and parameter servers both ways), ``time_s`` in which
    any is in flight, ``exposed_s`` of it that no computation hides; means over real ranks. A collective of one number,
    such as a gradient norm, has time alone: it loads no link. ``algorithm``: the one that sent the most bytes.
    ``links``: what it crosses (see `links_of_purpose`)."""
    timeline = activity.timeline
    nbytes = mean_over_ranks(timeline, _sent_bytes(timeline))
    in_flight = mean_over_ranks(timeline, activity.in_flight_s)
    exposed = mean_over_ranks(timeline, activity.spent_s)
    return {
        kind: {
            "bytes_per_gpu": float(nbytes[code]),
            "time_s": float(in_flight[code]),
            "exposed_s": float(exposed[code]),
            "algorithm": timeline.algorithms.get(kind, "none"),
            "links": links_of_purpose(timeline, kind),
        }
        for code, kind in enumerate(COMMUNICATION, start=FIRST_COMMUNICATION)
    }


def _sent_bytes(timeline: Timeline) -> Floats:
    """One row per simulated rank, one column per category."""
    by_template = [np.bincount(t.category, weights=t.nbytes, minlength=len(CATEGORIES)) for t in timeline.templates]
    sent = np.array(by_template).reshape(-1, len(CATEGORIES))
    position, n_ranks = rank_positions(timeline), len(timeline.ranks)
    columns = [
        np.bincount(position, weights=sent[timeline.template, category], minlength=n_ranks)
        for category in range(len(CATEGORIES))
    ]
    return np.stack(columns, axis=1)


def peak_activations(timeline: Timeline) -> dict[int, int]:
    """Per simulated rank: the most (micro-batch, stage) activations held at once.

    One is held from the first op of its forward to the end of the last op of its backward, the weight gradient
    included where it is a step of its own (it needs the layer's input).
    """
    own = own_work(timeline) & (timeline.microbatch >= 0) & compute_lane_spans(timeline)
    spans = np.flatnonzero(own)
    peaks = dict.fromkeys(timeline.ranks, 0)
    if not len(spans):
        return peaks
    key = np.stack((timeline.rank[spans], timeline.stage[spans], timeline.microbatch[spans]))
    _, owner, inverse = np.unique(key, axis=1, return_index=True, return_inverse=True)
    # Positions in the lane, not times, order births and deaths, so that ops of no length count too.
    birth = np.full(len(owner), len(spans), dtype=np.int64)
    death = np.full(len(owner), -1, dtype=np.int64)
    here: Ints = np.arange(len(spans))
    np.minimum.at(birth, inverse, here)
    np.maximum.at(death, inverse, here)
    change = np.zeros(2 * len(spans), dtype=np.int64)
    np.add.at(change, 2 * birth, 1)
    np.add.at(change, 2 * death + 1, -1)
    held = np.cumsum(change)[::2]  # during each span; everything a rank births it buries, so ranks do not mix
    for rank in peaks:
        mine = held[timeline.rank[spans] == rank]
        peaks[rank] = int(mine.max()) if len(mine) else 0
    return peaks
