"""Folded traffic: which ranks and links are simulated, and which links each class of communications loads.

Programs whose groups communicate alike on a cluster have the same folded traffic, however many bytes they send. The
cluster keeps the folded traffic of the last programs. Jobs that differ in micro-batches or recomputation alone are
folded once.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from simulator.arrays import Bools, Floats, Ints, distinct, first_places
from simulator.cluster import Cluster
from simulator.engine.ample_links import AmpleLoads, ample_links, ample_loads
from simulator.engine.binding_links import binding_classes
from simulator.engine.carried import RoutedComms, carriages
from simulator.engine.entries import Entries
from simulator.engine.folding import Folding, RankNumbering, fold
from simulator.engine.group_comms import AlikeComms
from simulator.engine.placement import Placed
from simulator.network.plan import Phase
from simulator.program import PointToPoint, RecordedWork
from simulator.program.seated_groups import SeatedGroups
from simulator.recent import RecentValues

#: What links that lead out of a GPU begin at.
_GPU = re.compile(r"node\d+\.gpu\d+")
#: Most programs whose folded traffic a cluster keeps, and most ranks of all together. In six layouts of GPT-3 175B it
#: takes 73 to 215 bytes for each of 1,024 ranks, and 36 to 60 for each of 8,192. What the cluster keeps anyway is not
#: counted.
MOST_FOLDED = 256
MOST_RANKS = 500_000

#: By job, the groups of every axis.
JobGroups = Sequence[dict[str, SeatedGroups]]


@dataclass(frozen=True)
class SimulatedLink:
    """A link that stands for ``count`` equal ones, of which it is the first in the cluster, with number ``index``.

    ``leaves_gpu``: it is the first hop of what a GPU sends.
    """

    name: str
    kind: str
    count: int
    capacity_Bps: float
    leaves_gpu: bool
    index: int


class PhaseLinks(NamedTuple):
    """The simulated links of a phase that stands for a whole class.

    Bytes are counted at the busiest NIC, in place of the real phase's reference flow. ``at_nic``: bytes over that NIC
    per byte of the reference flow.
    ``limiting``: links that can hold the phase up, with their load. ``at_once``: of each of them, how many of the class
    cross a link of its kind. ``carrying``: all links with what they carry per byte over the NIC; ``ample``: those that
    limit nobody, per byte of the reference flow. ``idle_Bps``: rate over the NIC that links allow on an idle network.
    """

    at_nic: float = 1.0
    limiting: tuple[tuple[int, float], ...] = ()
    at_once: Mapping[int, float] = {}
    carrying: tuple[tuple[int, float], ...] = ()
    ample: tuple[tuple[int, float], ...] = ()
    idle_Bps: float = math.inf

    def phase(self, real: Phase) -> Phase:
        """Return the phase that stands for a whole class, of which ``real`` is one."""
        cap_Bps = min(real.cap_Bps * self.at_nic, self.idle_Bps)
        return Phase(real.nbytes * self.at_nic, self.limiting, real.latency_s, cap_Bps)


@dataclass(frozen=True, eq=False)
class FoldedClass:
    """A class of communications.

    Its first one is in ``row`` of the alike ones of entry ``routed``; of background traffic that is -1, and ``row`` the
    number of the flow. ``members``: simulated ranks that call it. ``group``: class of its groups. ``phases``: links of
    each phase. ``met_on``: see `simulator.engine.representatives.PlannedComm`.
    """

    routed: int
    row: int
    members: tuple[int, ...]
    group: int
    phases: tuple[PhaseLinks, ...]
    met_on: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class JobRanks:
    """The ranks of a job; fields as in `simulator.engine.representatives.Representatives`."""

    multiplicity: dict[int, int]
    simulated_as: tuple[int, ...]
    group_key: dict[str, dict[int, int]]


@dataclass(frozen=True, eq=False)
class FoldedTraffic:
    """The simulated part of a cluster for any bytes: links, the ranks of each job, classes of communications."""

    links: tuple[SimulatedLink, ...]
    ranks: tuple[JobRanks, ...]
    classes: tuple[FoldedClass, ...]


def folded_traffic(
    jobs: Sequence[Placed], cluster: Cluster, capacity: Floats, groups: JobGroups, routed: Sequence[RoutedComms]
) -> FoldedTraffic:
    """Return the folded traffic of ``routed`` communications of ``jobs``, which the cluster may have kept.

    ``capacity``: bytes/s of each link. ``groups``: of all ranks of each job.
    """
    kept: RecentValues[FoldedTraffic] = cluster.memo.setdefault("folded traffic", RecentValues(MOST_RANKS))
    weight = max(sum(placed.program.n_ranks for placed in jobs), MOST_RANKS // MOST_FOLDED)
    key = _key(jobs, cluster, capacity, groups, routed)
    return kept.get(key, weight, lambda: fold_anew(jobs, cluster, capacity, groups, routed))


def _key(
    jobs: Sequence[Placed], cluster: Cluster, capacity: Floats, groups: JobGroups, routed: Sequence[RoutedComms]
) -> object:
    """Return all that folded traffic follows from: kinds of ranks, groups, capacities, and who loads which links.

    Of bytes it counts alone which communications have equal labels. The cluster keeps routes and classes of seats, so
    that these are told by their identity.
    """
    arrays: list[Ints | Floats] = [capacity]
    shapes: list[object] = []
    for placed, by_axis in zip(jobs, groups, strict=True):
        arrays.append(placed.kind_numbers(cluster))
        for axis, one in by_axis.items():
            arrays += [one.size, one.members]
            shapes.append((axis, len(one.size), len(one.members)))
        shapes.append(placed.program.n_ranks)
    labels: dict[object, int] = {}
    last: AlikeComms | None = None
    for item in routed:
        alike = item.alike
        if alike is not last:
            arrays += [alike.groups, alike.number]
            ends = alike.spec[1:3] if isinstance(alike.comm, PointToPoint) else ()
            shapes.append((alike.job, alike.axis, alike.op, ends, len(alike.groups)))
            last = alike
        label = labels.setdefault(item.label, len(labels))
        shapes.append((item.seats, item.route, item.loads_links, label))
    digest = hashlib.blake2b()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest(), tuple(shapes)


def fold_anew(
    jobs: Sequence[Placed],
    cluster: Cluster,
    capacity: Floats,
    groups: JobGroups,
    routed: Sequence[RoutedComms],
    *,
    folded: bool = True,
) -> FoldedTraffic:
    """Work out what `folded_traffic` returns.

    With ``folded`` false every rank and every link that carries something is simulated.
    """
    numbering = RankNumbering.from_jobs(jobs)
    carried = carriages(cluster, routed, numbering.first_group, numbering.n_groups)
    ample = ample_links(cluster, capacity) if folded else np.zeros(len(capacity), dtype=bool)
    entries = Entries.from_carriages(carried)
    folding = fold(jobs, cluster, capacity, groups, carried, entries, numbering, ample, refine=folded)
    binds = binding_classes(cluster, capacity, entries, folding, ample)
    loads = ample_loads(carried, folding, ample)
    return _Folder(cluster, capacity, groups, routed, folding, binds, ample, loads).traffic()


class _Folder:
    """Folds one communication per class, with the load of all of the class on one link per class."""

    def __init__(
        self,
        cluster: Cluster,
        capacity: Floats,
        groups: JobGroups,
        routed: Sequence[RoutedComms],
        folding: Folding,
        binds: Sequence[bool],
        ample: Bools,
        ample_loads: AmpleLoads,
    ) -> None:
        self._cluster = cluster
        self._capacity = capacity
        self._groups = groups
        self._routed = routed
        self._folding = folding
        self._link_class = np.full(len(cluster.links), -1, dtype=np.int64)
        self._link_class[folding.loaded] = folding.links.class_of
        self._binds = np.array(binds, dtype=bool)
        self._ample, self._ample_loads = ample, ample_loads
        self._simulated_links: dict[int, int] = {}  # class of links -> number of its simulated link
        self._simulated_as = [_simulated_as(folding, job) for job in range(len(groups))]

    def traffic(self) -> FoldedTraffic:
        """Fold every class of communications, and put together what is simulated."""
        entry, place = _by_number(self._routed)
        comms = self._folding.comms
        classes = []
        for number, (index, size) in enumerate(zip(comms.first.tolist(), comms.size.tolist(), strict=True)):
            if index < len(entry):
                classes.append(self._class(number, int(entry[index]), int(place[index]), size))
            else:
                classes.append(self._background(index - len(entry), size))
        classes = _with_meetings(classes, self._routed, len(self._simulated_links))
        return FoldedTraffic(self._links(), tuple(map(self._ranks, range(len(self._groups)))), tuple(classes))

    def _links(self) -> tuple[SimulatedLink, ...]:
        links: list[SimulatedLink] = []
        link_classes = self._folding.links
        for link_class in self._simulated_links:
            link = self._cluster.links[int(self._folding.loaded[link_classes.first[link_class]])]
            capacity_Bps, count = float(self._capacity[link.index]), int(link_classes.size[link_class])
            leaves_gpu = _GPU.fullmatch(link.src) is not None
            links.append(SimulatedLink(link.name, link.kind, count, capacity_Bps, leaves_gpu, link.index))
        return tuple(links)

    def _background(self, flow: int, size: int) -> FoldedClass:
        """Fold a flow of background traffic, one of ``size`` alike."""
        return FoldedClass(-1, flow, (), -1, (self._phase(self._cluster.background[flow].loads, size),))

    def _class(self, number: int, entry: int, place: int, size: int) -> FoldedClass:
        """Fold class ``number``, of the ``size`` communications alike to the one at ``place`` of a routed entry."""
        routed = self._routed[entry]
        alike, row = routed.alike, int(routed.rows[place])
        pattern = routed.pattern(place)
        loads = [leg.loads if routed.loads_links else () for leg in pattern.legs] if pattern else []
        if isinstance(alike.comm, RecordedWork):
            loads = [()]
        phases = [self._phase(one, size) for one in loads]
        for leg, one in enumerate(phases):
            ample = self._ample_loads.get((number, leg), ())
            links = tuple([(self._simulated_link(link_class), load) for link_class, load in ample])
            phases[leg] = one._replace(ample=links)
        first = self._folding.numbering.first_group[alike.job][alike.axis]
        members = distinct(self._simulated_as[alike.job][alike.ranks[row]])
        group = int(self._folding.groups.class_of[first + alike.groups[row]])
        return FoldedClass(entry, row, tuple(members.tolist()), group, tuple(phases))

    def _phase(self, loads: Sequence[tuple[int, float]], size: int) -> PhaseLinks:
        """Return the links of a phase that stands for ``size`` alike, of which one has ``loads``."""
        real = Phase(1.0, loads, 0.0).by_nic(self._cluster.is_port)
        links, load = real.columns
        may_limit = ~self._ample[links]
        links, load = links[may_limit], load[may_limit]
        class_of, size_of_class = self._link_class[links], self._folding.links.size
        classes, first, place = _classes_there(class_of, len(size_of_class))
        # All of the class move together. One link carries the sum over them, divided by the number of links in its
        # class; the links have equal parts by equitability.
        each = size / size_of_class[classes]
        at_once = np.bincount(place, minlength=len(classes)) * each
        total = np.bincount(place, load, len(classes)) * each
        binds = self._binds[classes]
        limiting = binds[place]
        idle_Bps = float((self._capacity[links[limiting]] / load[limiting]).min(initial=math.inf))
        order = np.argsort(first)
        numbers = [self._simulated_link(one) for one in classes[order].tolist()]
        carrying = tuple(zip(numbers, total[order].tolist(), strict=True))
        binding = binds[order].tolist()
        return PhaseLinks(
            real.nbytes,
            limiting=tuple(itertools.compress(carrying, binding)),
            at_once=dict(itertools.compress(zip(numbers, at_once[order].tolist(), strict=True), binding)),
            carrying=carrying,
            idle_Bps=idle_Bps,
        )

    def _simulated_link(self, link_class: int) -> int:
        """Return the number of the simulated link of a class."""
        return self._simulated_links.setdefault(link_class, len(self._simulated_links))

    def _ranks(self, job: int) -> JobRanks:
        simulated_as = self._simulated_as[job]
        first, groups = self._folding.numbering.first_group[job], self._folding.groups.class_of
        simulated, multiplicity = np.unique(simulated_as, return_counts=True)
        group_key: dict[str, dict[int, int]] = {}
        for axis, axis_groups in self._groups[job].items():
            ranks = simulated[axis_groups.group_of[simulated] >= 0]
            classes = groups[first[axis] + axis_groups.group_of[ranks]]
            group_key[axis] = dict(zip(ranks.tolist(), classes.tolist(), strict=True))
        counts = dict(zip(simulated.tolist(), multiplicity.tolist(), strict=True))
        return JobRanks(counts, tuple(simulated_as.tolist()), group_key)


def _by_number(routed: Sequence[RoutedComms]) -> tuple[Ints, Ints]:
    """Return, by the number of a communication, its routed entry and its place there."""
    entry, place = np.empty((2, sum(len(one.rows) for one in routed)), dtype=np.int64)
    for which, one in enumerate(routed):
        numbers = one.alike.number[one.rows]
        entry[numbers], place[numbers] = which, np.arange(len(numbers))
    return entry, place


def _classes_there(class_of: Ints, n_classes: int) -> tuple[Ints, Ints, Ints]:
    """Return the classes that are there in order, the first element of each, and each element's place among them."""
    first = first_places(class_of, n_classes)
    classes = np.flatnonzero(first >= 0)
    place = np.zeros(n_classes, dtype=np.int64)
    place[classes] = np.arange(len(classes))
    return classes, first[classes], place[class_of]


