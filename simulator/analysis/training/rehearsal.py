"""Rehearsal of a tuned schedule: seconds and bytes of each stage's passes, read from a step of few micro-batches."""

from __future__ import annotations

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans
from simulator.arrays import Floats
from simulator.schedules import Times
from simulator.timeline import CATEGORIES, Timeline


def rehearsed_times(rehearsal: Timeline, n_stages: int, memory_limit: float) -> Times:
    """Return the times of passes that a schedule is tuned to.

    ``rehearsal``: a step of two micro-batches or more, of a schedule that splits the backward pass. Forward passes are
    the last micro-batch's, as parameters may be gathered beside the first. Gradients are the first micro-batch's, as
    they may be reduced beside the last.

    A backward pass that is whole all the same (of torch's first stage) counts as a weight gradient. A stage is as slow
    as its slowest rank. ``hop_s`` is the mean of all hops. A pass in pieces lasts from the first to the last piece.
    """
    passes = compute_lane_spans(rehearsal)
    last = int(rehearsal.microbatch.max())

    def longest(phases: str, microbatch: int) -> tuple[float, ...]:
        chosen = passes & np.isin(rehearsal.phase, list(phases)) & (rehearsal.microbatch == microbatch)
        seconds = []
        for stage in range(n_stages):
            spans = np.flatnonzero(chosen & (rehearsal.stage == stage))
            ranks = rehearsal.rank[spans]
            times = [
                (rehearsal.start_s[spans[ranks == rank]], rehearsal.end_s[spans[ranks == rank]])
                for rank in np.unique(ranks)
            ]
            seconds.append(_nine_digits(max((float(end.max() - start.min()) for start, end in times), default=0.0)))
        return tuple(seconds)

    def moved(phases: str, nbytes: Floats) -> tuple[float, ...]:
        chosen = passes & np.isin(rehearsal.phase, list(phases)) & (rehearsal.microbatch == last)
        by_rank = [np.where(chosen & (rehearsal.rank == rank), nbytes, 0.0) for rank in rehearsal.ranks]
        return tuple(max(float(row[rehearsal.stage == stage].sum()) for row in by_rank) for stage in range(n_stages))

    category = np.array([int(t.category[0]) if len(t) else 0 for t in rehearsal.templates], dtype=np.int64)
    sent = np.array(["_send_" in lane for lane in rehearsal.lane_names], dtype=bool)[rehearsal.lane]
    hops = (rehearsal.end_s - rehearsal.start_s)[sent & (category[rehearsal.template] == CATEGORIES.index("pp"))]
    return Times(
        forward_s=longest("F", last),
        input_s=longest("I", 0),
        weight_s=longest("WB", 0),
        forward_bytes=moved("F", rehearsal.alloc_bytes),
        split_bytes=moved("WB", rehearsal.free_bytes),
        hop_s=_nine_digits(float(hops.mean())) if len(hops) else 0.0,
        memory_limit=memory_limit,
    )


def _nine_digits(seconds: float) -> float:
    """Round to nine digits: the rounding of a sum, which exact shortcuts may change, must not decide a search."""
    return float(f"{seconds:.9g}")
