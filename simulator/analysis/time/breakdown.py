"""Time breakdown of a step, and its communication by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulator.analysis.time.activity import (
    HOST,
    Activity,
    WeightedRanks,
    mean_over_ranks,
    rank_positions,
    reduced_per_rank,
    weigh,
)
from simulator.analysis.time.links import links_of_purpose
from simulator.arrays import Floats
from simulator.timeline import CATEGORIES, COMMUNICATION, FIRST_COMMUNICATION, Timeline


def time_breakdown(activity: Activity, pipelines: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return ``time_breakdown_s``: seconds of the step by use, mean over real ranks; the leaves sum to the step.

    Idle time is bubble (a peer has not produced yet) until the last op of the rank's pipeline ends. From then on it
    counts as ``other``: the replica has finished before others. A steady state has no ``other``.
    """
    timeline = activity.timeline
    spent = mean_over_ranks(timeline, activity.spent_s)
    idle = float(mean_over_ranks(timeline, activity.idle_s))
    finished = reduced_per_rank(timeline, timeline.end_s, np.ones(len(timeline.rank), dtype=bool), np.maximum, 0.0)
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


def _after_pipeline(timeline: Timeline, pipelines: tuple[WeightedRanks, ...], finished: Floats) -> float:
    """Return the seconds from the end of a rank's pipeline to the end of the step, mean over real ranks."""
    position = {rank: index for index, rank in enumerate(timeline.ranks)}
    seconds = weight = 0.0
    for pipeline in pipelines:
        end = max(finished[position[rank]] for rank in pipeline.ranks)
        seconds += float(pipeline.weights.sum()) * (timeline.step_time_s - float(end))
        weight += float(pipeline.weights.sum())
    return seconds / weight


def communication(activity: Activity) -> dict[str, dict[str, Any]]:
    """Return bytes and times per kind of communication, means over real ranks.

    ``bytes_per_gpu``: bytes sent on the wire; offload and parameter servers count both ways. A collective of one
    number, such as a gradient norm, has time alone: it loads no link. ``time_s``: seconds in which any is in flight.
    ``exposed_s``: seconds of these that no computation hides. ``algorithm``: the one that sent the most bytes.
    ``links``: see `links_of_purpose`.
    """
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
    """Return the bytes that ranks sent: one row per simulated rank, one column per category."""
    by_template = [np.bincount(t.category, weights=t.nbytes, minlength=len(CATEGORIES)) for t in timeline.templates]
    sent = np.array(by_template).reshape(-1, len(CATEGORIES))
    position, n_ranks = rank_positions(timeline), len(timeline.ranks)
    columns = [
        np.bincount(position, weights=sent[timeline.template, category], minlength=n_ranks)
        for category in range(len(CATEGORIES))
    ]
    return np.stack(columns, axis=1)
