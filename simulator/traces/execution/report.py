"""Results of the commands on execution traces, as plain data under the names of the JSON output."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from simulator.output.envelope import envelope
from simulator.traces.execution.figures import exchange_figures, name_figures, rank_figures
from simulator.traces.execution.graph import JobGraph
from simulator.traces.execution.replay import GraphReplay, missing


def shown_graphs(job: JobGraph, top: int) -> dict[str, Any]:
    """Return the figures of a job's graphs, with the ``top`` names that take most time."""
    return envelope(
        "trace show",
        missing(job),
        files=list(job.files),
        origin=job.ranks[0].origin,
        ranks=[asdict(rank_figures(rank)) for rank in job.ranks],
        exchanges=[asdict(one) for one in exchange_figures(job)],
        names=[asdict(one) for one in name_figures(job, top)],
    )


def replayed_graphs(job: JobGraph, played: GraphReplay) -> dict[str, Any]:
    """Return the step as it was played, and what the time of each rank goes to."""
    return envelope(
        "trace replay",
        played.warnings,
        files=list(job.files),
        cluster=played.cluster or None,
        step_s=played.step_s,
        ranks=[asdict(one) for one in played.ranks],
    )
