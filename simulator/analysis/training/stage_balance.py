"""How evenly the stages of a pipeline are loaded, and which split of the layers would load them more evenly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans, own_work
from simulator.timeline import Floats, Timeline

#: A split that makes the slowest stage this much faster is worth a word.
_WORTH = 0.01
_HOST_BOUND = 0.01


def stage_balance(timeline: Timeline, layers: Sequence[int], host_bound_fraction: float) -> dict[str, Any]:
    """``per_stage``: layers (``layers[stage]``) and the seconds that the passes of one micro-batch take on the stage's
    slowest rank, collectives inside them and waiting for the host included. ``slowest_over_mean``: what the pipeline
    loses to its slowest stage. ``layers_per_stage``: a split whose slowest stage is at least 1 % faster, if there is
    one; none where GPUs wait for their hosts for 1 % of the step (``host_bound_fraction``), as a stage that waits for
    another does not tell how long its host would hold it up.
    """
    seconds = _seconds(timeline, len(layers))
    mean = float(seconds.mean())
    return {
        "per_stage": [
            {"stage": stage, "layers": count, "seconds": float(of_stage)}
            for stage, (count, of_stage) in enumerate(zip(layers, seconds, strict=True))
        ],
        "slowest_over_mean": float(seconds.max()) / mean if mean else 1.0,
        "layers_per_stage": _better(layers, seconds) if host_bound_fraction < _HOST_BOUND else None,
    }


def _seconds(timeline: Timeline, n_stages: int) -> Floats:
    """Per stage; copies of a stage count as the stage. A pass lasts from its first span to its last, be its collectives
    spans of their own or not."""
    ranks = np.array(timeline.ranks, dtype=np.int64)
    position = np.searchsorted(ranks, timeline.rank)
    _, step = np.unique(position * len(timeline.labels) + timeline.label_code, return_inverse=True)
    start_s, end_s = np.full(len(step), np.inf), np.full(len(step), -np.inf)
    np.minimum.at(start_s, step, timeline.start_s)
    np.maximum.at(end_s, step, timeline.end_s)
    own = np.flatnonzero(own_work(timeline) & compute_lane_spans(timeline) & (timeline.microbatch >= 0))
    passes_of, first = np.unique(step[own], return_index=True)
    spans = own[first]  # one of each
    key = position[spans] * n_stages + timeline.stage[spans] % n_stages
    size = len(ranks) * n_stages
    total = np.bincount(key, weights=end_s[passes_of] - start_s[passes_of], minlength=size)
    passes = np.unique(np.stack((key, timeline.microbatch[spans])), axis=1)[0]
    count = np.bincount(passes, minlength=size)
    each = np.divide(total, count, out=np.zeros(size), where=count > 0).reshape(len(ranks), n_stages)
    slowest: Floats = each.max(axis=0)
    return slowest


def _better(layers: Sequence[int], seconds: Floats) -> list[int] | None:
    """Each layer in turn to the stage that is then least loaded, the first and the last stage beginning with what they
    have beside layers. A layer takes what it does between the ends; with no stage there nothing can be said."""
    if sum(layers[1:-1]) == 0:
        return None
    layer = float(seconds[1:-1].sum()) / sum(layers[1:-1])
    load = [0.0] * len(layers)
    for end in (0, -1):
        load[end] = max(float(seconds[end]) - layers[end] * layer, 0.0)
    split = [0] * len(layers)
    inner = range(1, len(layers) - 1)
    for stage in inner:  # none between the ends may be empty
        split[stage], load[stage] = 1, layer
    for _ in range(sum(layers) - len(inner)):
        stage = min(range(len(layers)), key=lambda at: (load[at], at))
        split[stage] += 1
        load[stage] += layer
    worth = sum(layers) >= len(inner) and max(load) < (1 - _WORTH) * float(seconds.max())
    return split if worth else None
