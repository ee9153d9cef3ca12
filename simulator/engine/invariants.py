"""Invariants of every timeline, whatever the program: one validator for all tests."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from simulator.cluster import Cluster
from simulator.engine.group_comms import algorithm_of, is_signal, shares_of
from simulator.engine.placement import Placed
from simulator.errors import SimulatorError
from simulator.network import hosts
from simulator.network.collectives import fastest, patterns
from simulator.program import Comm, HostKind, HostOperation, PointToPoint, PointToPointKind, Program, comms_of
from simulator.timeline import Timeline, covered_s

#: Two sums of the same terms in another order differ by less than this share of the step.
TOLERANCE = 1e-9
#: Bytes by which sums of bytes of whole transfers may be off, and the share of them that is rounding.
TOLERANCE_BYTES, ROUNDING = 0.5, 1e-12
#: What a rank asks for, but leaves no GPU.
_FROM_ELSEWHERE = (HostKind.FROM_HOST, HostKind.TO_NVME, HostKind.FROM_NVME, HostKind.PULL)


class InvariantError(SimulatorError):
    """A timeline that cannot have happened: a fault of the engine."""


class Place(NamedTuple):
    """The cluster that a program was played on, and its ranks' places there."""

    placed: Placed
    cluster: Cluster


def check(program: Program, timeline: Timeline, place: Place | None = None) -> None:
    """Raise `InvariantError` unless ``timeline`` is a possible execution of ``program``.

    Every step ran once, in lane order and after what it names. Rows of one lane do not overlap. Nothing ran faster than
    at full speed. Both ends of a transfer saw it at the same time. No link carried more than its capacity allows in the
    time. What GPUs sent left them. With ``place`` every link carried, to the byte, what all real ranks send over it.
    """
    slack = TOLERANCE * max(timeline.step_time_s, 1e-30)
    _check_steps(program, timeline, slack)
    _check_rows(timeline, slack)
    _check_transfers(program, timeline, slack)
    _check_links(timeline, slack)
    if place is not None:
        _check_bytes(place, timeline)


def _check_steps(program: Program, timeline: Timeline, slack: float) -> None:
    spans: dict[tuple[int, str], tuple[float, float]] = {}
    for rank, label, posted, end in zip(
        timeline.rank.tolist(), timeline.labels, timeline.posted_s.tolist(), timeline.end_s.tolist(), strict=True
    ):
        begin, finish = spans.get((rank, label), (posted, end))
        spans[rank, label] = (min(begin, posted), max(finish, end))
    expected = 0
    for rank in timeline.ranks:
        role = program.roles[program.role_of[rank]]
        for lane, steps in role.lanes.items():
            previous = 0.0
            for step in steps:
                expected += 1
                if (rank, step.label) not in spans:
                    raise InvariantError(f"rank {rank}, lane {lane}: step {step.label} did not run")
                begin, end = spans[rank, step.label]
                if begin < previous - slack:
                    raise InvariantError(
                        f"rank {rank}, lane {lane}: step {step.label} began before the one before it ended"
                    )
                for label in step.after:
                    if begin < spans[rank, label][1] - slack:
                        raise InvariantError(f"rank {rank}: step {step.label} began before {label} had ended")
                previous = end
    if expected != len(spans):
        raise InvariantError(f"{len(spans)} steps ran, the program has {expected}")


def _check_rows(timeline: Timeline, slack: float) -> None:
    rows = timeline.rows()
    start, end = rows["start_s"].astype(float), rows["end_s"].astype(float)
    if (end < start - slack).any() or (start < -slack).any():
        raise InvariantError("a row ends before it starts, or starts before time 0")
    order = np.lexsort((end, start, rows["lane"], rows["rank"]))
    same = (rows["rank"][order][1:] == rows["rank"][order][:-1]) & (rows["lane"][order][1:] == rows["lane"][order][:-1])
    clash = same & (start[order][1:] < end[order][:-1] - slack)
    if clash.any():
        at = int(order[1:][clash][0])
        lane = timeline.lane_names[int(rows["lane"][at])]
        raise InvariantError(
            f"rank {rows['rank'][at]}, lane {lane}: row {rows['name'][at]!r} overlaps the one before it"
        )
    if (timeline.launched_s < timeline.posted_s - slack).any() or (
        timeline.start_s < timeline.launched_s - slack
    ).any():
        raise InvariantError("a span was launched before its lane came to it, or started before it was launched")
    work = np.array([template.length_s for template in timeline.templates])
    if (timeline.end_s - timeline.start_s < work[timeline.template] - slack).any():
        raise InvariantError("a span was faster than its work at full speed")


def _check_transfers(program: Program, timeline: Timeline, slack: float) -> None:
    """The two ends of a transfer are one event. Which two these are is told by the ranks at its ends and its tag; of
    several that share them the first sent is the first received."""
    spans: dict[tuple[int, str, int], list[tuple[float, float]]] = {}
    columns = (timeline.rank, timeline.lane, timeline.start_s, timeline.end_s)
    for label, rank, lane, *times in zip(timeline.labels, *(column.tolist() for column in columns), strict=True):
        spans.setdefault((rank, label, lane), []).append((times[0], times[1]))
    number = {name: at for at, name in enumerate(timeline.lane_names)}
    ends: dict[str, dict[tuple[str, int, int, str], list[tuple[float, float]]]] = {op: {} for op in PointToPointKind}
    for rank in timeline.ranks:
        for _, _, step in program.roles[program.role_of[rank]].steps():
            for comm in comms_of(step.op):
                if not isinstance(comm, PointToPoint):
                    continue
                ran = spans.get((rank, step.label, number.get(comm.lane, -1)))
                if not ran:
                    raise InvariantError(f"rank {rank}: {comm.name} of step {step.label} did not run")
                peer = timeline.simulated_as[program.groups[comm.axis][program.group_index(comm.axis, rank)][comm.peer]]
                pair = (rank, peer) if comm.sends else (peer, rank)
                ends[comm.op].setdefault((comm.axis, *pair, comm.tag), []).append(ran.pop(0))
    for key in dict.fromkeys((*ends["send"], *ends["recv"])):
        _, sender, receiver, tag = key
        sent, received = (sorted(ends[op].get(key, ())) for op in PointToPointKind)
        where = f"rank {sender} to rank {receiver}, {tag or 'no tag'}"
        if len(sent) != len(received):
            raise InvariantError(f"{where}: {len(sent)} sends, {len(received)} receives")
        if np.abs(np.array(sent) - np.array(received)).max() > slack:
            raise InvariantError(f"{where}: the two ends of a transfer differ in time")


