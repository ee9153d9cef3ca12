"""Bubble of a pipeline: idle time of its ranks while passes run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.analysis.time.activity import Activity, pass_spans, rank_positions, reduced_per_rank, weigh
from simulator.timeline import CATEGORIES

#: Uses of time in which a rank of a pipeline is busy.
_BUSY = [CATEGORIES.index(kind) for kind in ("compute", "recompute", "tp", "cp", "ep")]

#: Uses of time after the passes of a step.
_TAIL = [CATEGORIES.index(kind) for kind in ("optimizer", "dp")]


@dataclass(frozen=True)
class Bubble:
    """Idle time of pipelines: ``fraction`` of ranks x window, and ``ratio`` to their busy time."""

    fraction: float
    ratio: float


def bubble(activity: Activity, pipelines: Sequence[Sequence[int]]) -> Bubble:
    """Return the pipeline bubble, as arXiv 2104.04473 (section 2.2) defines it.

    Idle over ideal time is (p - 1) / m for GPipe and 1F1B with equal stages and free communication.

    ``pipelines``: simulated ranks of each data-parallel replica (see `weigh`). A pipeline's window runs from the first
    op of any rank to the end of the last F, B, I or W of any. A rank is busy with compute, recompute and exposed tp, cp
    and ep communication of these phases. In a steady state each rank's window is the period without its reduction of
    gradients and its optimizer. These lie outside the window of a single step, too.
    """
    timeline = activity.timeline
    position = {rank: index for index, rank in enumerate(timeline.ranks)}
    passes = pass_spans(timeline)
    busy_in_spans = np.bincount(
        rank_positions(timeline),
        weights=np.where(passes, activity.spans_s[:, _BUSY].sum(axis=1), 0.0),
        minlength=len(position),
    )
    tail = activity.spent_s[:, _TAIL].sum(axis=1)
    first = reduced_per_rank(timeline, timeline.start_s, np.ones_like(passes), np.minimum, np.inf)
    last = reduced_per_rank(timeline, timeline.end_s, passes, np.maximum, 0.0)
    busy_piece = activity.piece_in_pass & np.isin(activity.piece_use, _BUSY)
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
    idle = max(idle, 0.0)  # rounding of a difference of sums
    return Bubble(fraction=idle / total if total else 0.0, ratio=idle / busy if busy else 0.0)
