"""Pipeline ranks: positions of simulated ranks in their pipelines."""

from __future__ import annotations

import numpy as np

from simulator.timeline import Timeline


def pipeline_ranks(timeline: Timeline) -> dict[int, int]:
    """Return the pipeline rank of each simulated rank: the lowest model stage that it runs, 0 where it runs none."""
    # Passes alone count: a received activation carries the stage of its sender.
    passes = (timeline.stage >= 0) & (timeline.phase != "C")
    ranks = np.array(timeline.ranks, dtype=np.int64)
    lowest = np.full(len(ranks), np.iinfo(np.int64).max)
    np.minimum.at(lowest, np.searchsorted(ranks, timeline.rank[passes]), timeline.stage[passes])
    lowest[lowest == np.iinfo(np.int64).max] = 0
    return dict(zip(ranks.tolist(), lowest.tolist(), strict=True))


def one_rank_per_stage(timeline: Timeline) -> list[int]:
    """Return the first simulated rank of each pipeline rank, in the order of pipeline ranks."""
    first: dict[int, int] = {}
    for rank, pipeline_rank in pipeline_ranks(timeline).items():
        first.setdefault(pipeline_rank, rank)
    return [first[pipeline_rank] for pipeline_rank in sorted(first)]
