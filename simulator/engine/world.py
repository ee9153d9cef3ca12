"""What has to be simulated: which ranks may stand for which, and what their transfers load.

Folding computes an equitable partition by colour refinement (Weisfeiler and Leman; see Berkholz, Bonsma and Grohe,
arXiv 1509.08251): ranks of a colour play one role on equal GPUs and sit in groups of equal colours; groups of a colour have
members of equal colours and make equal transfers; links of a colour are equal and carry equal transfers. By induction over
instants everything of a colour is then in the same state at all times (progressive filling fills links of a colour together), so one
rank per colour is simulated, and one link per colour with the load of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.network.collectives import plan as plan_collective
from simulator.network.plan import Phase, Plan
from simulator.program import Comm, Program
from simulator.program.ops import POINT_TO_POINT, comms_of

Colours = NDArray[np.uint64]


@dataclass(frozen=True)
class Transfer:
    """One operation as its group performs it in the simulated world.

    ``plan`` loads simulated links; ``members`` are the simulated ranks that must arrive; ``wire_bytes`` is what a GPU of
    the group sends, mean over the group. ``met_on``: where all members are one simulated rank, which also takes part in
    every other transfer that crosses these links, the axes of all of them; else empty. If that rank calls them all from one lane,
    no two are ever in flight together, and nothing can delay this one.
    """

    plan: Plan
    members: tuple[int, ...]
    wire_bytes: float
    met_on: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """The simulated part of a program on a cluster.

    ``like[rank]``: how many real ranks the simulated rank stands for; ``simulated_as[real rank]`` is that rank. ``capacity_Bps``, ``link_names``, ``link_kinds``,
    ``link_counts``, ``leaves_gpu``: per simulated link. ``group_key[axis][rank]``: what names a simulated rank's group on an axis.
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
    return (comm.op, comm.algorithm, comm.nbytes)


@dataclass(frozen=True)
class _Session:
    """One transfer of one real group: the unit of colouring."""

    axis: str
    group: int
    spec: tuple[object, ...]
    plan: Plan


def build_world(program: Program, cluster: Cluster, costs: Costs, *, fold: bool = True) -> World:
    """Work out the simulated ranks, links and transfers of ``program`` on ``cluster``.

    With ``fold`` false every rank and every link that carries something is simulated.
    """
    sessions = _sessions(program, cluster, costs)
    capacity = np.array([link.bandwidth_Bps * costs.link_efficiency(link.kind) for link in cluster.links])
    offset, n_groups = _group_offsets(program)
    incidence = _Incidence.of(sessions, offset, len(cluster.links))
    if fold:
        rank_colour, group_colour, link_colour, session_colour = _refine(program, cluster, capacity, sessions, incidence)
    else:
        rank_colour = np.arange(program.n_ranks, dtype=np.uint64)
        group_colour = np.arange(n_groups, dtype=np.uint64)
        link_colour = np.arange(len(cluster.links), dtype=np.uint64)
        session_colour = np.arange(len(sessions), dtype=np.uint64)
    return _collect(
        program, cluster, capacity, sessions, incidence, offset, rank_colour, group_colour, link_colour, session_colour
    )


def _group_offsets(program: Program) -> tuple[dict[str, int], int]:
    """Groups of all axes numbered in one row: where each axis starts, and how many there are."""
    offset, total = {}, 0
    for axis, groups in program.groups.items():
        offset[axis] = total
        total += len(groups)
    return offset, total


def _sessions(program: Program, cluster: Cluster, costs: Costs) -> list[_Session]:
    """Every distinct transfer of every real group, in a fixed order."""
    comms_of_role: list[dict[Comm, None]] = []
    for role in program.roles:
        found: dict[Comm, None] = {}
        seen: set[int] = set()
        for _, _, step in role.steps():
            if id(step.op) in seen:
                continue
            seen.add(id(step.op))
            found.update(dict.fromkeys(_anonymous(comm) for comm in comms_of(step.op)))
        comms_of_role.append(found)
    sessions: dict[tuple[str, int, tuple[object, ...]], _Session] = {}
    for rank, role_index in enumerate(program.role_of):
        for comm in comms_of_role[role_index]:
            group = program.group_index(comm.axis, rank)
            members = program.groups[comm.axis][group]
            position = members.index(rank) if comm.op in POINT_TO_POINT else -1
            spec = spec_of(comm, position)
            key = (comm.axis, group, spec)
            if key in sessions:
                continue
            if comm.op in POINT_TO_POINT:
                ends = (members[position], members[comm.peer])
                op, ranks = "send_recv", ends if comm.op == "send" else ends[::-1]
            else:
                op, ranks = comm.op, members
            plan = plan_collective(op, comm.nbytes, ranks, cluster, costs, comm.algorithm)
            sessions[key] = _Session(comm.axis, group, spec, plan)
    return list(sessions.values())


