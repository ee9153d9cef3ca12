"""What must hold of every timeline, whatever the program: one validator for all tests."""

from __future__ import annotations

import numpy as np

from simulator.errors import SimulatorError
from simulator.program import PointToPoint, PointToPointKind, Program, comms_of
from simulator.timeline import Timeline, covered_s

#: Two sums of the same terms in another order differ by less than this share of the step.
TOLERANCE = 1e-9
#: What a rank asks for, but leaves no GPU.
_FROM_ELSEWHERE = ("from_host", "to_nvme", "from_nvme", "pull")


class InvariantError(SimulatorError):
    """A timeline that cannot have happened: a fault of the engine."""


def check(program: Program, timeline: Timeline) -> None:
    """Raise `InvariantError` unless ``timeline`` is a possible execution of ``program``.

    Every step ran once, in lane order and after what it names; rows of one lane do not overlap; nothing ran faster than
    at full speed; both ends of a transfer saw it at the same time; no link carried more than its capacity allows in the
    time; and what GPUs sent is what their links carried.
    """
    slack = TOLERANCE * max(timeline.step_time_s, 1e-30)
    _check_steps(program, timeline, slack)
    _check_rows(timeline, slack)
    _check_transfers(program, timeline, slack)
    _check_links(timeline, slack)


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
