"""Every communication of every group of some programs, and the links that it loads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulator.cluster import Cluster
from simulator.cluster.alike import spread_columns
from simulator.cluster.link import Spread
from simulator.costs import Costs
from simulator.engine.placement import Placed
from simulator.network import hosts
from simulator.network.collectives import choose, patterns, seats_alike
from simulator.network.direct import ByteShares
from simulator.network.pattern import Pattern
from simulator.program import AXES, AllToAll, Collective, Comm, HostOperation, PointToPoint, RecordedWork, axis_of

#: A gradient norm, or whether one was infinite: one number of fp32.
SIGNAL_BYTES = 4.0


def spec_of(comm: Comm, position: int) -> tuple[object, ...]:
    """Return what calls of one kind of communication have in common.

    ``position`` is the caller's in its group.
    """
    if isinstance(comm, PointToPoint):
        return ("send", *ends_of(comm, position), comm.nbytes)
    if isinstance(comm, RecordedWork):
        return (comm.op, comm.seconds)
    return (comm.op, algorithm_of(comm), comm.nbytes, shares_of(comm), threads_of(comm))


def ends_of(comm: PointToPoint, position: int) -> tuple[int, int]:
    """Return the positions of sender and receiver, where ``position`` is the caller's."""
    return (position, comm.peer) if comm.sends else (comm.peer, position)


def algorithm_of(comm: Comm) -> str:
    """Return the algorithm that is asked of a collective; all else has one only."""
    return comm.algorithm if isinstance(comm, Collective) else "auto"


def threads_of(comm: Comm) -> int:
    """Return the threads that an update on the host is limited to; 0 is no limit."""
    return comm.threads if isinstance(comm, HostOperation) else 0


def shares_of(comm: Comm) -> ByteShares:
    """Return how the bytes of an all-to-all are spread."""
    return (
        ByteShares(comm.send_shares, comm.receive_shares, comm.per_node) if isinstance(comm, AllToAll) else ByteShares()
    )


@dataclass(frozen=True)
class GroupComm:
    """One communication of one real group of program ``job``: the unit of colouring.

    ``ranks`` are those that call it: its two ends, or all members of the group. ``ends`` are the end points on the
    cluster between which bytes move.
    """

    job: int
    axis: str
    group: int
    spec: tuple[object, ...]
    comm: Comm
    ranks: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def is_signal(self) -> bool:
        """True of a collective of one number, which is all latency and takes no share of any link.

        NICs that a tree loads differently are then still alike, and so are the ranks behind them.
        """
        return self.op != "send" and self.comm.nbytes <= SIGNAL_BYTES

    @property
    def updates(self) -> bool:
        """True where a host computes, and nothing leaves the GPU."""
        return isinstance(self.comm, HostOperation) and self.comm.updates

    @property
    def op(self) -> str:
        return "send" if isinstance(self.comm, PointToPoint) else self.comm.op

    def costs(self, jobs: Sequence[Placed], cluster: Cluster) -> Costs:
        """Return the costs that hold between the GPUs that take part."""
        return jobs[self.job].costs.among(cluster.gpu_types(self.ends))

    def patterns(self, cluster: Cluster, algorithm: str = "") -> tuple[Pattern, ...]:
        """Return the algorithms that could do it, or the one that is named; none where nothing moves."""
        if isinstance(self.comm, RecordedWork):
            return ()
        return patterns(self.op, self.ends, cluster, algorithm or algorithm_of(self.comm), shares_of(self.comm))


def group_comms(jobs: Sequence[Placed], cluster: Cluster) -> list[GroupComm]:
    """Return every distinct communication of every real group, in a fixed order."""
    return [comm for job, placed in enumerate(jobs) for comm in _comms_of_job(job, placed, cluster)]


def _comms_of_job(job: int, placed: Placed, cluster: Cluster) -> list[GroupComm]:
    program, gpus = placed.program, placed.gpus
    numbers: dict[tuple[object, ...], int] = {}
    # Each with what a collective's calls have in common, and the number of that.
    comms_of_role: list[list[tuple[Comm, tuple[object, ...], int]]] = []
    for role in program.roles:
        comms = dict.fromkeys(
            _anonymous(comm) for comm in {_network_key(comm): comm for _, comm in role.comms}.values()
        )
        specs = {comm: spec_of(comm, -1) for comm in comms}
        comms_of_role.append([(comm, spec, numbers.setdefault(spec, len(numbers))) for comm, spec in specs.items()])
    axes_of_role = [list(dict.fromkeys(comm.axis for comm, _, _ in comms)) for comms in comms_of_role]
    transfers_of_role = [[entry for entry in comms if isinstance(entry[0], PointToPoint)] for comms in comms_of_role]
    distinct: dict[tuple[str, int, int], GroupComm] = {}
    complete: set[tuple[int, str, int]] = set()  # role, axis and group of which all collectives are in ``distinct``
    spec_at: dict[tuple[int, int], tuple[tuple[object, ...], int]] = {}  # of a transfer, by number and position
    for rank, role_index in enumerate(program.role_of):
        groups = {axis: program.group_index(axis, rank) for axis in axes_of_role[role_index]}
        missing = {axis for axis, group in groups.items() if (role_index, axis, group) not in complete}
        complete.update([(role_index, axis, groups[axis]) for axis in missing])
        for comm, spec, number in comms_of_role[role_index] if missing else transfers_of_role[role_index]:
            group = groups[comm.axis]
            ranks = members = program.groups[comm.axis][group]
            if isinstance(comm, PointToPoint):
                at = number, members.index(rank)
                if at not in spec_at:
                    spec_here = spec_of(comm, at[1])
                    spec_at[at] = spec_here, numbers.setdefault(spec_here, len(numbers))
                spec, number = spec_at[at]
                ranks = tuple([members[end] for end in ends_of(comm, at[1])])
            if (comm.axis, group, number) not in distinct:
                if isinstance(comm, HostOperation):
                    ends = hosts.ends(comm.op, cluster, gpus[ranks[0]], placed.servers)
                else:
                    ends = tuple([gpus[member] for member in ranks])
                distinct[comm.axis, group, number] = GroupComm(job, comm.axis, group, spec, comm, ranks, ends)
    return list(distinct.values())


