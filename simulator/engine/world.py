"""What has to be simulated: which ranks may stand for which, and what their transfers load.

Folding computes an equitable partition by colour refinement (Weisfeiler and Leman; see Berkholz, Bonsma and Grohe,
arXiv 1509.08251): ranks of a colour play one role on equal GPUs and sit in groups of equal colours; groups of a colour
have members of equal colours and make equal transfers; links of a colour are equal and carry equal transfers. By
induction over instants everything of a colour is then in the same state at all times (progressive filling fills links
of a colour together), so one rank per colour is simulated, and one link per colour with the load of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.network import hosts
from simulator.network.collectives import choose, fastest, patterns
from simulator.network.direct import Traffic
from simulator.network.pattern import Pattern
from simulator.network.plan import Phase, Plan
from simulator.program import Comm, Program
from simulator.program.ops import HOST_LANES, POINT_TO_POINT, UPDATES, comms_of

Colours = NDArray[np.uint64]
#: A gradient norm, or whether one was infinite: one number of fp32.
SIGNAL_BYTES = 4.0


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
class World:
    """The simulated part of a program on a cluster.

    ``like[rank]``: how many real ranks the simulated rank stands for; ``simulated_as[real rank]`` is that rank.
    ``capacity_Bps``, ``link_names``, ``link_kinds``, ``link_counts``, ``leaves_gpu``: per simulated link.
    ``group_key[axis][rank]``: what names a simulated rank's group on an axis.
    """

    like: dict[int, int]
    simulated_as: tuple[int, ...]
    capacity_Bps: list[float]
    link_names: list[str]
    link_kinds: list[str]
    link_counts: list[int]
    leaves_gpu: list[bool]
    group_key: dict[str, dict[int, int]]
    transfers: dict[tuple[str, int, tuple[object, ...]], Transfer]

    def transfer(self, comm: Comm, rank: int, position: int) -> Transfer:
        """What ``comm``, called by simulated ``rank`` at ``position`` of its group, sets in motion."""
        return self.transfers[comm.axis, self.group_key[comm.axis][rank], spec_of(comm, position)]


def spec_of(comm: Comm, position: int) -> tuple[object, ...]:
    """What two calls must have in common to be one kind of transfer; ``position`` is the caller's, in its group."""
    if comm.op == "send":
        return ("send", position, comm.peer, comm.nbytes)
    if comm.op == "recv":
        return ("send", comm.peer, position, comm.nbytes)
    return (comm.op, comm.algorithm, comm.nbytes, traffic_of(comm))


def traffic_of(comm: Comm) -> Traffic:
    """How the bytes of an all-to-all are spread."""
    return Traffic(comm.send_shares, comm.receive_shares, comm.per_node)


@dataclass(frozen=True)
class _Session:
    """One transfer of one real group: the unit of colouring. ``ranks`` are those who call it: its two ends, or all
    members of the group; ``ends`` the end points on the cluster between which bytes move."""

    axis: str
    group: int
    spec: tuple[object, ...]
    comm: Comm
    ranks: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def is_signal(self) -> bool:
        """Whether it is a collective of one number, which is all latency and takes no share of any link. NICs that a
        tree loads differently are then still alike, and so are the ranks behind them."""
        return self.op != "send_recv" and self.comm.nbytes <= SIGNAL_BYTES

    @property
    def op(self) -> str:
        return "send_recv" if self.comm.op in POINT_TO_POINT else self.comm.op

    def patterns(self, cluster: Cluster) -> tuple[Pattern, ...]:
        return patterns(self.op, self.ends, cluster, self.comm.algorithm, traffic_of(self.comm))


@dataclass(frozen=True)
class _Colours:
    """A colour per rank, group, link and session; equal ones are simulated once."""

    rank: Colours
    group: Colours
    link: Colours
    session: Colours


def build_world(program: Program, cluster: Cluster, costs: Costs, *, fold: bool = True) -> World:
    """Work out the simulated ranks, links and transfers of ``program`` on ``cluster``.

    With ``fold`` false every rank and every link that carries something is simulated.
    """
    sessions = _sessions(program, cluster)
    offset, n_groups = _group_offsets(program)
    capacity = np.array([link.bandwidth_Bps * costs.link_efficiency(link.kind) for link in cluster.links])
    shapes = _shapes(cluster, costs, sessions)
    if fold:
        colours = _refine(program, cluster, capacity, sessions, shapes, offset)
    else:
        sizes = (program.n_ranks, n_groups, len(cluster.links), len(sessions))
        colours = _Colours(*(np.arange(size, dtype=np.uint64) for size in sizes))
    return _collect(program, cluster, costs, capacity, sessions, shapes, offset, colours)


