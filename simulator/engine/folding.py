"""Folding: ranks, groups, links and communications that are in the same state at all times are simulated once.

Folding computes an equitable partition by colour refinement (Weisfeiler and Leman; see Berkholz, Bonsma and Grohe,
arXiv 1509.08251). Ranks of a colour play one role on equal GPUs and sit in groups of equal colours. Groups of a colour
have members of equal colours and make equal communications. Links of a colour are equal and carry equal
communications. By induction over instants everything of a colour is then in the same state at all times, as progressive
filling fills links of a colour together. So one rank per colour is simulated, and one link per colour with the load of
all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.cluster import Cluster
from simulator.cluster.alike import alike_links
from simulator.engine.group_comms import GroupComm, LinkLoads
from simulator.engine.placement import Placed

_DIGITS = str.maketrans("", "", "0123456789")

Colours = NDArray[np.uint64]


@dataclass(frozen=True)
class Classes:
    """Elements by colour: the ``first`` of each class in order of appearance, each element's class, class sizes."""

    first: NDArray[np.int64]
    class_of: NDArray[np.int64]
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
    """Classes of ranks, groups, links and communications; each class is simulated once.

    Ranks and groups are numbered through all programs, from ``first_rank[job]`` and ``first_group[job][axis]`` on.
    """

    first_rank: tuple[int, ...]
    first_group: tuple[dict[str, int], ...]
    ranks: Classes
    groups: Classes
    links: Classes
    comms: Classes


class _Numbering(NamedTuple):
    """Numbers of ranks and groups through all programs, as in `Folding`."""

    first_rank: list[int]
    first_group: list[dict[str, int]]
    n_ranks: int
    n_groups: int

    @classmethod
    def from_jobs(cls, jobs: Sequence[Placed]) -> _Numbering:
        """Number the ranks and groups of ``jobs``, one after another."""
        first_rank: list[int] = []
        first_group: list[dict[str, int]] = []
        n_ranks = n_groups = 0
        for placed in jobs:
            first_rank.append(n_ranks)
            n_ranks += placed.program.n_ranks
            first_group.append({})
            for axis, groups in placed.program.groups.items():
                first_group[-1][axis] = n_groups
                n_groups += len(groups)
        return cls(first_rank, first_group, n_ranks, n_groups)


def fold(
    jobs: Sequence[Placed],
    cluster: Cluster,
    capacity: NDArray[np.float64],
    comms: Sequence[GroupComm],
    loads: LinkLoads,
    *,
    refine: bool = True,
) -> Folding:
    """Return the coarsest equitable partition; without ``refine`` every element is a class of its own."""
    numbering = _Numbering.from_jobs(jobs)
    if refine:
        colours = _refine(jobs, cluster, capacity, comms, loads, numbering)
    else:
        sizes = (numbering.n_ranks, numbering.n_groups, len(cluster.links), len(loads.label))
        colours = tuple(np.arange(size, dtype=np.uint64) for size in sizes)
    return Folding(tuple(numbering.first_rank), tuple(numbering.first_group), *map(Classes.by, colours))


