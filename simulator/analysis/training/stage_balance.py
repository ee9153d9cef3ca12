"""Balance of pipeline stages: the seconds of a micro-batch on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulator.analysis.time.activity import pass_spans
from simulator.analysis.training.stage_split import SimulatedSplit
from simulator.arrays import Floats
from simulator.timeline import Timeline


def simulated_split(timeline: Timeline, layers: Sequence[int]) -> SimulatedSplit:
    """Return the split of a job with so many ``layers`` per stage, with what its ``timeline`` says of it."""
    return SimulatedSplit(tuple(layers), timeline.step_time_s, stage_seconds(timeline, len(layers)))


def stage_balance(now: SimulatedSplit, better: SimulatedSplit | None) -> dict[str, Any]:
    """Return how evenly stages are loaded with their layers, and the ``better`` split that was simulated.

    ``per_stage``: layers, and the seconds of one micro-batch's passes on the stage's slowest rank. They include
    collectives inside passes and waiting for the host. ``slowest_over_mean``: seconds of the slowest stage over the
    mean. ``layers_per_stage`` and ``step_time_s``: the better split and its step; None without one.
    """
    seconds = now.stage_s
    mean = float(seconds.mean())
    return {
        "per_stage": [
            {"stage": stage, "layers": count, "seconds": float(stage_s)}
            for stage, (count, stage_s) in enumerate(zip(now.layers, seconds, strict=True))
        ],
        "slowest_over_mean": float(seconds.max()) / mean if mean else 1.0,
        "layers_per_stage": list(better.layers) if better else None,
        "step_time_s": better.step_s if better else None,
    }


def stage_seconds(timeline: Timeline, n_stages: int) -> Floats:
    """Return the seconds of one micro-batch's passes per stage; copies of a stage count as the stage.

    A pass lasts from the start of its first row to the end of its last one. Its first span may begin earlier, with a
    wait for the host. A pass may be collectives alone, which have lanes of their own.
    """
    ranks = np.array(timeline.ranks, dtype=np.int64)
    position = np.searchsorted(ranks, timeline.rank)
    _, step = np.unique(position * len(timeline.labels) + timeline.label_code, return_inverse=True)
    start_s, end_s = np.full(len(step), np.inf), np.full(len(step), -np.inf)
    first_row_s = timeline.start_s.copy()
    first_row_s[list(timeline.stretched)] = [rows_s[0] for rows_s, _ in timeline.stretched.values()]
    np.minimum.at(start_s, step, first_row_s)
    np.maximum.at(end_s, step, timeline.end_s)
    in_pass = np.flatnonzero(pass_spans(timeline) & (timeline.microbatch >= 0))
    passes, first = np.unique(step[in_pass], return_index=True)
    spans = in_pass[first]  # one of each pass
    key = position[spans] * n_stages + timeline.stage[spans] % n_stages
    size = len(ranks) * n_stages
    total = np.bincount(key, weights=end_s[passes] - start_s[passes], minlength=size)
    microbatches = np.unique(np.stack((key, timeline.microbatch[spans])), axis=1)[0]
    count = np.bincount(microbatches, minlength=size)
    each = np.divide(total, count, out=np.zeros(size), where=count > 0).reshape(len(ranks), n_stages)
    slowest: Floats = each.max(axis=0)
    return slowest
