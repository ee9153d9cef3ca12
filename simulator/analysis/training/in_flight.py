"""Activations in flight: micro-batches that ranks hold at once."""

from __future__ import annotations

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans, own_work
from simulator.timeline import Ints, Timeline


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