def _refine(
    jobs: Sequence[Placed],
    cluster: Cluster,
    capacity: NDArray[np.float64],
    comms: Sequence[GroupComm],
    loads: LinkLoads,
    numbering: _Numbering,
) -> tuple[Colours, ...]:
    """Return the colours of ranks, groups, links and communications."""
    rank_of, group_of, position = _members(jobs, comms, numbering)
    rank = _label((job, kind) for job, placed in enumerate(jobs) for kind in placed.rank_kinds(cluster))
    sizes = [
        (job, axis, len(group))
        for job, placed in enumerate(jobs)
        for axis, groups in placed.program.groups.items()
        for group in groups
    ]
    # Background traffic belongs to one group more, that of nobody.
    group = _label([*sizes, ()])
    link = link_labels(cluster, capacity)
    load = _mix(np.round(loads.load, 12).view(np.uint64), loads.phase.astype(np.uint64))
    comm = _label(loads.label)
    group_of_comm = np.full(len(comm), numbering.n_groups, dtype=np.int64)
    group_of_comm[: len(comms)] = [numbering.first_group[x.job][x.axis] + x.group for x in comms]

    count = -1
    while count != (count := sum(len(np.unique(colours)) for colours in (rank, group, link, comm))):
        crossed = _gather(loads.comm, len(comm), _mix(link[loads.link], load))
        comm = _mix(comm, group[group_of_comm], crossed)
        link = _mix(link, _gather(loads.link, len(link), _mix(comm[loads.comm], load)))
        inside = _gather(group_of, len(group), _mix(rank[rank_of], position))
        group = _mix(group, inside, _gather(group_of_comm, len(group), comm))
        rank = _mix(rank, _gather(rank_of, len(rank), _mix(group[group_of], position)))
    return rank, group[: numbering.n_groups], link, comm


def _members(
    jobs: Sequence[Placed], comms: Sequence[GroupComm], numbering: _Numbering
) -> tuple[NDArray[np.int64], NDArray[np.int64], Colours]:
    """Return rank, group and position of every member of every group.

    Positions differ where somebody names a peer by its position; elsewhere they are 0, as members are alike.
    """
    parts = [np.zeros((3, 0), dtype=np.int64)]
    for job, placed in enumerate(jobs):
        for axis, groups in placed.program.groups.items():
            sizes = np.array([len(members) for members in groups], dtype=np.int64)
            ranks = np.fromiter(itertools.chain.from_iterable(groups), dtype=np.int64, count=int(sizes.sum()))
            before = np.repeat(np.cumsum(sizes) - sizes, sizes)  # members of earlier groups of the axis
            numbers = np.repeat(np.arange(len(groups)), sizes) + numbering.first_group[job][axis]
            parts.append(np.stack((ranks + numbering.first_rank[job], numbers, np.arange(len(ranks)) - before)))
    rank, group, position = np.concatenate(parts, axis=1)
    names_peers = np.zeros(numbering.n_groups, dtype=bool)
    for job, axis in {(comm.job, comm.axis): None for comm in comms if comm.op == "send"}:
        start = numbering.first_group[job][axis]
        names_peers[start : start + len(jobs[job].program.groups[axis])] = True
    return rank, group, np.where(names_peers[group], position, 0).astype(np.uint64)


def link_labels(cluster: Cluster, capacity: NDArray[np.float64]) -> Colours:
    """Return a number per link; links of one kind, capacity and latency and of one name share it.

    Numbers and directions in names do not count. Links of different names count as different, so that rows of links say
    how many there are of a name. Numbers follow the order of the links.
    """
    gpu_names = {gpu.name for gpu in cluster.gpus}
    stand_ins, places = alike_links(cluster)
    items = zip([cluster.links[link] for link in stand_ins.tolist()], capacity[stand_ins].tolist(), strict=True)
    labels = _label(
        (item.kind, rate, item.latency_s, item.src in gpu_names, item.name.partition(":")[0].translate(_DIGITS))
        for item, rate in items
    )
    return labels[places]


def _mix(*parts: Colours) -> Colours:
    """Return a 64-bit hash per position of several colour arrays (finaliser of splitmix64, Steele et al. 2014)."""
    value = np.zeros_like(parts[0])
    for part in parts:
        value = value + part + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value = value ^ (value >> np.uint64(31))
    return value


def _gather(target: NDArray[np.int64], size: int, colours: Colours) -> Colours:
    """Return for each target a hash of the multiset of colours that point at it."""
    out = np.zeros(size, dtype=np.uint64)
    np.add.at(out, target, _mix(colours))
    return out


def _label(values: Iterable[object]) -> Colours:
    """Give equal values equal colours, numbered by first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.uint64)
