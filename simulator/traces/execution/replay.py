"""The graphs of a job, played: as recorded, or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.timeline import Timeline
from simulator.traces.execution.graph import EXCHANGES, JobGraph, NodeKind, RankGraph
from simulator.traces.execution.lengths import GraphTarget, NodeLengths
from simulator.traces.execution.program import graph_program, label
from simulator.traces.overlap import busy_time
from simulator.units import counted

_KERNELS = (NodeKind.GPU, NodeKind.LOAD, NodeKind.STORE)


@dataclass(frozen=True)
class PlayedRank:
    """Uses of a rank's time. Communication counts from when all have come.

    ``host_s``: work of hosts. ``exposed_s``: communication that no kernel covers; ``overlap``: share of it beside
    kernels, None where the rank does not communicate.
    """

    rank: int
    end_s: float
    compute_s: float
    host_s: float
    communication_s: float
    exposed_s: float
    overlap: float | None


@dataclass(frozen=True)
class GraphReplay:
    """A job as it was played. ``cluster``: name of the cluster; empty as recorded."""

    cluster: str
    step_s: float
    ranks: tuple[PlayedRank, ...]
    warnings: tuple[str, ...]


def replay_graphs(job: JobGraph, cluster: str | Mapping[str, Any] | None = None) -> GraphReplay:
    """Play a job on a cluster; without one, everything takes as long as it was recorded to take.

    Raises `InputError` where ranks do not fit together, or nothing tells how long a node takes; keys of the cluster
    begin with ``target``.
    """
    n_ranks = max(rank.rank for rank in job.ranks) + 1
    target = None if cluster is None else GraphTarget.on(cluster, job.n_ranks)
    lengths = NodeLengths(job, target)
    program = graph_program(job, lengths)
    if target is None:
        timeline = simulate(program, ideal_cluster(n_ranks), Costs.ideal())
    else:
        timeline = simulate(program, target.cluster, target.costs)
    return GraphReplay(
        cluster="" if target is None else target.cluster.spec.name,
        step_s=timeline.length_s,
        ranks=_played_ranks(job, timeline),
        warnings=tuple(_warnings(job, lengths)),
    )


def _played_ranks(job: JobGraph, timeline: Timeline) -> tuple[PlayedRank, ...]:
    spans: dict[int, dict[str, tuple[float, float]]] = {}
    columns = zip(
        timeline.rank.tolist(), timeline.labels, timeline.start_s.tolist(), timeline.end_s.tolist(), strict=True
    )
    for rank, name, start_s, end_s in columns:
        spans.setdefault(rank, {})[name] = start_s, end_s
    return tuple(_played(one, spans.get(timeline.simulated_as[one.rank], {})) for one in job.ranks)


def _played(rank: RankGraph, spans: Mapping[str, tuple[float, float]]) -> PlayedRank:
    times = np.array([spans[label(node.number)] for node in rank.nodes], dtype=np.float64).reshape(-1, 2)
    start_s, end_s = times.T

    def are(*kinds: NodeKind) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return np.array([node.kind in kinds for node in rank.nodes], dtype=bool)

    on_gpu = are(*EXCHANGES, *_KERNELS)
    kernels, exchanges, host = are(*_KERNELS), are(*EXCHANGES), are(NodeKind.HOST)
    busy = busy_time(start_s[on_gpu], end_s[on_gpu], exchanges[on_gpu], kernels[on_gpu])
    return PlayedRank(
        rank=rank.rank,
        end_s=float(end_s.max(initial=0.0)),
        compute_s=busy.compute_s,
        host_s=float((end_s - start_s)[host].sum()),
        communication_s=busy.communication_s,
        exposed_s=busy.exposed_s,
        overlap=busy.overlap,
    )


def missing(job: JobGraph) -> list[str]:
    """Return everything that files lack, once each, with the rank where there are several."""
    several = len(job.ranks) > 1
    texts = [*job.missing]
    texts += [f"rank {rank.rank}: {text}" if several else text for rank in job.ranks for text in rank.missing]
    return list(dict.fromkeys(texts))


def _warnings(job: JobGraph, lengths: NodeLengths) -> list[str]:
    warnings = missing(job)
    alone = sum(node.kind in EXCHANGES and not lengths.is_complete(node) for rank in job.ranks for node in rank.nodes)
    if alone:
        kept = "recorded lengths are kept, or those of an idle network"
        warnings.append(f"{counted(alone, 'communication')} with ranks that have no trace here: {kept}")
    if (target := lengths.target) is not None:
        if any(node.kind == NodeKind.GPU and node.seconds for rank in job.ranks for node in rank.nodes):
            warnings.append(f"kernels last as they were recorded, whatever GPU {target.cluster.spec.name} has")
        priced = ((rank.rank, node) for rank in job.ranks for node in rank.nodes if node.seconds is None and node.flops)
        warnings += dict.fromkeys(text for rank, node in priced if (text := target.replaced_peak(rank, node)))
    return warnings
