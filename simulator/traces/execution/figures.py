"""Figures of execution traces: what nodes of each kind are, take, compute and move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.traces.execution.graph import EXCHANGES, GraphNode, JobGraph, NodeKind, RankGraph


@dataclass(frozen=True)
class KindFigures:
    """Nodes of a kind of one rank. ``seconds`` are of those that have a length; ``untimed`` is how many have none."""

    kind: str
    nodes: int
    seconds: float
    untimed: int
    flops: float
    nbytes: float


@dataclass(frozen=True)
class GraphFigures:
    """The nodes of one rank by kind. ``path_s``: the longest chain of recorded lengths, by what nodes wait for."""

    rank: int
    kinds: tuple[KindFigures, ...]
    path_s: float


@dataclass(frozen=True)
class ExchangeFigures:
    """Communication of one kind, among so many ranks (0: not told): ``calls`` of all ranks, and ``nbytes`` put in."""

    operation: str
    group_size: int
    calls: int
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class NameFigures:
    """Nodes of one name: ``launches`` and seconds of a mean rank."""

    name: str
    kind: str
    launches: float
    seconds: float


def rank_figures(rank: RankGraph) -> GraphFigures:
    """Return the figures of one rank."""
    by_kind: dict[NodeKind, list[GraphNode]] = {}
    ends: dict[int, float] = {}
    for node in rank.nodes:
        by_kind.setdefault(node.kind, []).append(node)
        ends[node.number] = max((ends[other] for other in node.after), default=0.0) + (node.seconds or 0.0)
    kinds = tuple(_kind(kind, by_kind[kind]) for kind in NodeKind if kind in by_kind)
    return GraphFigures(rank.rank, kinds, max(ends.values()))


def _kind(kind: NodeKind, nodes: Sequence[GraphNode]) -> KindFigures:
    return KindFigures(
        kind=str(kind),
        nodes=len(nodes),
        seconds=sum(node.seconds or 0.0 for node in nodes),
        untimed=sum(node.seconds is None for node in nodes),
        flops=sum(node.flops for node in nodes),
        nbytes=sum(node.nbytes if node.comm is None else node.comm.nbytes for node in nodes),
    )


def exchange_figures(job: JobGraph) -> tuple[ExchangeFigures, ...]:
    """Return the communication of all ranks, that with most bytes first."""
    calls: dict[tuple[str, int], list[GraphNode]] = {}
    for rank in job.ranks:
        for node in rank.nodes:
            if node.kind in EXCHANGES and node.comm is not None:
                is_collective = node.kind == NodeKind.COLLECTIVE
                size = len(job.members(node.comm.group)) if is_collective else 2
                calls.setdefault((node.comm.operation or str(node.kind), size), []).append(node)
    figures = [
        ExchangeFigures(
            operation, size, len(nodes), sum(node.comm.nbytes for node in nodes if node.comm is not None),
            sum(node.seconds or 0.0 for node in nodes),
        )
        for (operation, size), nodes in calls.items()
    ]  # fmt: skip
    return tuple(sorted(figures, key=lambda one: -one.nbytes))


def name_figures(job: JobGraph, top: int) -> tuple[NameFigures, ...]:
    """Return the ``top`` names of nodes that take most time, or of most FLOPs where nothing has a length."""
    sums: dict[tuple[str, str], list[float]] = {}
    for rank in job.ranks:
        for node in rank.nodes:
            if node.kind != NodeKind.NOTHING:
                entry = sums.setdefault((node.name, str(node.kind)), [0.0, 0.0, 0.0])
                for at, amount in enumerate((1.0, node.seconds or 0.0, node.flops)):
                    entry[at] += amount
    n = len(job.ranks)
    ranked = sorted(sums.items(), key=lambda entry: (-entry[1][1], -entry[1][2], entry[0]))
    return tuple(
        NameFigures(name, kind, launches / n, seconds / n) for (name, kind), (launches, seconds, _) in ranked[:top]
    )