def _network_key(comm: Comm) -> Hashable:
    """Return what tells communication apart for the network; only names and tags of transfers are many."""
    if isinstance(comm, PointToPoint):
        return comm.axis, comm.op, comm.nbytes, comm.peer, comm.as_it_comes
    return comm


def _anonymous(comm: Comm) -> Comm:
    """Return ``comm`` without name, purpose and tag, which do not matter to the network."""
    if isinstance(comm, RecordedWork):
        return RecordedWork("", seconds=comm.seconds)
    anonymous = replace(comm, name="", purpose=AXES[axis_of(comm.axis)].purposes[0])
    return replace(anonymous, tag="") if isinstance(anonymous, PointToPoint) else anonymous


@dataclass(frozen=True)
class LinkLoads:
    """Properties of communications before refinement: a ``label`` each, and the links that they load.

    Entry i says that communication ``comm[i]`` in its phase ``phase[i]`` puts ``load[i]`` on ``link[i]``. Entries of a
    phase stand together, as do those of a communication. Background traffic follows them, numbered on.
    """

    label: list[object]
    comm: NDArray[np.int64]
    phase: NDArray[np.int64]
    link: NDArray[np.int64]
    load: NDArray[np.float64]


def chosen_patterns(jobs: Sequence[Placed], cluster: Cluster, comms: Sequence[GroupComm]) -> list[Pattern | None]:
    """Return the pattern of every collective; None for sends, and in groups of one.

    Alike collectives of alike groups follow patterns of one number among those that are possible. Of groups that sit
    alike in nodes of one kind, only the first has all of its patterns worked out, and each other the chosen one.
    """
    numbers: dict[object, int] = {}
    algorithm_of_alike: dict[object, str] = {}
    chosen: list[Pattern | None] = []
    for item in comms:
        if item.op == "send" or len(item.ends) == 1:
            chosen.append(None)
            continue
        alike = (item.job, item.op, item.spec, seats_alike(cluster, item.ends))
        if alike in algorithm_of_alike:
            chosen += item.patterns(cluster, algorithm_of_alike[alike])
            continue
        candidates, costs = item.patterns(cluster), item.costs(jobs, cluster)
        key = (item.op, item.comm.nbytes, tuple([pattern.timing for pattern in candidates]), costs.gpu)
        if key not in numbers:
            fastest = choose(item.op, candidates, item.comm.nbytes, costs)
            numbers[key] = next(i for i, pattern in enumerate(candidates) if pattern is fastest)
        pattern = candidates[numbers[key]]
        chosen.append(pattern)
        # Uneven bytes have one algorithm, which has no name to ask for.
        algorithm_of_alike[alike] = pattern.algorithm if shares_of(item.comm) == ByteShares() else ""
    return chosen


def link_loads(cluster: Cluster, comms: Sequence[GroupComm], chosen: Sequence[Pattern | None]) -> LinkLoads:
    """Return the loads of all communications on links, by their ``chosen`` patterns.

    Those between two ranks follow from their route alone.
    """
    labels: list[object] = []
    phases: list[tuple[int, int]] = []  # communication and phase of each of the following
    links, loads = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]

    def add(label: object, *loads_of_phases: _Loads) -> None:
        for phase, (on, load) in enumerate(loads_of_phases):
            phases.append((len(labels), phase))
            links.append(on)
            loads.append(load)
        labels.append(label)

    for item, pattern in zip(comms, chosen, strict=True):
        if item.op == "send":
            add((item.job, item.axis, item.spec), spread_columns(cluster, *item.ends))
            continue
        label = (item.job, item.axis, item.spec, pattern.timing if pattern else ())
        stages = pattern.stages if pattern and not item.is_signal else ()
        add(label, *[(stage.links, stage.load) for stage in stages])
    for flow in cluster.background:
        add(("background", flow.rate_Bps), _columns(flow.loads))
    entries = np.repeat(np.array(phases, dtype=np.int64).reshape(-1, 2), [len(on) for on in links[1:]], axis=0)
    return LinkLoads(labels, entries[:, 0], entries[:, 1], np.concatenate(links), np.concatenate(loads))


#: Links, and the load on each.
_Loads = tuple[NDArray[np.int64], NDArray[np.float64]]


def _columns(loads: Spread) -> _Loads:
    return np.array([link for link, _ in loads], dtype=np.int64), np.array([load for _, load in loads], dtype=float)
