"""Which ranks, groups, links and transfers may stand for which.

Folding computes an equitable partition by colour refinement (Weisfeiler and Leman; see Berkholz, Bonsma and Grohe,
arXiv 1509.08251): ranks of a colour play one role on equal GPUs and sit in groups of equal colours; groups of a colour
have members of equal colours and make equal transfers; links of a colour are equal and carry equal transfers. By
induction over instants everything of a colour is then in the same state at all times (progressive filling fills links
of a colour together), so one rank per colour is simulated, and one link per colour with the load of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.cluster import Cluster
from simulator.engine.group_transfers import Session, Shapes
from simulator.engine.placement import Placed

_DIGITS = str.maketrans("", "", "0123456789")

Colours = NDArray[np.uint64]


@dataclass(frozen=True)
class Classes:
    """Elements by colour: the ``first`` of each class in order of appearance, each element's class, class sizes."""

    first: NDArray[np.int64]
    of: NDArray[np.int64]
    size: NDArray[np.int64]

    @classmethod
    def by(cls, colours: Colours) -> Classes:
        _, first, inverse, counts = np.unique(colours, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(first, kind="stable")
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        return cls(first[order], number[inverse], counts[order])


@dataclass(frozen=True)
class Folding:
    """Classes of ranks and groups, numbered through all programs, of links and of sessions; equal ones are simulated
    once. ``first_rank[job]``, ``first_group[job][axis]``: where their numbers start."""

    first_rank: tuple[int, ...]
    first_group: tuple[dict[str, int], ...]
    ranks: Classes
    groups: Classes
    links: Classes
    sessions: Classes


def fold(
    jobs: Sequence[Placed],
    cluster: Cluster,
    capacity: NDArray[np.float64],
    sessions: Sequence[Session],
    shapes: Shapes,
    *,
    refine: bool = True,
) -> Folding:
    """The coarsest equitable partition; without ``refine`` every element is a class of its own."""
    first_rank: list[int] = [0]
    first_group: list[dict[str, int]] = []
    n_groups = 0
    for placed in jobs:
        first_rank.append(first_rank[-1] + placed.program.n_ranks)
        first_group.append({})
        for axis, groups in placed.program.groups.items():
            first_group[-1][axis] = n_groups
            n_groups += len(groups)
    if refine:
        colours = _refine(jobs, cluster, capacity, sessions, shapes, first_rank, first_group, n_groups)
    else:
        sizes = (first_rank[-1], n_groups, len(cluster.links), len(shapes.label))
        colours = tuple(np.arange(size, dtype=np.uint64) for size in sizes)
    return Folding(tuple(first_rank[:-1]), tuple(first_group), *map(Classes.by, colours))


def _refine(
    jobs: Sequence[Placed],
    cluster: Cluster,
    capacity: NDArray[np.float64],
    sessions: Sequence[Session],
    shapes: Shapes,
    first_rank: Sequence[int],
    first_group: Sequence[dict[str, int]],
    n_groups: int,
) -> tuple[Colours, ...]:
    """Colours of ranks, groups, links and sessions."""
    members = np.array(
        [
            (first_rank[job] + rank, first_group[job][axis] + index, position)
            for job, placed in enumerate(jobs)
            for axis, groups in placed.program.groups.items()
            for index, group in enumerate(groups)
            for position, rank in enumerate(group)
        ],
        dtype=np.int64,
    ).reshape(-1, 3)
    rank_of, group_of, position = members[:, 0], members[:, 1], members[:, 2].astype(np.uint64)
    # Where somebody names a peer by its position, positions differ; elsewhere members are alike. Background traffic
    # belongs to one group more, that of nobody.
    named = np.zeros(n_groups + 1, dtype=bool)
    for job, axis in {(session.job, session.axis): None for session in sessions if session.op == "send"}:
        start = first_group[job][axis]
        named[start : start + len(jobs[job].program.groups[axis])] = True
    position = np.where(named[group_of], position, np.uint64(0))

    rank = _label((job, kind) for job, placed in enumerate(jobs) for kind in placed.kinds(cluster))
    group = _label(
        [
            *[
                (job, axis, len(of_axis))
                for job, placed in enumerate(jobs)
                for axis, groups in placed.program.groups.items()
                for of_axis in groups
            ],
            (),
        ]
    )
    link = link_labels(cluster, capacity)
    at_session, at_link = shapes.session, shapes.link
    load = _mix(np.round(shapes.load, 12).view(np.uint64), shapes.phase.astype(np.uint64))
    session = _label(shapes.label)
    group_of_session = np.full(len(session), n_groups, dtype=np.int64)
    group_of_session[: len(sessions)] = [first_group[item.job][item.axis] + item.group for item in sessions]

    count = -1
    while count != (count := sum(len(np.unique(colours)) for colours in (rank, group, link, session))):
        crossed = _gather(at_session, len(session), _mix(link[at_link], load))
        session = _mix(session, group[group_of_session], crossed)
        link = _mix(link, _gather(at_link, len(link), _mix(session[at_session], load)))
        inside = _gather(group_of, len(group), _mix(rank[rank_of], position))
        group = _mix(group, inside, _gather(group_of_session, len(group), session))
        rank = _mix(rank, _gather(rank_of, len(rank), _mix(group[group_of], position)))
    return rank, group[:n_groups], link, session


def link_labels(cluster: Cluster, capacity: NDArray[np.float64]) -> Colours:
    """Return a number per link, the same for links of one kind, capacity and latency that are called alike but for
    numbers and directions; numbers follow the links.

    What is called otherwise counts as something else, so that rows of links say how many there are of a name.
    """
    gpu_names = {gpu.name for gpu in cluster.gpus}
    return _label(
        (item.kind, float(rate), item.latency_s, item.src in gpu_names, item.name.partition(":")[0].translate(_DIGITS))
        for item, rate in zip(cluster.links, capacity, strict=True)
    )


def _mix(*parts: Colours) -> Colours:
    """One 64-bit hash per position of several colour arrays (the finaliser of splitmix64, Steele et al. 2014)."""
    value = np.zeros_like(parts[0])
    for part in parts:
        value = value + part + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value = value ^ (value >> np.uint64(31))
    return value


def _gather(target: NDArray[np.int64], size: int, colours: Colours) -> Colours:
    """Per target, a hash of the multiset of colours that point at it."""
    out = np.zeros(size, dtype=np.uint64)
    np.add.at(out, target, _mix(colours))
    return out


def _label(values: Iterable[object]) -> Colours:
    """Equal values get equal colours, numbered by first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.uint64)
