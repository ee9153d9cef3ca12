"""Every communication of every group of some programs: alike ones together, their groups as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from simulator.arrays import Ints, distinct, first_places, inverse, joined, row_numbers, run_starts
from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.engine.placement import Placed
from simulator.network import hosts
from simulator.network.collectives import patterns
from simulator.network.direct import ByteShares
from simulator.network.pattern import Pattern
from simulator.program import (
    AXES,
    AllToAll,
    Collective,
    Comm,
    HostOperation,
    PointToPoint,
    Program,
    RecordedWork,
    axis_of,
)
from simulator.program.seated_groups import SeatedGroups

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


def op_of(comm: Comm) -> str:
    """Return the operation that both ends of a transfer make, or all members of a group."""
    return "send" if isinstance(comm, PointToPoint) else comm.op


def is_signal(comm: Comm) -> bool:
    """Tell whether this is a collective of one number, which is all latency and takes no share of any link.

    NICs that a tree loads differently are then still alike, and so are the ranks behind them.
    """
    return not isinstance(comm, PointToPoint) and comm.nbytes <= SIGNAL_BYTES


def updates(comm: Comm) -> bool:
    """Tell whether a host computes, and nothing leaves the GPU."""
    return isinstance(comm, HostOperation) and comm.updates


@dataclass(frozen=True, eq=False)
class GroupComm:
    """One communication of one real group of program ``job``.

    ``ranks`` are those that call it: its two ends, or all members of the group. ``ends`` are the end points on the
    cluster between which bytes move.
    """

    job: int
    axis: str
    group: int
    spec: tuple[object, ...]
    comm: Comm
    ranks: Ints
    ends: Ints

    def costs(self, jobs: Sequence[Placed], cluster: Cluster) -> Costs:
        """Return the costs that hold between the GPUs that take part."""
        return jobs[self.job].costs.among(cluster.gpu_types(map(int, self.ends)))

    def patterns(self, cluster: Cluster) -> tuple[Pattern, ...]:
        """Return the algorithms that could do it; none where nothing moves."""
        if isinstance(self.comm, RecordedWork):
            return ()
        return patterns(
            op_of(self.comm), tuple(self.ends.tolist()), cluster, algorithm_of(self.comm), shares_of(self.comm)
        )


@dataclass(frozen=True, eq=False)
class AlikeComms:
    """Communications of a program that differ in their group alone: a row for each of ``groups`` of ``axis``.

    ``ranks`` and ``ends`` are those of `GroupComm`, a row each. ``number``: of each among all communications.
    """

    job: int
    axis: str
    spec: tuple[object, ...]
    comm: Comm
    groups: Ints
    ranks: Ints
    ends: Ints
    number: Ints

    @property
    def op(self) -> str:
        """The operation."""
        return op_of(self.comm)

    @property
    def is_signal(self) -> bool:
        """True of signals."""
        return is_signal(self.comm)

    def one(self, row: int) -> GroupComm:
        """Return the communication of one row."""
        group = int(self.groups[row])
        return GroupComm(self.job, self.axis, group, self.spec, self.comm, self.ranks[row], self.ends[row])


def alike_comms(
    jobs: Sequence[Placed], cluster: Cluster, groups: Sequence[Mapping[str, SeatedGroups]]
) -> list[AlikeComms]:
    """Return every distinct communication of every real group, those that differ in the group alone together.

    They are numbered in the order of the ranks that call them, and of the calls of a rank.
    """
    comms: list[AlikeComms] = []
    for job, placed in enumerate(jobs):
        first = sum(len(alike.number) for alike in comms)
        comms += _comms_of_job(job, placed, cluster, groups[job], first)
    return comms


class _Calls(NamedTuple):
    """Calls of one communication by the ranks of a role: of each group, the first rank that calls, and which call."""

    axis: str
    spec: tuple[object, ...]
    comm: Comm
    groups: Ints
    caller: Ints
    call: int


def _comms_of_job(
    job: int, placed: Placed, cluster: Cluster, groups: Mapping[str, SeatedGroups], first: int
) -> list[AlikeComms]:
    each = list(_calls(placed.program, groups))
    kinds: dict[tuple[str, tuple[object, ...]], int] = {}
    number_of_kind = [kinds.setdefault((calls.axis, calls.spec), len(kinds)) for calls in each]
    first_calls = dict(zip(reversed(number_of_kind), reversed(each), strict=True))
    lengths = [len(calls.groups) for calls in each]
    if not any(lengths):
        return []
    kind, call = (np.repeat(column, lengths) for column in (number_of_kind, [calls.call for calls in each]))
    size = joined(groups[calls.axis].size[calls.groups] for calls in each)
    group, caller = joined(calls.groups for calls in each), joined(calls.caller for calls in each)
    in_time = row_numbers(caller, call)
    by_kind = np.lexsort((in_time, size, kind))
    _, first_of_group = np.unique(row_numbers(kind, group)[by_kind], return_index=True)
    chosen = by_kind[np.sort(first_of_group)]  # of each group the first call of a kind
    starts = run_starts(row_numbers(kind[chosen], size[chosen]))
    number = inverse(np.argsort(in_time[chosen])) + first
    gpus, comms = np.array(placed.gpus, dtype=np.int64), []
    for begin, end in itertools.pairwise((*starts.tolist(), len(chosen))):
        rows = chosen[begin:end]
        calls, part = first_calls[int(kind[rows[0]])], group[rows]
        ranks = groups[calls.axis].ranks(part)
        if isinstance(calls.comm, PointToPoint):
            ranks = ranks[:, np.array(calls.spec[1:3], dtype=np.int64)]
        ends = gpus[ranks]
        if isinstance(calls.comm, HostOperation):
            ends = hosts.ends(calls.comm.op, cluster, ends[:, 0], placed.servers)
        comms.append(AlikeComms(job, calls.axis, calls.spec, calls.comm, part, ranks, ends, number[begin:end]))
    return comms


def _calls(program: Program, groups: Mapping[str, SeatedGroups]) -> Iterator[_Calls]:
    """Yield the calls of every role, in the order of its communication."""
    anonymous: dict[Hashable, Comm] = {}
    for role, ranks in zip(program.roles, program.ranks_of_roles, strict=True):
        if not len(ranks):
            continue
        firsts: dict[str, tuple[Ints, Ints]] = {}
        by_key = {_network_key(comm): comm for _, comm in role.comms}
        anonymous |= {key: _anonymous(comm) for key, comm in by_key.items() if key not in anonymous}
        comms = dict.fromkeys(anonymous[key] for key in by_key)
        for call, comm in enumerate(comms):
            axis_groups = groups[comm.axis]
            if isinstance(comm, PointToPoint):
                positions = axis_groups.position_of[ranks]
                for position in distinct(positions).tolist():
                    callers = ranks[positions == position]
                    yield _Calls(comm.axis, spec_of(comm, position), comm, axis_groups.group_of[callers], callers, call)
                continue
            if comm.axis not in firsts:
                first = first_places(axis_groups.group_of[ranks], len(axis_groups.size))
                called = np.flatnonzero(first >= 0)
                firsts[comm.axis] = called, ranks[first[called]]
            yield _Calls(comm.axis, spec_of(comm, -1), comm, *firsts[comm.axis], call)


def _network_key(comm: Comm) -> Hashable:
    """Return what tells communication apart for the network; only names and tags of transfers are many."""
    if isinstance(comm, PointToPoint):
        return comm.axis, comm.op, comm.nbytes, comm.peer, comm.as_it_comes
    return comm


def _anonymous(comm: Comm) -> Comm:
    """Return ``comm`` without name, purpose and tag, which do not matter to the network."""
    if isinstance(comm, RecordedWork):
        return RecordedWork("", seconds=comm.seconds)
    purpose = AXES[axis_of(comm.axis)].purposes[0]
    if isinstance(comm, PointToPoint):
        return replace(comm, name="", purpose=purpose, tag="")
    return replace(comm, name="", purpose=purpose)