def _group_offsets(program: Program) -> tuple[dict[str, int], int]:
    """Groups of all axes numbered in one row: where each axis starts, and how many there are."""
    offset, total = {}, 0
    for axis, groups in program.groups.items():
        offset[axis] = total
        total += len(groups)
    return offset, total


def _sessions(program: Program, cluster: Cluster) -> list[_Session]:
    """Every distinct transfer of every real group, in a fixed order."""
    comms_of_role: list[dict[Comm, None]] = []
    for role in program.roles:
        ops = {id(step.op): step.op for _, _, step in role.steps()}
        comms_of_role.append(dict.fromkeys(_anonymous(comm) for op in ops.values() for comm in comms_of(op)))
    sessions: dict[tuple[str, int, tuple[object, ...]], _Session] = {}
    for rank, role_index in enumerate(program.role_of):
        for comm in comms_of_role[role_index]:
            group = program.group_index(comm.axis, rank)
            members = program.groups[comm.axis][group]
            paired = comm.op in POINT_TO_POINT
            position = members.index(rank) if paired else -1
            spec = spec_of(comm, position)
            if (comm.axis, group, spec) not in sessions:
                ranks: tuple[int, ...] = members
                if paired:
                    pair = (position, comm.peer) if comm.op == "send" else (comm.peer, position)
                    ranks = tuple(members[end] for end in pair)
                on_host = comm.op in HOST_LANES
                ends = hosts.ends(comm.op, cluster, ranks[0], program.servers) if on_host else ranks
                sessions[comm.axis, group, spec] = _Session(comm.axis, group, spec, comm, ranks, ends)
    return list(sessions.values())


def _anonymous(comm: Comm) -> Comm:
    """Without name and tag, which do not matter to the network."""
    return replace(comm, name="", purpose="", tag="")


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


def _refine(
    program: Program,
    cluster: Cluster,
    capacity: NDArray[np.float64],
    sessions: Sequence[_Session],
    shapes: _Shapes,
    offset: dict[str, int],
) -> _Colours:
    """The coarsest equitable colouring of ranks, groups, links and sessions."""
    n_groups = sum(len(groups) for groups in program.groups.values())
    pairs = [
        (rank, offset[axis] + index, position)
        for axis, groups in program.groups.items()
        for index, group in enumerate(groups)
        for position, rank in enumerate(group)
    ]
    members = np.array(pairs, dtype=np.int64).reshape(-1, 3)
    rank_of, group_of, position = members[:, 0], members[:, 1], members[:, 2].astype(np.uint64)
    # Where somebody names a peer by its position, positions differ; elsewhere members are alike.
    named = np.zeros(n_groups, dtype=bool)
    for axis in {session.axis: None for session in sessions if session.op == "send_recv"}:
        named[offset[axis] : offset[axis] + len(program.groups[axis])] = True
    position = np.where(named[group_of], position, np.uint64(0))

    gpus = cluster.gpus[: program.n_ranks]
    gpu_names = {gpu.name for gpu in cluster.gpus}
    rank = _label((role, gpu.type, gpu.speed_scale) for role, gpu in zip(program.role_of, gpus, strict=True))
    group = _label((axis, len(members)) for axis, groups in program.groups.items() for members in groups)
    link = _label(
        (item.kind, float(rate), item.latency_s, item.src in gpu_names)
        for item, rate in zip(cluster.links, capacity, strict=True)
    )
    at_session, at_link = shapes.session, shapes.link
    load = _mix(np.round(shapes.load, 12).view(np.uint64), shapes.phase.astype(np.uint64))
    session = _label(shapes.label)
    group_of_session = np.array([offset[item.axis] + item.group for item in sessions], dtype=np.int64)

    count = -1
    while count != (count := sum(len(np.unique(colours)) for colours in (rank, group, link, session))):
        crossed = _gather(at_session, len(sessions), _mix(link[at_link], load))
        session = _mix(session, group[group_of_session], crossed)
        link = _mix(link, _gather(at_link, len(cluster.links), _mix(session[at_session], load)))
        inside = _gather(group_of, n_groups, _mix(rank[rank_of], position))
        group = _mix(group, inside, _gather(group_of_session, n_groups, session))
        rank = _mix(rank, _gather(rank_of, program.n_ranks, _mix(group[group_of], position)))
    return _Colours(rank, group, link, session)


@dataclass(frozen=True)
class _Shapes:
    """What tells sessions apart before refinement: a ``label`` each, and which links they load: entry i says that
    session ``session[i]`` in its phase ``phase[i]`` puts ``load[i]`` on ``link[i]``. Entries of a phase stand together,
    as do those of a session."""

    label: list[object]
    session: NDArray[np.int64]
    phase: NDArray[np.int64]
    link: NDArray[np.int64]
    load: NDArray[np.float64]


