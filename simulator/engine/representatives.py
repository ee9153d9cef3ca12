"""Representatives: the ranks, links and communications that are simulated, each for all that are alike (`folding`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.arrays import Bools, Floats, Ints, distinct, first_places
from simulator.cluster import Cluster
from simulator.costs.hosts import THREAD_Bps
from simulator.engine.ample_links import AmpleLoads, ample_links, ample_loads
from simulator.engine.binding_links import binding_classes
from simulator.engine.carried import RoutedComms, carriages, routed_comms
from simulator.engine.folding import Folding, RankNumbering, fold
from simulator.engine.group_comms import (
    GroupComm,
    alike_comms,
    is_signal,
    op_of,
    spec_of,
    threads_of,
    updates,
)
from simulator.engine.link_facts import link_capacities
from simulator.engine.placement import Placed
from simulator.network.collectives import plan_of
from simulator.network.pattern import Pattern
from simulator.network.plan import Phase, Plan
from simulator.program import Comm, RecordedWork
from simulator.program.seated_groups import SeatedGroups

#: What links that lead out of a GPU begin at.
_GPU = re.compile(r"node\d+\.gpu\d+")


@dataclass(frozen=True)
class PlannedComm:
    """One operation as its group performs it on the simulated cluster.

    ``plan`` loads the simulated links that can hold it up; ``link_bytes`` is what it carries over all of them.
    ``members`` are the simulated ranks that must call it. ``wire_bytes`` is what a GPU of the group sends, mean over
    the group. ``met_on`` are the axes of all communications that cross its links, where this one has a single member
    that takes part in all of them. If that rank calls them all from one lane, no two are ever in flight together, and
    nothing can delay this one. Elsewhere ``met_on`` is empty.
    """

    plan: Plan
    link_bytes: tuple[tuple[int, float], ...]
    members: tuple[int, ...]
    wire_bytes: float
    met_on: tuple[str, ...]


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


@dataclass(frozen=True)
class TrafficSource:
    """The source of a simulated phase: program ``job``, ``axis``, and operation.

    For background traffic ``job`` is -1, and ``axis`` the name of the flow. ``at_once``: simulated link -> how many of
    the communications that the phase stands for cross each link of that kind.
    """

    job: int
    axis: str
    op: str
    at_once: Mapping[int, float]


@dataclass(frozen=True)
class Representatives:
    """The simulated ranks of one program.

    ``multiplicity[rank]``: how many real ranks a simulated rank stands for; ``simulated_as[real rank]`` is that rank.
    ``group_key[axis][rank]``: what names a simulated rank's group on an axis.
    """

    multiplicity: dict[int, int]
    simulated_as: tuple[int, ...]
    group_key: dict[str, dict[int, int]]
    planned: dict[tuple[str, int, tuple[object, ...]], PlannedComm]

    def plan_of(self, comm: Comm, rank: int, position: int) -> PlannedComm:
        """Return how ``comm`` is performed, called by simulated ``rank`` at ``position`` of its group."""
        return self.planned[comm.axis, self.group_key[comm.axis][rank], spec_of(comm, position)]


@dataclass(frozen=True)
class SimulatedCluster:
    """The simulated part of a cluster and of the programs on it.

    Programs share ``links``; ``representatives`` are those of each program. ``background`` are the phases of background
    traffic, ``sources`` those of every phase, by its id.
    """

    links: tuple[SimulatedLink, ...]
    representatives: tuple[Representatives, ...]
    background: tuple[Phase, ...]
    sources: dict[int, TrafficSource]


def fold_cluster(jobs: Sequence[Placed], cluster: Cluster, *, folded: bool = True) -> SimulatedCluster:
    """Work out which ranks, links and communications of ``jobs`` on ``cluster`` are simulated.

    The efficiency of links is that of the first job's costs, for the GPUs of all jobs. With ``folded`` false every rank
    and every link that carries something is simulated.
    """
    groups = [{axis: placed.program.seated(axis) for axis in placed.program.groups} for placed in jobs]
    numbering, capacity = RankNumbering.from_jobs(jobs), link_capacities(jobs, cluster)
    routed = routed_comms(jobs, cluster, alike_comms(jobs, cluster, groups))
    carried = carriages(cluster, routed, numbering.first_group, numbering.n_groups)
    ample = ample_links(cluster, capacity) if folded else np.zeros(len(capacity), dtype=bool)
    folding = fold(jobs, cluster, capacity, groups, carried, numbering, ample, refine=folded)
    binds = binding_classes(cluster, capacity, carried, folding, ample)
    loads = ample_loads(carried, folding, ample)
    return _Planner(jobs, cluster, capacity, groups, routed, folding, binds, ample, loads).simulated_cluster()


@dataclass(frozen=True)
class _ClassPlan:
    """All phases of a class of communications (of background traffic: None), and how its group performs it."""

    group_comm: GroupComm | None
    phases: tuple[Phase, ...]
    planned: PlannedComm | None

    @property
    def links(self) -> list[int]:
        """The links of its phases, each once."""
        return list(dict.fromkeys(link for phase in self.phases for link, _ in phase.loads))

    def involves(self, job: int, rank: int) -> bool:
        """Tell whether simulated ``rank`` of ``job`` takes part."""
        group_comm, planned = self.group_comm, self.planned
        return bool(group_comm and planned and group_comm.job == job and rank in planned.members)


class _RoutedByNumber:
    """Routed communications by their numbers."""

    def __init__(self, routed: Sequence[RoutedComms]) -> None:
        self._routed = routed
        self._which, self._place = np.empty((2, sum(len(one.rows) for one in routed)), dtype=np.int64)
        for which, one in enumerate(routed):
            numbers = one.alike.number[one.rows]
            self._which[numbers], self._place[numbers] = which, np.arange(len(numbers))

    def __len__(self) -> int:
        return len(self._place)

    def one(self, number: int) -> tuple[GroupComm, Pattern | None]:
        """Return a communication, and its pattern."""
        routed, place = self._routed[self._which[number]], int(self._place[number])
        return routed.alike.one(int(routed.rows[place])), routed.pattern(place)


class _Planner:
    """Plans one communication per class, with the load of all of the class on one link per class."""

    def __init__(
        self,
        jobs: Sequence[Placed],
        cluster: Cluster,
        capacity: Floats,
        groups: Sequence[Mapping[str, SeatedGroups]],
        routed: Sequence[RoutedComms],
        folding: Folding,
        binds: Sequence[bool],
        ample: Bools,
        ample_loads: AmpleLoads,
    ) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._capacity = capacity
        self._groups = groups
        self._routed = _RoutedByNumber(routed)
        self._folding = folding
        self._link_class = np.full(len(cluster.links), -1, dtype=np.int64)
        self._link_class[folding.loaded] = folding.links.class_of
        self._binds = np.array(binds, dtype=bool)
        self._ample, self._ample_loads = ample, ample_loads
        self._simulated_links: dict[int, int] = {}  # class of links -> number of its simulated link
        self._sources: dict[int, TrafficSource] = {}
        self._simulated_as = [_simulated_as(folding, job, placed.program.n_ranks) for job, placed in enumerate(jobs)]

    def simulated_cluster(self) -> SimulatedCluster:
        """Plan every class of communications, and put together what is simulated."""
        classes, link_classes = self._folding.comms, self._folding.links
        pairs = zip(classes.first.tolist(), classes.size.tolist(), strict=True)
        planned = [self._plan(number, index, size) for number, (index, size) in enumerate(pairs)]
        plans = _with_meetings(planned, len(self._simulated_links))
        links: list[SimulatedLink] = []
        for link_class in self._simulated_links:
            link = self._cluster.links[int(self._folding.loaded[link_classes.first[link_class]])]
            capacity_Bps, count = float(self._capacity[link.index]), int(link_classes.size[link_class])
            leaves_gpu = _GPU.fullmatch(link.src) is not None
            links.append(SimulatedLink(link.name, link.kind, count, capacity_Bps, leaves_gpu, link.index))
        return SimulatedCluster(
            links=tuple(links),
            representatives=tuple(self._representatives(job, plans) for job in range(len(self._jobs))),
            background=tuple(phase for plan in plans if plan.group_comm is None for phase in plan.phases),
            sources=self._sources,
        )

    def _plan(self, number: int, index: int, size: int) -> _ClassPlan:
        """Plan communication ``index``, one of the ``size`` of class ``number``."""
        link_bytes: dict[int, float] = {}
        if index >= len(self._routed):
            flow = self._cluster.background[index - len(self._routed)]
            real = Phase(math.inf, flow.loads, 0.0, flow.rate_Bps)
            return _ClassPlan(None, (self._phase(real, size, (-1, flow.name, "background"), {}),), None)
        item, pattern = self._routed.one(index)
        op = op_of(item.comm)
        costs = item.costs(self._jobs, self._cluster)
        if isinstance(item.comm, RecordedWork):
            plan = Plan("recorded", (Phase(0.0, (), item.comm.seconds),))
        else:
            plan = plan_of(op, pattern, item.comm.nbytes, costs)
        if threads := threads_of(item.comm):
            plan = plan.at_most(threads * THREAD_Bps)
        real_phases = [replace(phase, loads=()) for phase in plan.phases] if is_signal(item.comm) else plan.phases
        source = item.job, item.axis, op
        phases = tuple([self._phase(phase, size, source, link_bytes) for phase in real_phases])
        for place, phase in enumerate(real_phases):
            for link_class, load in self._ample_loads.get((number, place), ()):
                link = self._simulated_link(link_class)
                link_bytes[link] = link_bytes.get(link, 0.0) + load * phase.nbytes
        sends_nothing = updates(item.comm) or is_signal(item.comm)
        senders = 1 if op == "send" else len(item.ranks)
        simulated_as = self._simulated_as[item.job]
        planned = PlannedComm(
            plan=replace(plan, phases=phases),
            link_bytes=tuple(link_bytes.items()),
            members=tuple(distinct(simulated_as[item.ranks]).tolist()),
            wire_bytes=0.0 if sends_nothing else plan.sent_bytes / senders,
            met_on=(),
        )
        return _ClassPlan(item, phases, planned)

    def _phase(self, real: Phase, size: int, source: tuple[int, str, str], link_bytes: dict[int, float]) -> Phase:
        """Return a phase that stands for ``size`` alike, of which ``real`` is one; its cap is that on an idle network.

        What it carries over links that may limit it is added to ``link_bytes``.
        """
        real = real.by_nic(self._cluster.is_port)
        links, load = real.columns
        may_limit = ~self._ample[links]
        links, load = links[may_limit], load[may_limit]
        class_of, size_of_class = self._link_class[links], self._folding.links.size
        classes, first, place = _numbered(class_of, len(size_of_class))
        # All of the class move together. One link carries the sum over them, divided by the number of links in its
        # class; the links have equal parts by equitability.
        each = size / size_of_class[classes]
        at_once = np.bincount(place, minlength=len(classes)) * each
        total = np.bincount(place, load, len(classes)) * each
        binds = self._binds[classes]
        limiting = binds[place]
        idle_Bps = min(real.cap_Bps, float((self._capacity[links[limiting]] / load[limiting]).min(initial=math.inf)))
        simulated = []
        for at in np.argsort(first).tolist():
            link = self._simulated_link(int(classes[at]))
            link_bytes[link] = link_bytes.get(link, 0.0) + float(total[at]) * real.nbytes
            if binds[at]:
                simulated.append((link, float(total[at]), float(at_once[at])))
        phase = Phase(real.nbytes, tuple([one[:2] for one in simulated]), real.latency_s, idle_Bps)
        self._sources[id(phase)] = TrafficSource(*source, {link: count for link, _, count in simulated})
        return phase

    def _simulated_link(self, link_class: int) -> int:
        """Return the number of the simulated link of a class."""
        return self._simulated_links.setdefault(link_class, len(self._simulated_links))

    def _representatives(self, job: int, plans: Sequence[_ClassPlan]) -> Representatives:
        simulated_as = self._simulated_as[job]
        first, groups = self._folding.numbering.first_group[job], self._folding.groups.class_of
        simulated, multiplicity = np.unique(simulated_as, return_counts=True)
        group_key: dict[str, dict[int, int]] = {}
        for axis, axis_groups in self._groups[job].items():
            ranks = simulated[axis_groups.group_of[simulated] >= 0]
            classes = groups[first[axis] + axis_groups.group_of[ranks]]
            group_key[axis] = dict(zip(ranks.tolist(), classes.tolist(), strict=True))
        planned = {
            (item.axis, int(groups[first[item.axis] + item.group]), item.spec): plan.planned
            for plan in plans
            if (item := plan.group_comm) is not None and item.job == job and plan.planned is not None
        }
        counts = dict(zip(simulated.tolist(), multiplicity.tolist(), strict=True))
        return Representatives(counts, tuple(simulated_as.tolist()), group_key, planned)


def _numbered(class_of: Ints, n_classes: int) -> tuple[Ints, Ints, Ints]:
    """Return the classes that are there in order, the first element of each, and each element's place among them."""
    first = first_places(class_of, n_classes)
    classes = np.flatnonzero(first >= 0)
    place = np.zeros(n_classes, dtype=np.int64)
    place[classes] = np.arange(len(classes))
    return classes, first[classes], place[class_of]


