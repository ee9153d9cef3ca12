"""Balance of pipeline stages, and a split of the layers that would balance them better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulator.analysis.time.activity import compute_lane_spans, pass_spans
from simulator.arrays import Floats
from simulator.timeline import Timeline

#: A split is proposed where it makes the slowest stage faster by this share.
_WORTH = 0.01
#: Share of the step that GPUs wait for hosts, from which on no split is proposed.
_HOST_BOUND = 0.01


def stage_balance(timeline: Timeline, layers: Sequence[int], host_bound_fraction: float) -> dict[str, Any]:
    """Return how evenly stages are loaded, and a better split of their ``layers``.

    ``per_stage``: layers, and the seconds of one micro-batch's passes on the stage's slowest rank. They include
    collectives inside passes and waiting for the host. ``slowest_over_mean``: seconds of the slowest stage over the
    mean. ``layers_per_stage``: a split whose slowest stage is at least 1 % faster, else None. It is None, too, where
    GPUs wait for their hosts for 1 % of the step (``host_bound_fraction``). A stage that waits for another does not
    show how long its host would delay it.
    """
    seconds = _seconds(timeline, len(layers))
    mean = float(seconds.mean())
    return {
        "per_stage": [
            {"stage": stage, "layers": count, "seconds": float(stage_s)}
            for stage, (count, stage_s) in enumerate(zip(layers, seconds, strict=True))
        ],
        "slowest_over_mean": float(seconds.max()) / mean if mean else 1.0,
        "layers_per_stage": _better_split(layers, seconds) if host_bound_fraction < _HOST_BOUND else None,
    }


def _seconds(timeline: Timeline, n_stages: int) -> Floats:
    """Return the seconds of one micro-batch's passes per stage; copies of a stage count as the stage.

    A pass lasts from the start of its first span to the end of its last one.
    """
    ranks = np.array(timeline.ranks, dtype=np.int64)
    position = np.searchsorted(ranks, timeline.rank)
    _, step = np.unique(position * len(timeline.labels) + timeline.label_code, return_inverse=True)
    start_s, end_s = np.full(len(step), np.inf), np.full(len(step), -np.inf)
    np.minimum.at(start_s, step, timeline.start_s)
    np.maximum.at(end_s, step, timeline.end_s)
    in_pass = np.flatnonzero(pass_spans(timeline) & compute_lane_spans(timeline) & (timeline.microbatch >= 0))
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


def _better_split(layers: Sequence[int], seconds: Floats) -> list[int] | None:
    """Give each layer in turn to the least loaded stage.

    The first and the last stage begin with the load of their parts other than layers. Stages between them tell the
    seconds of a layer. None without such stages, and where the slowest stage would gain less than `_WORTH`.
    """
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