def _shapes(cluster: Cluster, costs: Costs, sessions: Sequence[_Session]) -> _Shapes:
    """A transfer between two ranks follows from its route, so that its links' colours say all."""
    labels: list[object] = []
    at_session: list[int] = []
    at_phase: list[int] = []
    at_link: list[int] = []
    loads: list[float] = []
    chosen: dict[object, int] = {}
    for index, item in enumerate(sessions):
        if item.op == "send_recv":
            labels.append((item.axis, item.spec))
            on = [(0, link, 1.0) for link in cluster.route(*item.ends)]
        else:
            candidates = item.patterns(cluster)
            timings = tuple(pattern.timing for pattern in candidates)
            key = (item.op, item.comm.nbytes, timings)
            if key not in chosen:
                choice = choose(item.op, candidates, item.comm.nbytes, costs) if candidates else None
                chosen[key] = next((i for i, pattern in enumerate(candidates) if pattern is choice), -1)
            number = chosen[key]
            labels.append((item.axis, item.spec, timings[number] if candidates else ()))
            stages = candidates[number].stages if candidates and not item.is_signal else ()
            on = [(phase, link, load) for phase, stage in enumerate(stages) for link, load in stage.loads]
        at_phase += [phase for phase, _, _ in on]
        at_link += [link for _, link, _ in on]
        loads += [load for _, _, load in on]
        at_session += [index] * len(on)
    session, phase, link = (np.array(of, dtype=np.int64) for of in (at_session, at_phase, at_link))
    return _Shapes(labels, session, phase, link, np.array(loads))


