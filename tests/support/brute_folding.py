"""The same folding from lists of all ranks, groups, links and communications: one after another, nothing shared.

It is the oracle of `simulator.engine.folding`: as slow as a cluster is large, and free of arithmetic on layouts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from simulator.cluster import Cluster, Link
from simulator.costs import Costs
from simulator.engine import Placed
from simulator.engine.ample_links import ample_links
from simulator.engine.carried import carriages, routed_comms
from simulator.engine.entries import Entries
from simulator.engine.folding import RankNumbering, fold
from simulator.engine.group_comms import (
    GroupComm,
    algorithm_of,
    alike_comms,
    ends_of,
    is_signal,
    op_of,
    shares_of,
    spec_of,
)
from simulator.engine.link_facts import link_capacities
from simulator.network import hosts
from simulator.network.collectives import choose, patterns
from simulator.program import HostOperation, PointToPoint, RecordedWork

#: Neighbours of each element: number, and how the two meet.
Neighbours = list[list[tuple[int, Hashable]]]


class Partition(NamedTuple):
    """Class of every rank of every job, of every group, of every link that carries something, and of communications."""

    ranks: list[list[int]]
    groups: dict[tuple[int, str, int], int]
    links: dict[int, int]
    comms: dict[tuple[int, str, int, Hashable], int]


def brute_partition(jobs: Sequence[Placed], cluster: Cluster) -> Partition:
    """Return the coarsest equitable partition, by colour refinement over everything there is."""
    ranks = [(job, rank) for job, placed in enumerate(jobs) for rank in range(placed.program.n_ranks)]
    groups = [
        (job, axis, number)
        for job, placed in enumerate(jobs)
        for axis, members in placed.program.groups.items()
        for number in range(len(members))
    ]
    comms = [comm for job in range(len(jobs)) for comm in _comms(jobs, job, cluster)]
    routes = [_route(jobs, cluster, comm) for comm in comms]
    loaded = sorted({link for _, loads in routes for _, link, _ in loads} | _background_links(cluster))
    return _refined(jobs, cluster, ranks, groups, comms, routes, loaded)


def _comms(jobs: Sequence[Placed], job: int, cluster: Cluster) -> list[GroupComm]:
    """Return every distinct communication of every group of a job."""
    placed, distinct = jobs[job], dict[tuple[str, int, Hashable], GroupComm]()
    for rank, role in enumerate(placed.program.role_of):
        for _, comm in placed.program.roles[role].comms:
            number = placed.program.group_index(comm.axis, rank)
            members = ranks = placed.program.groups[comm.axis][number]
            spec = spec_of(comm, members.index(rank))
            if isinstance(comm, PointToPoint):
                ranks = tuple(members[end] for end in ends_of(comm, members.index(rank)))
            ends = tuple(placed.gpus[member] for member in ranks)
            if isinstance(comm, HostOperation):
                ends = _host_ends(comm.op, cluster, ends[0], placed.servers)
            one = GroupComm(job, comm.axis, number, spec, comm, np.array(ranks), np.array(ends))
            distinct.setdefault((comm.axis, number, spec), one)
    return list(distinct.values())


def _host_ends(op: str, cluster: Cluster, gpu: int, servers: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(hosts.ends(op, cluster, np.array([gpu]), servers)[0].tolist())


def _route(jobs: Sequence[Placed], cluster: Cluster, item: GroupComm) -> tuple[Hashable, list[tuple[int, int, float]]]:
    """Return what a communication has in common with those like it, and its phases, links and loads."""
    label = item.job, item.axis, item.spec
    if isinstance(item.comm, PointToPoint):
        ways = cluster.spread(*item.ends.tolist())
        latency_s = sum(share * cluster.links[link].latency_s for link, share in ways)
        return (*label, f"{latency_s:.9e}"), [(0, link, round(share, 12)) for link, share in ways]
    if isinstance(item.comm, RecordedWork) or len(item.ends) == 1:
        return label, []
    candidates = patterns(
        item.comm.op, tuple(item.ends.tolist()), cluster, algorithm_of(item.comm), shares_of(item.comm)
    )
    pattern = choose(item.comm.op, candidates, item.comm.nbytes, item.costs(jobs, cluster))
    assert pattern is not None
    loads = [
        (number, link, round(load, 12))
        for number, phase in enumerate(() if is_signal(item.comm) else pattern.legs)
        for link, load in phase.loads
    ]
    return (*label, pattern.timing), loads


def _background_links(cluster: Cluster) -> set[int]:
    return {link for flow in cluster.background for link, _ in flow.loads}


def _capacity_Bps(jobs: Sequence[Placed], cluster: Cluster, link: Link) -> float:
    """Return the bytes/s of a link by the GPUs of its node that have ranks, else by the costs of all."""
    costs: Costs = jobs[0].costs
    used = {cluster.gpus[gpu].type for placed in jobs for gpu in placed.gpus}
    nodes = [node for node, first in enumerate(cluster.first_link) if first <= link.index]
    if link.index < len(cluster.links) - len(cluster.trunks):
        types = tuple(gpu for gpu in dict.fromkeys(cluster.layouts[nodes[-1]].types) if gpu in used)
        if types:
            costs = costs.for_gpu(types[0]) if len(types) == 1 else costs.among(types)
    return costs.reachable_Bps(link.kind, link.bandwidth_Bps)


def _link_label(jobs: Sequence[Placed], cluster: Cluster, link: Link) -> Hashable:
    gpu_names = {gpu.name for gpu in cluster.gpus}
    name = "".join(letter for letter in link.name.partition(":")[0] if not letter.isdigit())
    return link.kind, _capacity_Bps(jobs, cluster, link), link.latency_s, link.src in gpu_names, name


def _refined(
    jobs: Sequence[Placed],
    cluster: Cluster,
    ranks: list[tuple[int, int]],
    groups: list[tuple[int, str, int]],
    comms: list[GroupComm],
    routes: list[tuple[Hashable, list[tuple[int, int, float]]]],
    loaded: list[int],
) -> Partition:
    kinds = [placed.rank_kinds(cluster) for placed in jobs]
    sends = {(one.job, one.axis) for one in comms if op_of(one.comm) == "send"}
    group_at, rank_at = {group: at for at, group in enumerate(groups)}, {rank: at for at, rank in enumerate(ranks)}
    link_at = {link: at for at, link in enumerate(loaded)}
    rank = _numbers((job, kinds[job][number]) for job, number in ranks)
    group = _numbers((job, axis, len(jobs[job].program.groups[axis][number])) for job, axis, number in groups)
    group.append(-1)  # that of background traffic
    link = _numbers(_link_label(jobs, cluster, cluster.links[number]) for number in loaded)
    flows = [
        (("background", flow.rate_Bps), [(0, on, share) for on, share in flow.loads]) for flow in cluster.background
    ]
    all_routes = [*routes, *flows]
    comm = _numbers(label for label, _ in all_routes)
    group_of_comm = [group_at[one.job, one.axis, one.group] for one in comms] + [len(groups)] * len(flows)
    ample = _ample(jobs, cluster)
    crossing: Neighbours = [[] for _ in loaded]
    for at, (_, loads) in enumerate(all_routes):
        for phase, on, load in loads:
            crossing[link_at[on]].append((at, (phase, load)))
    limiting = [[] if loaded[at] in ample else crossed for at, crossed in enumerate(crossing)]
    members = [
        [
            (rank_at[job, member], place if (job, axis) in sends else 0)
            for place, member in enumerate(jobs[job].program.groups[axis][number])
        ]
        for job, axis, number in groups
    ] + [[]]
    member_of: Neighbours = [[] for _ in ranks]
    for at, inside in enumerate(members):
        for member, place in inside:
            member_of[member].append((at, place))
    comms_of: Neighbours = [[] for _ in group]
    for at, group_number in enumerate(group_of_comm):
        comms_of[group_number].append((at, 0))
    crossed = [
        [(link_at[on], (phase, load)) for phase, on, load in loads if on not in ample] for _, loads in all_routes
    ]
    count = -1
    while count != (count := sum(len(set(colours)) for colours in (rank, group, link, comm))):
        comm = _numbers(zip(comm, [group[one] for one in group_of_comm], _around(crossed, link), strict=True))
        link = _numbers(zip(link, _around(limiting, comm), strict=True))
        group = _numbers(zip(group, _around(members, rank), _around(comms_of, comm), strict=True))
        rank = _numbers(zip(rank, _around(member_of, group), strict=True))
    link = _numbers(zip(link, _around(crossing, comm), strict=True))
    by_job = [[rank[at] for at, (job, _) in enumerate(ranks) if job == number] for number in range(len(jobs))]
    keys = [(one.job, one.axis, one.group, one.spec) for one in comms]
    return Partition(
        by_job,
        dict(zip(groups, group, strict=False)),
        dict(zip(loaded, link, strict=True)),
        dict(zip(keys, comm, strict=False)),
    )


def _ample(jobs: Sequence[Placed], cluster: Cluster) -> set[int]:
    """Return the trunks over which no more can come in, or go on, than they carry: one switch, one trunk at a time."""
    capacity = {link.index: _capacity_Bps(jobs, cluster, link) for link in cluster.links}
    switches = {name for leaves in cluster.switches.leaves for name in leaves}
    switches |= {end for trunk in cluster.trunks for end in (trunk.src, trunk.dst)}
    ample: set[int] = set()
    for trunk in cluster.trunks:
        before = [one.index for one in cluster.links if one.dst == trunk.src and one.src != trunk.dst]
        after = [one.index for one in cluster.links if one.src == trunk.dst and one.dst != trunk.src]
        for switch, neighbours in ((trunk.src, before), (trunk.dst, after)):
            room_Bps = sum(capacity[one] for one in neighbours)
            fits = room_Bps <= capacity[trunk.index] * (1 + 1e-9)
            if switch in switches and len(neighbours) > 1 and fits and trunk.index not in _background_links(cluster):
                ample.add(trunk.index)
    return ample


def _around(neighbours: Sequence[Sequence[tuple[int, Hashable]]], colours: Sequence[int]) -> Iterable[Hashable]:
    """Yield the multiset of the colours of the neighbours of each."""
    for around in neighbours:
        yield tuple(sorted([(colours[at], how) for at, how in around], key=repr))


def _numbers(values: Iterable[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def partition(jobs: Sequence[Placed], cluster: Cluster) -> Partition:
    """Return the partition that `simulator.engine.folding` finds."""
    groups = [{axis: one.program.seated(axis) for axis in one.program.groups} for one in jobs]
    numbering, capacity = RankNumbering.from_jobs(jobs), link_capacities(jobs, cluster)
    routed = routed_comms(jobs, cluster, alike_comms(jobs, cluster, groups))
    carried = carriages(cluster, routed, numbering.first_group, numbering.n_groups)
    entries = Entries.from_carriages(carried)
    folding = fold(jobs, cluster, capacity, groups, carried, entries, numbering, ample_links(cluster, capacity))
    ranks = folding.ranks.class_of.tolist()
    firsts = [*numbering.first_rank, numbering.n_ranks]
    group_classes = {
        (job, axis, number): int(folding.groups.class_of[first + number])
        for job, by_axis in enumerate(numbering.first_group)
        for axis, first in by_axis.items()
        for number in range(len(jobs[job].program.groups[axis]))
    }
    comms = {
        (one.alike.job, one.alike.axis, int(one.alike.groups[row]), one.alike.spec): int(
            folding.comms.class_of[one.alike.number[row]]
        )
        for one in routed
        for row in one.rows.tolist()
    }
    links = dict(zip(folding.loaded.tolist(), folding.links.class_of.tolist(), strict=True))
    return Partition([ranks[low:high] for low, high in pairwise(firsts)], group_classes, links, comms)


def partition_differences(jobs: Sequence[Placed], cluster: Cluster) -> Iterator[str]:
    """Yield where folding puts other things into one class than the brute way does."""
    brute, arithmetic = brute_partition(jobs, cluster), partition(jobs, cluster)
    numbers = ([("ranks", job) for job in range(len(jobs))], brute.ranks, arithmetic.ranks)
    for name, one, other in zip(*numbers, strict=True):
        if _numbers(one) != _numbers(other):
            yield f"{name}: {len(set(one))} classes, and {len(set(other))} by arithmetic"
    pairs = (brute.groups, arithmetic.groups), (brute.links, arithmetic.links), (brute.comms, arithmetic.comms)
    for name, (one, other) in zip(("groups", "links", "comms"), pairs, strict=True):
        if one.keys() != other.keys():
            yield f"{name}: {len(one)} of them, and {len(other)} by arithmetic"
        elif _numbers(one.values()) != _numbers([other[key] for key in one]):
            yield f"{name}: {len(set(one.values()))} classes, and {len(set(other.values()))} by arithmetic"