def _anonymous(comm: Comm) -> Comm:
    """Without name and tag, which do not matter to the network."""
    return Comm("", comm.op, comm.nbytes, comm.axis, "", comm.algorithm, comm.peer)


@dataclass(frozen=True)
class _Incidence:
    """Sessions against links, as arrays: entry i says that session ``session[i]`` in its phase ``phase[i]`` puts
    ``load[i]`` on ``link[i]``. ``group`` is the group of each session, numbered over all axes."""

    session: NDArray[np.int64]
    phase: NDArray[np.int64]
    link: NDArray[np.int64]
    load: NDArray[np.float64]
    group: NDArray[np.int64]

    @classmethod
    def of(cls, sessions: Sequence[_Session], offset: dict[str, int], n_links: int) -> _Incidence:
        session, phase, link, load = [], [], [], []
        for index, item in enumerate(sessions):
            for number, part in enumerate(item.plan.phases):
                session.append(np.full(len(part.loads), index, dtype=np.int64))
                phase.append(np.full(len(part.loads), number, dtype=np.int64))
                pairs = np.array(part.loads, dtype=np.float64).reshape(-1, 2)
                link.append(pairs[:, 0].astype(np.int64))
                load.append(pairs[:, 1])
        empty_i, empty_f = np.zeros(0, dtype=np.int64), np.zeros(0)
        return cls(
            np.concatenate(session) if session else empty_i,
            np.concatenate(phase) if phase else empty_i,
            np.concatenate(link) if link else empty_i,
            np.concatenate(load) if load else empty_f,
            np.array([offset[item.axis] + item.group for item in sessions], dtype=np.int64),
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


def _rounded(seconds: float) -> float:
    """Without the last digits, which depend on the order of a sum over hops."""
    return float(f"{seconds:.12e}")


def _label(values: Sequence[object]) -> Colours:
    """Equal values get equal colours, numbered by first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.uint64)


def _refine(
    program: Program,
    cluster: Cluster,
    capacity: NDArray[np.float64],
    sessions: Sequence[_Session],
    incidence: _Incidence,
) -> tuple[Colours, Colours, Colours, Colours]:
    """The coarsest equitable colouring of ranks, groups, links and sessions."""
    offset, n_groups = _group_offsets(program)
    pairs = [
        (rank, offset[axis] + index, position)
        for axis, groups in program.groups.items()
        for index, group in enumerate(groups)
        for position, rank in enumerate(group)
    ]
    members = np.array(pairs, dtype=np.int64).reshape(-1, 3)
    rank_of, group_of, position = members[:, 0], members[:, 1], members[:, 2].astype(np.uint64)
    # Where somebody names a peer by its position, positions differ; elsewhere members are alike.
    by_position = {session.axis for session in sessions if session.spec[0] == "send"}
    named = np.zeros(n_groups, dtype=bool)
    for axis in by_position:
        named[offset[axis] : offset[axis] + len(program.groups[axis])] = True
    position = np.where(named[group_of], position, np.uint64(0))

    gpus = cluster.gpus[: program.n_ranks]
    rank = _label([(role, gpu.type, gpu.speed_scale) for role, gpu in zip(program.role_of, gpus, strict=True)])
    group = _label([(axis, len(members)) for axis, groups in program.groups.items() for members in groups])
    gpu_names = {gpu.name for gpu in cluster.gpus}
    link = _label(
        [(item.kind, float(rate), item.src in gpu_names) for item, rate in zip(cluster.links, capacity, strict=True)]
    )
    session = _label(
        [
            (item.axis, item.spec, tuple((p.nbytes, _rounded(p.latency_s), p.cap_Bps) for p in item.plan.phases))
            for item in sessions
        ]
    )
    load = _mix(np.round(incidence.load, 12).view(np.uint64), incidence.phase.astype(np.uint64))

    count = -1
    while count != (count := sum(len(np.unique(colours)) for colours in (rank, group, link, session))):
        crossed = _gather(incidence.session, len(sessions), _mix(link[incidence.link], load))
        session = _mix(session, group[incidence.group], crossed)
        carried = _gather(incidence.link, len(cluster.links), _mix(session[incidence.session], load))
        link = _mix(link, carried)
        inside = _gather(group_of, n_groups, _mix(rank[rank_of], position))
        made = _gather(incidence.group, n_groups, session)
        group = _mix(group, inside, made)
        rank = _mix(rank, _gather(rank_of, program.n_ranks, _mix(group[group_of], position)))
    return rank, group, link, session


def _first_of(colours: Colours) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per colour in order of first appearance: the first index; per element: its colour's number; and class sizes."""
    _, first, inverse, counts = np.unique(colours, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return first[order], number[inverse], counts[order]


def _collect(
    program: Program,
    cluster: Cluster,
    capacity: NDArray[np.float64],
    sessions: Sequence[_Session],
    incidence: _Incidence,
    offset: dict[str, int],
    rank_colour: Colours,
    group_colour: Colours,
    link_colour: Colours,
    session_colour: Colours,
) -> World:
    first_rank, rank_class, rank_count = _first_of(rank_colour)
    representative = first_rank[rank_class]
    used = np.unique(incidence.link)
    first_link, link_class_of_used, link_count = _first_of(link_colour[used])
    link_class = np.full(len(cluster.links), -1)
    link_class[used] = link_class_of_used
    first_link = used[first_link] if len(used) else first_link
    first_group, group_class, _ = _first_of(group_colour)
    first_session, session_class, _ = _first_of(session_colour)

    # All sessions of a class advance together: what one link of a class carries is the sum over them, divided by
    # the number of links in the class, equal for all of them by equitability.
    n_links, n_phases = len(first_link), max((len(s.plan.phases) for s in sessions), default=1)
    cell = (session_class[incidence.session] * n_phases + incidence.phase) * n_links + link_class[incidence.link]
    cells, position = np.unique(cell, return_inverse=True)
    load = np.bincount(position, weights=incidence.load, minlength=len(cells)) / link_count[cells % max(n_links, 1)]
    loads: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for where, value in zip(cells.tolist(), load.tolist(), strict=True):
        session_phase, link = divmod(where, n_links)
        loads.setdefault(divmod(session_phase, n_phases), []).append((link, value))

    gpu_names = {gpu.name for gpu in cluster.gpus}
    leaves_gpu = [link.src in gpu_names for link in cluster.links]
    members_of: dict[int, tuple[int, ...]] = {}
    group_key: dict[str, dict[int, int]] = {axis: {} for axis in program.groups}
    for axis, groups in program.groups.items():
        for index, group in enumerate(groups):
            key = int(group_class[offset[axis] + index])
            for rank in group:
                if representative[rank] == rank:
                    group_key[axis][rank] = key
            if key not in members_of:
                members_of[key] = tuple(sorted({int(representative[rank]) for rank in group}))

    plans, members_of_session, wire_bytes = [], [], []
    for number, index in enumerate(first_session.tolist()):
        session = sessions[index]
        group = program.groups[session.axis][session.group]
        plans.append(
            Plan(
                session.plan.algorithm,
                tuple(
                    Phase(p.nbytes, tuple(loads.get((number, i), ())), p.latency_s, p.cap_Bps)
                    for i, p in enumerate(session.plan.phases)
                ),
            )
        )
        sent = sum(
            load * phase.nbytes for phase in session.plan.phases for link, load in phase.loads if leaves_gpu[link]
        )
        if session.spec[0] == "send":
            ends = [group[position] for position in session.spec[1:3]]  # type: ignore[index]
            members_of_session.append(tuple(sorted({int(representative[rank]) for rank in ends})))
            wire_bytes.append(sent)
        else:
            members_of_session.append(members_of[int(group_class[offset[session.axis] + session.group])])
            wire_bytes.append(sent / len(group))

    crossing: list[list[int]] = [[] for _ in range(n_links)]
    for number, plan in enumerate(plans):
        for link in dict.fromkeys(link for phase in plan.phases for link, _ in phase.loads):
            crossing[link].append(number)
    transfers: dict[tuple[str, int, tuple[object, ...]], Transfer] = {}
    for number, index in enumerate(first_session.tolist()):
        session, members = sessions[index], members_of_session[number]
        met = dict.fromkeys(
            other for phase in plans[number].phases for link, _ in phase.loads for other in crossing[link]
        )
        alone = len(members) == 1 and all(members[0] in members_of_session[other] for other in met)
        axes = dict.fromkeys(sessions[first_session[other]].axis for other in met)
        key = (session.axis, int(group_class[offset[session.axis] + session.group]), session.spec)
        transfers[key] = Transfer(plans[number], members, wire_bytes[number], tuple(axes) if alone else ())
    return World(
        like={int(rank): int(count) for rank, count in zip(first_rank, rank_count, strict=True)},
        simulated_as=tuple(representative.tolist()),
        capacity_Bps=[float(capacity[link]) for link in first_link],
        link_names=[cluster.links[link].name for link in first_link],
        link_kinds=[cluster.links[link].kind for link in first_link],
        link_counts=[int(count) for count in link_count],
        leaves_gpu=[leaves_gpu[link] for link in first_link],
        group_key=group_key,
        transfers=transfers,
    )