def _simulated_as(folding: Folding, job: int, n_ranks: int) -> Ints:
    first, ranks = folding.numbering.first_rank[job], folding.ranks
    simulated_as: Ints = ranks.first[ranks.class_of[first : first + n_ranks]] - first
    return simulated_as


def _with_meetings(plans: Sequence[_ClassPlan], n_links: int) -> list[_ClassPlan]:
    """Add ``met_on`` to the communications of ``plans``. It is one for all that one rank calls over the same links."""
    crossing: list[list[_ClassPlan]] = [[] for _ in range(n_links)]
    for plan in plans:
        for link in plan.links:
            crossing[link].append(plan)
    met_on: dict[tuple[object, ...], tuple[str, ...]] = {}
    with_meetings: list[_ClassPlan] = []
    for plan in plans:
        item, planned = plan.group_comm, plan.planned
        if item is not None and planned is not None and len(planned.members) == 1:
            key = item.job, item.axis, planned.members, tuple(plan.links)
            if key not in met_on:
                met_on[key] = _met_on(item, planned.members[0], [crossing[link] for link in plan.links])
            plan = replace(plan, planned=replace(planned, met_on=met_on[key]))
        with_meetings.append(plan)
    return with_meetings


def _met_on(item: GroupComm, member: int, crossing: Sequence[Sequence[_ClassPlan]]) -> tuple[str, ...]:
    """Return the axes of all that crosses the links of ``item``, of ``member`` alone; none where others cross them."""
    neighbours = [plan for plans in crossing for plan in plans]
    if not all(plan.involves(item.job, member) for plan in neighbours):
        return ()
    return tuple(dict.fromkeys([item.axis, *[plan.group_comm.axis for plan in neighbours if plan.group_comm]]))
