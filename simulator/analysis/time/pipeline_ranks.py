"""Where simulated ranks stand in their pipelines."""

from __future__ import annotations

import numpy as np

from simulator.timeline import Timeline


def pipeline_ranks(timeline: Timeline) -> dict[int, int]:
    """Per simulated rank its place in its pipeline: the lowest model stage that it runs, 0 where it runs none."""
    # Only its own passes count: a received activation carries the stage that made it.
    known = (timeline.stage >= 0) & (timeline.phase != "C")
    ranks = np.array(timeline.ranks, dtype=np.int64)
    lowest = np.full(len(ranks), np.iinfo(np.int64).max)
    np.minimum.at(lowest, np.searchsorted(ranks, timeline.rank[known]), timeline.stage[known])
    lowest[lowest == np.iinfo(np.int64).max] = 0
    return dict(zip(ranks.tolist(), lowest.tolist(), strict=True))


def one_rank_per_stage(timeline: Timeline) -> list[int]:
    """The first simulated rank of each place in the pipeline, in order of the places."""
    first: dict[int, int] = {}
    for rank, place in pipeline_ranks(timeline).items():
        first.setdefault(place, rank)
    return [first[place] for place in sorted(first)]
