"""What has to be simulated of some programs on one cluster: ranks, links and transfers, each kind once (`folding`)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from simulator.cluster import Cluster
from simulator.engine.folding import Classes, Folding, fold, link_labels
from simulator.engine.group_transfers import Session, Shapes, sessions_of, shapes_of, spec_of
from simulator.engine.placement import Placed
from simulator.network.collectives import fastest
from simulator.network.plan import Phase, Plan
from simulator.program import Comm


@dataclass(frozen=True)
class Transfer:
    """One operation as its group performs it in the simulated world.

    ``plan`` loads the simulated links that can hold it up; ``link_bytes`` is what it carries over all of them.
    ``members`` are the simulated ranks that must arrive; ``wire_bytes`` is what a GPU of the group sends, mean over the
    group. ``met_on``: where all members are one simulated rank, which also takes part in every other transfer that
    crosses these links, the axes of all of them; else empty. If that rank calls them all from one lane, no two are ever
    in flight together, and nothing can delay this one.
    """

    plan: Plan
    link_bytes: tuple[tuple[int, float], ...]
    members: tuple[int, ...]
    wire_bytes: float
    met_on: tuple[str, ...]


@dataclass(frozen=True)
class SimulatedLink:
    """A link that stands for ``count`` equal ones. ``leaves_gpu``: it is the first hop of what a GPU sends."""

    name: str
    kind: str
    count: int
    capacity_Bps: float
    leaves_gpu: bool


@dataclass(frozen=True)
class Stream:
    """Whose a simulated phase is: of which program (-1: background traffic), on which axis (of background traffic:
    between which ends), what it does. ``at_once``: simulated link -> how many of the transfers that the phase stands
    for cross each link of that kind."""

    job: int
    axis: str
    op: str
    at_once: Mapping[int, float]


@dataclass(frozen=True)
class Cast:
    """Those of one program that are simulated.

    ``like[rank]``: how many real ranks the simulated rank stands for; ``simulated_as[real rank]`` is that rank.
    ``group_key[axis][rank]``: what names a simulated rank's group on an axis.
    """

    like: dict[int, int]
    simulated_as: tuple[int, ...]
    group_key: dict[str, dict[int, int]]
    transfers: dict[tuple[str, int, tuple[object, ...]], Transfer]

    def transfer(self, comm: Comm, rank: int, position: int) -> Transfer:
        """What ``comm``, called by simulated ``rank`` at ``position`` of its group, sets in motion."""
        return self.transfers[comm.axis, self.group_key[comm.axis][rank], spec_of(comm, position)]


@dataclass(frozen=True)
class World:
    """The simulated part of programs on one cluster: the ``links`` that they share, those who play each program, the
    phases of ``background`` traffic, and of each phase, by its id, the stream."""

    links: tuple[SimulatedLink, ...]
    casts: tuple[Cast, ...]
    background: tuple[Phase, ...]
    streams: dict[int, Stream]


def build_world(jobs: Sequence[Placed], cluster: Cluster, *, folded: bool = True) -> World:
    """Work out the simulated ranks, links and transfers of ``jobs`` on ``cluster``, whose links are as good as the
    costs of the first say, which hold for the GPUs of all of them.

    With ``folded`` false every rank and every link that carries something is simulated.
    """
    sessions = sessions_of(jobs, cluster)
    capacity = np.array(list(_capacities(jobs, cluster)))
    shapes = shapes_of(jobs, cluster, sessions)
    folding = fold(jobs, cluster, capacity, sessions, shapes, refine=folded)
    return _Collector(jobs, cluster, capacity, sessions, shapes, folding).world()


def _capacities(jobs: Sequence[Placed], cluster: Cluster) -> Iterator[float]:
    """Bytes/s that every link can carry: in a node as its type of GPU has it, between switches, and in nodes of types
    that have no rank, as all have it."""
    costs, used = jobs[0].costs, {cluster.gpus[gpu].type for placed in jobs for gpu in placed.gpus}
    of = {gpu: costs.of(gpu) for gpu in used}
    of_nodes = [of.get(layout.gpu, costs) for layout in cluster.layouts for _ in layout.edges]
    of_links = itertools.chain(of_nodes, itertools.repeat(costs, len(cluster.trunks)))
    for link, own in zip(cluster.links, of_links, strict=True):
        yield link.bandwidth_Bps * own.link_efficiency(link.kind)


@dataclass(frozen=True)
class _Draft:
    """A transfer of a class of sessions (None: background traffic), and all phases of it."""

    session: Session | None
    phases: tuple[Phase, ...]
    transfer: Transfer | None


class _Collector:
    """Plans one session per class, with the load of all sessions of the class on one link per class."""

    def __init__(
        self,
        jobs: Sequence[Placed],
        cluster: Cluster,
        capacity: NDArray[np.float64],
        sessions: Sequence[Session],
        shapes: Shapes,
        folding: Folding,
    ) -> None:
        self.jobs = jobs
        self.cluster = cluster
        self.capacity: list[float] = capacity.tolist()
        self.sessions = sessions
        self.folding = folding
        self.link_class: list[int] = folding.links.of.tolist()
        self.link_size: list[int] = folding.links.size.tolist()
        self.binds = _binding(cluster, capacity, shapes, folding.links)
        self.used: dict[int, int] = {}  # link class -> simulated link
        self.streams: dict[int, Stream] = {}
        self.simulated_as = [_simulated_as(folding, job, placed.program.n_ranks) for job, placed in enumerate(jobs)]

    def world(self) -> World:
        classes = self.folding.sessions
        pairs = zip(classes.first.tolist(), classes.size.tolist(), strict=True)
        planned = [self._draft(index, size) for index, size in pairs]
        drafts = _with_meetings(planned, len(self.used))
        gpu_names = {gpu.name for gpu in self.cluster.gpus}
        simulated = [(int(self.folding.links.first[of_class]), self.link_size[of_class]) for of_class in self.used]
        links = tuple(
            SimulatedLink(link.name, link.kind, count, self.capacity[link.index], link.src in gpu_names)
            for link, count in ((self.cluster.links[index], count) for index, count in simulated)
        )
        return World(
            links=links,
            casts=tuple(self._cast(job, drafts) for job in range(len(self.jobs))),
            background=tuple(phase for draft in drafts if draft.session is None for phase in draft.phases),
            streams=self.streams,
        )

    def _draft(self, index: int, size: int) -> _Draft:
        """What session ``index``, one of ``size`` alike, does in the simulated world."""
        link_bytes: dict[int, float] = {}
        if index >= len(self.sessions):
            flow = self.cluster.background[index - len(self.sessions)]
            real = Phase(math.inf, flow.loads, 0.0, flow.rate_Bps)
            return _Draft(None, (self._phase(real, size, (-1, flow.name, "background"), {}),), None)
        session = self.sessions[index]
        paired = session.op == "send"
        silent = session.updates or session.is_signal
        costs = session.costs(self.jobs, self.cluster)
        plan = fastest(session.op, session.patterns(self.cluster), session.comm.nbytes, costs)
        phases = tuple(
            self._phase(
                replace(phase, loads=()) if session.is_signal else phase,
                size,
                (session.job, session.axis, session.op),
                link_bytes,
            )
            for phase in plan.phases
        )
        simulated_as = self.simulated_as[session.job]
        transfer = Transfer(
            plan=replace(plan, phases=phases),
            link_bytes=tuple(link_bytes.items()),
            members=tuple(sorted({simulated_as[rank] for rank in session.ranks})),
            wire_bytes=0.0 if silent else plan.sent_bytes / (1 if paired else len(session.ranks)),
            met_on=(),
        )
        return _Draft(session, phases, transfer)

    def _phase(self, real: Phase, size: int, of: tuple[int, str, str], link_bytes: dict[int, float]) -> Phase:
        """A phase that stands for ``size`` of which ``real`` is one; adds what it carries to ``link_bytes``. Its cap is
        what one reaches where nothing else moves."""
        real = real.by_nic(self.cluster.ports)
        loads: dict[int, float] = {}
        at_once: dict[int, float] = {}
        idle_Bps = real.cap_Bps
        for link, load in real.loads:
            of_class = self.link_class[link]
            simulated = self.used.setdefault(of_class, len(self.used))
            # All sessions of the class move together: what one link carries is the sum over them, divided by the number
            # of links in its class, equal for all of them by equitability.
            each = size / self.link_size[of_class]
            link_bytes[simulated] = link_bytes.get(simulated, 0.0) + load * each * real.nbytes
            if self.binds[of_class]:
                loads[simulated] = loads.get(simulated, 0.0) + load * each
                at_once[simulated] = at_once.get(simulated, 0.0) + each
                idle_Bps = min(idle_Bps, self.capacity[link] / load)
        phase = Phase(real.nbytes, tuple(loads.items()), real.latency_s, idle_Bps)
        self.streams[id(phase)] = Stream(*of, at_once)
        return phase

    def _cast(self, job: int, drafts: Sequence[_Draft]) -> Cast:
        program, simulated_as = self.jobs[job].program, self.simulated_as[job]
        first, groups = self.folding.first_group[job], self.folding.groups.of
        group_key: dict[str, dict[int, int]] = {
            axis: {
                rank: int(groups[first[axis] + index])
                for index, group in enumerate(of_axis)
                for rank in group
                if simulated_as[rank] == rank
            }
            for axis, of_axis in program.groups.items()
        }
        transfers = {
            (session.axis, int(groups[first[session.axis] + session.group]), session.spec): draft.transfer
            for draft in drafts
            if (session := draft.session) is not None and session.job == job and draft.transfer is not None
        }
        return Cast(dict(sorted(Counter(simulated_as).items())), simulated_as, group_key, transfers)


def _simulated_as(folding: Folding, job: int, n_ranks: int) -> tuple[int, ...]:
    first = folding.first_rank[job]
    return tuple((folding.ranks.first[folding.ranks.of[first : first + n_ranks]] - first).tolist())


def _with_meetings(drafts: Sequence[_Draft], n_links: int) -> list[_Draft]:
    """Add ``met_on`` to transfers."""
    crossing: list[list[int]] = [[] for _ in range(n_links)]
    links_of = [list(dict.fromkeys(link for phase in draft.phases for link, _ in phase.loads)) for draft in drafts]
    for number, links in enumerate(links_of):
        for link in links:
            crossing[link].append(number)
    found = []
    for draft, links in zip(drafts, links_of, strict=True):
        met = [drafts[other] for other in dict.fromkeys(other for link in links for other in crossing[link])]
        if draft.session and draft.transfer and len(draft.transfer.members) == 1:
            job, member = draft.session.job, draft.transfer.members[0]
            own = [
                x.session.axis
                for x in met
                if x.session and x.transfer and x.session.job == job and member in x.transfer.members
            ]
            if len(own) == len(met):
                axes = dict.fromkeys([draft.session.axis, *own])
                draft = replace(draft, transfer=replace(draft.transfer, met_on=tuple(axes)))
        found.append(draft)
    return found


def _binding(cluster: Cluster, capacity: NDArray[np.float64], shapes: Shapes, classes: Classes) -> list[bool]:
    """Per class of links, whether one can ever be what limits a transfer.

    It cannot where other links do so before it: where everything that crosses it has come in over (or goes on over)
    links that together carry no more than it can, such as the uplinks of a leaf switch without oversubscription. The
    links that it is judged by must bind themselves, and be called otherwise: of two alike that everything crosses, both
    bind, in one class or in two. Links of a class have alike neighbours, so its first one decides.
    """
    label = link_labels(cluster, capacity)
    # Only the transfers that cross a class's first link are looked at.
    seen = np.isin(shapes.session, np.unique(shapes.session[np.isin(shapes.link, classes.first)]))
    some = Shapes([], shapes.session[seen], shapes.phase[seen], shapes.link[seen], shapes.load[seen])
    vertex: dict[str, int] = {}
    src, dst = (
        np.array([vertex.setdefault(name, len(vertex)) for name in names], dtype=np.int64)
        for names in ((link.src for link in cluster.links), (link.dst for link in cluster.links))
    )
    held: dict[int, list[NDArray[np.int64]]] = {}
    is_first = np.zeros(len(capacity), dtype=bool)
    is_first[classes.first] = True
    for came_over, leads_to in ((src, dst), (dst, src)):
        link, other = _neighbours(some, came_over, leads_to)
        room = np.bincount(link, weights=capacity[other], minlength=len(capacity))
        enough = is_first & (room <= capacity * (1 + 1e-12))
        starts = np.flatnonzero(np.diff(link, prepend=-1))
        for low, high in pairwise([*starts.tolist(), len(link)]):
            if enough[at := int(link[low])]:
                held.setdefault(at, []).append(other[low:high])
    binds = np.ones(len(classes.first), dtype=bool)
    for at in sorted(held, key=lambda link: (-capacity[link], label[link], link)):
        for others in held[at]:
            if binds[classes.of[others]].all() and not (label[others] == label[at]).any():
                binds[classes.of[at]] = False
    return cast(list[bool], binds.tolist())


def _neighbours(
    shapes: Shapes, came_over: NDArray[np.int64], leads_to: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of a link and one of its own phases' links that touches its vertex ``came_over[link]`` from the other side
    (its ``leads_to`` is it), sorted; none of a link that a phase loads more than all of those: there it begins or
    ends."""
    links, loads = shapes.link, shapes.load
    n_links, n_vertices = len(came_over), int(max(came_over.max(), leads_to.max())) + 1
    phase = shapes.session * int(shapes.phase.max(initial=0) + 1) + shapes.phase
    comes = phase * n_vertices + leads_to[links]
    order = np.argsort(comes, kind="stable")
    goes = phase * n_vertices + came_over[links]
    low, high = (np.searchsorted(comes[order], goes, side) for side in ("left", "right"))
    count = high - low
    entry = np.repeat(np.arange(len(links)), count)
    near = order[np.arange(len(entry)) - np.repeat(np.cumsum(count) - count - low, count)]
    begins = np.zeros(n_links, dtype=bool)
    begins[links[np.bincount(entry, weights=loads[near], minlength=len(links)) < loads * (1 - 1e-12)]] = True
    pairs = np.unique(links[entry] * n_links + links[near])
    link, other = np.divmod(pairs, n_links)
    return link[~begins[link]], other[~begins[link]]