@dataclass(frozen=True)
class _Classes:
    """Elements by colour: the ``first`` of each class in order of appearance, each element's class, class sizes."""

    first: NDArray[np.int64]
    of: NDArray[np.int64]
    size: NDArray[np.int64]

    @classmethod
    def by(cls, colours: Colours) -> _Classes:
        _, first, inverse, counts = np.unique(colours, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(first, kind="stable")
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        return cls(first[order], number[inverse], counts[order])


def _collect(
    program: Program,
    cluster: Cluster,
    costs: Costs,
    capacity: NDArray[np.float64],
    sessions: Sequence[_Session],
    shapes: _Shapes,
    offset: dict[str, int],
    colours: _Colours,
) -> World:
    """Plan one session per class, with the load of all sessions of the class on one link per class."""
    ranks, groups = _Classes.by(colours.rank), _Classes.by(colours.group)
    links, kinds = _Classes.by(colours.link), _Classes.by(colours.session)
    simulated_as = ranks.first[ranks.of].tolist()
    link_class, link_size, class_size = links.of.tolist(), links.size.tolist(), kinds.size.tolist()
    binds = _binding(cluster, capacity, shapes, links)
    gpu_names = {gpu.name for gpu in cluster.gpus}
    used: dict[int, int] = {}  # link class -> simulated link

    drafts: list[tuple[_Session, Transfer]] = []
    for number, index in enumerate(kinds.first.tolist()):
        session = sessions[index]
        paired = session.op == "send_recv"
        silent = session.op in UPDATES or session.is_signal
        plan = fastest(session.op, session.patterns(cluster), session.comm.nbytes, costs)
        phases: list[Phase] = []
        link_bytes: dict[int, float] = {}
        for phase in plan.phases:
            loads: dict[int, float] = {}
            for link, load in () if session.is_signal else phase.loads:
                simulated = used.setdefault(link_class[link], len(used))
                # All sessions of the class move together: what one link carries is the sum over them, divided by the
                # number of links in its class, equal for all of them by equitability.
                share = load * class_size[number] / link_size[link_class[link]]
                link_bytes[simulated] = link_bytes.get(simulated, 0.0) + share * phase.nbytes
                if binds[link_class[link]]:
                    loads[simulated] = loads.get(simulated, 0.0) + share
            phases.append(Phase(phase.nbytes, tuple(loads.items()), phase.latency_s, phase.cap_Bps))
        transfer = Transfer(
            plan=replace(plan, phases=tuple(phases)),
            link_bytes=tuple(link_bytes.items()),
            members=tuple(sorted({simulated_as[rank] for rank in session.ranks})),
            wire_bytes=0.0 if silent else plan.sent_bytes / (1 if paired else len(session.ranks)),
            met_on=(),
        )
        drafts.append((session, transfer))

    group_key: dict[str, dict[int, int]] = {
        axis: {
            rank: int(groups.of[offset[axis] + index])
            for index, group in enumerate(of_axis)
            for rank in group
            if simulated_as[rank] == rank
        }
        for axis, of_axis in program.groups.items()
    }
    transfers = {
        (session.axis, int(groups.of[offset[session.axis] + session.group]), session.spec): transfer
        for session, transfer in _with_meetings(drafts, len(used))
    }
    first_link = [int(links.first[of_class]) for of_class in used]
    return World(
        like=dict(zip(ranks.first.tolist(), ranks.size.tolist(), strict=True)),
        simulated_as=tuple(simulated_as),
        capacity_Bps=[float(capacity[link]) for link in first_link],
        link_names=[cluster.links[link].name for link in first_link],
        link_kinds=[cluster.links[link].kind for link in first_link],
        link_counts=[link_size[of_class] for of_class in used],
        leaves_gpu=[cluster.links[link].src in gpu_names for link in first_link],
        group_key=group_key,
        transfers=transfers,
    )


def _with_meetings(drafts: Sequence[tuple[_Session, Transfer]], n_links: int) -> Iterator[tuple[_Session, Transfer]]:
    """Add ``met_on`` to transfers."""
    crossing: list[list[int]] = [[] for _ in range(n_links)]
    links_of = [list(dict.fromkeys(link for p in t.plan.phases for link, _ in p.loads)) for _, t in drafts]
    for number, links in enumerate(links_of):
        for link in links:
            crossing[link].append(number)
    for (session, transfer), links in zip(drafts, links_of, strict=True):
        met = dict.fromkeys(other for link in links for other in crossing[link])
        member = transfer.members[0]
        if len(transfer.members) == 1 and all(member in drafts[other][1].members for other in met):
            axes = dict.fromkeys([session.axis, *(drafts[other][0].axis for other in met)])
            transfer = replace(transfer, met_on=tuple(axes))
        yield session, transfer


def _binding(cluster: Cluster, capacity: NDArray[np.float64], shapes: _Shapes, classes: _Classes) -> list[bool]:
    """Per class of links, whether one can ever be what limits a transfer.

    It cannot where other links do so before it: where everything that crosses it has come in over (or goes on over)
    links that together carry no more than it can, such as the uplinks of a leaf switch without oversubscription. The
    links that it is judged by must bind themselves. Links of a class have alike neighbours, so its first one decides.
    """
    # Only the transfers that cross a class's first link are looked at.
    first = np.unique(shapes.session[np.isin(shapes.link, classes.first)])
    seen = np.isin(shapes.session, first)
    some = _Shapes([], shapes.session[seen], shapes.phase[seen], shapes.link[seen], shapes.load[seen])
    ends = [(link.src, link.dst) for link in cluster.links]
    before = _neighbours(some, came_over=[src for src, _ in ends], leads_to=[dst for _, dst in ends])
    after = _neighbours(some, came_over=[dst for _, dst in ends], leads_to=[src for src, _ in ends])
    rate, of_class = capacity.tolist(), classes.of.tolist()
    binds = [True] * len(classes.first)
    for link in sorted(set(classes.first.tolist()) & set(before), key=lambda link: (-rate[link], link)):
        for others in (before[link], after[link]):
            kept = others and all(binds[of_class[other]] and of_class[other] != of_class[link] for other in others)
            if kept and sum(rate[other] for other in others) <= rate[link] * (1 + 1e-12):
                binds[of_class[link]] = False
    return binds


def _neighbours(shapes: _Shapes, came_over: Sequence[str], leads_to: Sequence[str]) -> dict[int, list[int]]:
    """Per link, the links of its own phases that touch its vertex ``came_over[link]`` from the other side (their
    ``leads_to`` is it); none where a phase loads the link more than all of those: it begins or ends there."""
    found: dict[int, dict[int, None]] = {}
    begins: set[int] = set()
    links, loads = shapes.link.tolist(), shapes.load.tolist()
    begun = (np.diff(shapes.session, prepend=-1) != 0) | (np.diff(shapes.phase, prepend=-1) != 0)
    starts = [*np.flatnonzero(begun).tolist(), len(links)]
    for low, high in itertools.pairwise(starts):
        at: dict[str, list[int]] = {}
        for entry in range(low, high):
            at.setdefault(leads_to[links[entry]], []).append(entry)
        for entry in range(low, high):
            near = at.get(came_over[links[entry]], [])
            found.setdefault(links[entry], {}).update((links[other], None) for other in near)
            if sum(loads[other] for other in near) < loads[entry] * (1 - 1e-12):
                begins.add(links[entry])
    return {link: [] if link in begins else list(near) for link, near in found.items()}