def _check_links(timeline: Timeline, slack: float) -> None:
    """No link carried more than it can while anything was in flight at all, and what was sent left its GPUs."""
    rows = timeline.rows()
    moving = rows["phase"] == "C"
    start, end = rows["start_s"][moving].astype(float), rows["end_s"][moving].astype(float)
    in_flight_s = covered_s(start, end)
    for link in timeline.links:
        if link.nbytes > link.capacity_Bps * (in_flight_s + slack):
            raise InvariantError(f"link {link.name} carried more than its capacity allows")
    leaves = moving & ~np.isin(rows["kind"].astype(str), _FROM_ELSEWHERE)
    like = np.array([timeline.ranks_like[int(rank)] for rank in rows["rank"][leaves]])
    sent = float((rows["nbytes"][leaves].astype(float) * like).sum())
    # More may leave: a GPU hands on to its NIC what others send over it (PXN).
    carried = sum(link.nbytes * link.count for link in timeline.links if link.leaves_gpu)
    if sent > carried * (1 + TOLERANCE):
        raise InvariantError(f"GPUs sent {sent:.6g} bytes, their links carried {carried:.6g}")


def _check_bytes(place: Place, timeline: Timeline) -> None:
    """Compare every link with the sum of all transfers of all real ranks, each along its own route."""
    sent = _bytes_of_links(place)
    by_name = {link.name: sent.get(link.index, 0.0) for link in place.cluster.links}
    kinds = {link.name: link.kind for link in place.cluster.links}
    carried: dict[str, list[float]] = {}
    for link in timeline.links:
        if _differ(link.nbytes, by_name[link.name]):
            raise InvariantError(f"link {link.name} carried {link.nbytes!r} bytes, {by_name[link.name]!r} were sent")
        carried.setdefault(link.kind, []).extend([link.nbytes] * link.count)
    for kind in dict.fromkeys(kinds.values()):
        reported = sorted(nbytes for nbytes in carried.get(kind, []) if nbytes)
        routed = sorted(nbytes for name, nbytes in by_name.items() if nbytes and kinds[name] == kind)
        if len(reported) != len(routed) or any(map(_differ, reported, routed)):
            raise InvariantError(f"links of kind {kind} carried {sum(reported)!r} bytes, {sum(routed)!r} were sent")


def _differ(first: float, second: float) -> bool:
    return abs(first - second) > TOLERANCE_BYTES + ROUNDING * max(first, second)


def _bytes_of_links(place: Place) -> dict[int, float]:
    """Return the bytes on every link, by its index, of all that a program's real ranks send.

    A collective of one number (`is_signal`) is latency alone.
    """
    program = place.placed.program
    total: dict[int, float] = {}
    loads: dict[tuple[object, ...], dict[int, float]] = {}
    for rank, role in enumerate(program.role_of):
        calls = Counter(comm for _, _, step in program.roles[role].steps() for comm in comms_of(step.op))
        for comm, times in calls.items():
            ends = _ends(place, comm, rank)
            if not ends:
                continue
            key = ends, comm.op, algorithm_of(comm), comm.nbytes, shares_of(comm)
            if key not in loads:
                loads[key] = _bytes_of_transfer(place, comm, ends)
            for link, nbytes in loads[key].items():
                total[link] = total.get(link, 0.0) + nbytes * times
    return total


def _ends(place: Place, comm: Comm, rank: int) -> tuple[int, ...]:
    """Return between whom a call of ``rank`` moves bytes; nobody where another one's call counts for all."""
    placed, cluster = place
    group = placed.program.groups[comm.axis][placed.program.group_index(comm.axis, rank)]
    if isinstance(comm, PointToPoint):
        return (placed.gpus[rank], placed.gpus[group[comm.peer]]) if comm.sends else ()
    if rank != group[0] or is_signal(comm):
        return ()
    if isinstance(comm, HostOperation):
        return tuple(hosts.ends(comm.op, cluster, np.array([placed.gpus[rank]]), placed.servers)[0].tolist())
    return tuple(placed.gpus[member] for member in group)


def _bytes_of_transfer(place: Place, comm: Comm, ends: tuple[int, ...]) -> dict[int, float]:
    """Return the bytes that one transfer between ``ends`` puts on each link."""
    placed, cluster = place
    if isinstance(comm, PointToPoint):
        return {link: load * comm.nbytes for link, load in cluster.spread(*ends)}
    choices = patterns(comm.op, ends, cluster, algorithm_of(comm), shares_of(comm))
    plan = fastest(comm.op, choices, comm.nbytes, placed.costs.among(cluster.gpu_types(ends)))
    link_bytes: dict[int, float] = {}
    for phase in plan.phases:
        for link, load in phase.loads:
            link_bytes[link] = link_bytes.get(link, 0.0) + load * phase.nbytes
    return link_bytes