def _simulated_as(folding: Folding, job: int) -> Ints:
    """Return the simulated rank of every rank of a job."""
    first_rank, ranks = (*folding.numbering.first_rank, folding.numbering.n_ranks), folding.ranks
    simulated_as: Ints = ranks.first[ranks.class_of[first_rank[job] : first_rank[job + 1]]] - first_rank[job]
    return simulated_as


def _with_meetings(classes: Sequence[FoldedClass], routed: Sequence[RoutedComms], n_links: int) -> list[FoldedClass]:
    """Add ``met_on`` to ``classes``. It is one for all that one rank calls over the same links."""
    crossing: list[list[FoldedClass]] = [[] for _ in range(n_links)]
    links_of = [tuple(dict.fromkeys(link for phase in one.phases for link, _ in phase.limiting)) for one in classes]
    for one, links in zip(classes, links_of, strict=True):
        for link in links:
            crossing[link].append(one)
    met_on: dict[tuple[object, ...], tuple[str, ...]] = {}
    with_meetings: list[FoldedClass] = []
    for one, links in zip(classes, links_of, strict=True):
        if len(one.members) == 1:
            alike = routed[one.routed].alike
            key = alike.job, alike.axis, one.members, links
            if key not in met_on:
                met_on[key] = _met_on(one, routed, [other for link in links for other in crossing[link]])
            one = replace(one, met_on=met_on[key])
        with_meetings.append(one)
    return with_meetings


def _met_on(one: FoldedClass, routed: Sequence[RoutedComms], crossing: Sequence[FoldedClass]) -> tuple[str, ...]:
    """Return the axes of all that crosses the links of ``one``, of its only member; none where others cross them."""
    called, member = routed[one.routed].alike, one.members[0]
    axes = {called.axis: None}
    for other in crossing:
        alike = None if other.routed < 0 else routed[other.routed].alike
        if alike is None or alike.job != called.job or member not in other.members:
            return ()
        axes[alike.axis] = None
    return tuple(axes)
