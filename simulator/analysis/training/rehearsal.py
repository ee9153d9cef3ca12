"""What the passes of each stage take, as a schedule is tuned to: read from a rehearsal with few micro-batches."""

from __future__ import annotations

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans
from simulator.schedules import Times
from simulator.timeline import CATEGORIES, Floats, Timeline


def times_of(rehearsal: Timeline, n_stages: int, memory_limit: float) -> Times:
    """``rehearsal``: a step of a schedule that splits the backward pass, of two micro-batches or more.

    Forwards are those of the last micro-batch, beside whose first ones parameters may gather, gradients those of the
    first one, beside whose last ones gradients may reduce. A backward pass that is whole all the same (of torch's first
    stage) stands where its weight gradient would. A stage is as slow as its slowest rank; a hop is the mean
    of all hops. A pass that is played in pieces takes what all of them take, wherever it is kept until it is needed.
    """
    passes = compute_lane_spans(rehearsal)
    last = int(rehearsal.microbatch.max())

    def longest(kinds: str, microbatch: int) -> tuple[float, ...]:
        chosen = passes & np.isin(rehearsal.phase, list(kinds)) & (rehearsal.microbatch == microbatch)
        seconds = []
        for stage in range(n_stages):
            at = np.flatnonzero(chosen & (rehearsal.stage == stage))
            ranks = rehearsal.rank[at]
            spans = [
                (rehearsal.start_s[at[ranks == rank]], rehearsal.end_s[at[ranks == rank]]) for rank in np.unique(ranks)
            ]
            seconds.append(_told(max((float(end.max() - start.min()) for start, end in spans), default=0.0)))
        return tuple(seconds)

    def moved(kinds: str, nbytes: Floats) -> tuple[float, ...]:
        chosen = passes & np.isin(rehearsal.phase, list(kinds)) & (rehearsal.microbatch == last)
        of_rank = [np.where(chosen & (rehearsal.rank == rank), nbytes, 0.0) for rank in rehearsal.ranks]
        return tuple(max(float(mine[rehearsal.stage == stage].sum()) for mine in of_rank) for stage in range(n_stages))

    category = np.array([int(t.category[0]) if len(t) else 0 for t in rehearsal.templates], dtype=np.int64)
    sent = np.array(["_send_" in lane for lane in rehearsal.lane_names], dtype=bool)[rehearsal.lane]
    hops = (rehearsal.end_s - rehearsal.start_s)[sent & (category[rehearsal.template] == CATEGORIES.index("pp"))]
    return Times(
        forward_s=longest("F", last),
        input_s=longest("I", 0),
        weight_s=longest("WB", 0),
        taken=moved("F", rehearsal.alloc_bytes),
        kept=moved("WB", rehearsal.free_bytes),
        hop_s=_told(float(hops.mean())) if len(hops) else 0.0,
        memory_limit=memory_limit,
    )


def _told(seconds: float) -> float:
    """To nine digits: a search must not turn on how a sum was rounded, which the exact shortcuts may change."""
    return float(f"{seconds:.9g}")
