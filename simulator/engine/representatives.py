"""Representatives: the ranks, links and communications that are simulated, each for all that are alike (`folding`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from simulator.cluster import Cluster
from simulator.costs.hosts import THREAD_Bps
from simulator.engine.carried import RoutedComms, routed_comms
from simulator.engine.folded_traffic import (
    FoldedClass,
    FoldedTraffic,
    PhaseLinks,
    SimulatedLink,
    fold_anew,
    folded_traffic,
)
from simulator.engine.group_comms import GroupComm, alike_comms, is_signal, op_of, spec_of, threads_of, updates
from simulator.engine.link_facts import link_capacities
from simulator.engine.placement import Placed
from simulator.network.collectives import plan_of
from simulator.network.plan import Phase, Plan
from simulator.program import Comm, RecordedWork


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
    and every link that carries something is simulated, and traffic is worked out anew. Routes and classes of seats are
    those that the cluster keeps, as ever.
    """
    groups = [{axis: placed.program.seated(axis) for axis in placed.program.groups} for placed in jobs]
    capacity = link_capacities(jobs, cluster)
    routed = routed_comms(jobs, cluster, alike_comms(jobs, cluster, groups))
    if folded:
        traffic = folded_traffic(jobs, cluster, capacity, groups, routed)
    else:
        traffic = fold_anew(jobs, cluster, capacity, groups, routed, folded=False)
    return _Planner(jobs, cluster, routed, traffic).simulated_cluster()


class _Planner:
    """Plans one communication per class, with its bytes on the links that it loads."""

    def __init__(
        self, jobs: Sequence[Placed], cluster: Cluster, routed: Sequence[RoutedComms], traffic: FoldedTraffic
    ) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._routed = routed
        self._traffic = traffic
        self._sources: dict[int, TrafficSource] = {}

    def simulated_cluster(self) -> SimulatedCluster:
        """Plan every class of communications, and put together what is simulated."""
        background: list[Phase] = []
        planned: list[dict[tuple[str, int, tuple[object, ...]], PlannedComm]] = [{} for _ in self._jobs]
        for one in self._traffic.classes:
            if one.routed < 0:
                background.append(self._background(one))
            else:
                item = self._routed[one.routed].alike.one(one.row)
                planned[item.job][item.axis, one.group, item.spec] = self._planned(one, item)
        ranks = zip(self._traffic.ranks, planned, strict=True)
        return SimulatedCluster(
            links=self._traffic.links,
            representatives=tuple(
                Representatives(job.multiplicity, job.simulated_as, job.group_key, plans) for job, plans in ranks
            ),
            background=tuple(background),
            sources=self._sources,
        )

    def _background(self, folded: FoldedClass) -> Phase:
        flow = self._cluster.background[folded.row]
        return self._phase(
            folded.phases[0], Phase(math.inf, flow.loads, 0.0, flow.rate_Bps), -1, flow.name, "background"
        )

    def _planned(self, folded: FoldedClass, item: GroupComm) -> PlannedComm:
        """Return how a class is performed, of which ``item`` is the first communication."""
        op, route = op_of(item.comm), self._routed[folded.routed].route
        if isinstance(item.comm, RecordedWork):
            plan = Plan("recorded", (Phase(0.0, (), item.comm.seconds),))
        else:
            costs = item.costs(self._jobs, self._cluster)
            plan = plan_of(op, None if route is None else route.pattern, item.comm.nbytes, costs)
        if threads := threads_of(item.comm):
            plan = plan.at_most(threads * THREAD_Bps)
        phases: list[Phase] = []
        link_bytes: dict[int, float] = {}
        for links, real in zip(folded.phases, plan.phases, strict=True):
            phase = self._phase(links, real, item.job, item.axis, op)
            phases.append(phase)
            for loads, nbytes in ((links.carrying, phase.nbytes), (links.ample, real.nbytes)):
                for link, load in loads:
                    link_bytes[link] = link_bytes.get(link, 0.0) + load * nbytes
        sends_nothing = updates(item.comm) or is_signal(item.comm)
        senders = 1 if op == "send" else len(item.ranks)
        return PlannedComm(
            plan=replace(plan, phases=tuple(phases)),
            link_bytes=tuple(link_bytes.items()),
            members=folded.members,
            wire_bytes=0.0 if sends_nothing else plan.sent_bytes / senders,
            met_on=folded.met_on,
        )

    def _phase(self, links: PhaseLinks, real: Phase, job: int, axis: str, op: str) -> Phase:
        phase = links.phase(real)
        self._sources[id(phase)] = TrafficSource(job, axis, op, links.at_once)
        return phase
