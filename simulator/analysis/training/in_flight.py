"""Activations in flight: micro-batches held at once."""

from __future__ import annotations

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans, pass_spans
from simulator.arrays import Ints, row_numbers
from simulator.timeline import Timeline


def peak_activations(timeline: Timeline) -> dict[int, int]:
    """Return the most (micro-batch, stage) activations that each simulated rank holds at once.

    One is held from the first op of its forward pass to the last op of its backward pass. A weight gradient of its own
    belongs to the backward pass, as it needs the layer's input.
    """
    spans = np.flatnonzero(pass_spans(timeline) & (timeline.microbatch >= 0) & compute_lane_spans(timeline))
    peaks = dict.fromkeys(timeline.ranks, 0)
    if not len(spans):
        return peaks
    key = row_numbers(timeline.rank[spans], timeline.stage[spans], timeline.microbatch[spans])
    _, owner, inverse = np.unique(key, return_index=True, return_inverse=True)
    # Births and deaths are ordered by positions in the lane, not by times, so that ops of no length count too.
    birth = np.full(len(owner), len(spans), dtype=np.int64)
    death = np.full(len(owner), -1, dtype=np.int64)
    place: Ints = np.arange(len(spans))
    np.minimum.at(birth, inverse, place)
    np.maximum.at(death, inverse, place)
    change = np.zeros(2 * len(spans), dtype=np.int64)
    np.add.at(change, 2 * birth, 1)
    np.add.at(change, 2 * death + 1, -1)
    in_flight = np.cumsum(change)[::2]  # during each span; 0 at the end of each rank's spans, so that ranks do not mix
    for rank in peaks:
        peaks[rank] = int(in_flight[timeline.rank[spans] == rank].max(initial=0))
    return peaks
