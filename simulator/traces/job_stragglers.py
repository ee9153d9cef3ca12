"""A job's steps without stragglers: each operation as long as its kind usually is.

The method and its figures are those of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin
et al., OSDI 2025; arXiv 2505.05713), sections 3 and 4. An operation's work is its length; of one in which ranks meet,
the time from the last arrival to its end. Without stragglers computation takes the mean of its kind over all ranks and
steps, communication the median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from simulator.arrays import Bools, Floats
from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.program import Axis, Program, Role, Step, numbered_axis
from simulator.traces.job_trace import COMMUNICATION, HAND_OVERS, JobMeeting, JobOp, JobTrace, MeetingRanks
from simulator.traces.lanes import LaneOp, RecordedLanes, add_meeting, add_op

#: Parts of a job to which a slowdown can be told.
JobPart = Literal["kind", "stage", "replica"]
PARTS: tuple[JobPart, ...] = ("kind", "stage", "replica")


@dataclass(frozen=True)
class JobTimes:
    """Delays and work of a job's ops, indexed by step, replica and op.

    ``delay_s``: from when all that an op follows has ended to its start. ``work_s``: from its start, or the last
    arrival where ranks meet, to its end.
    """

    delay_s: Floats
    work_s: Floats


@dataclass(frozen=True)
class StragglerFigures:
    """Mean steps of a job: recorded, played with all delays, without delays, and without stragglers either.

    ``by_part``: part of the job -> how many times as long the step without stragglers becomes with that part's own
    times.
    """

    steps: tuple[int, ...]
    recorded_s: tuple[float, ...]
    played_s: tuple[float, ...]
    without_delays_s: tuple[float, ...]
    ideal_s: float
    by_part: Mapping[str, float]

    @property
    def error(self) -> float:
        """How much longer the played steps are than the recorded ones, relative to them."""
        return sum(self.played_s) / sum(self.recorded_s) - 1

    @property
    def delays(self) -> float:
        """How many times as long delays make the mean step."""
        return sum(self.recorded_s) / sum(self.without_delays_s)

    @property
    def slowdown(self) -> float:
        """How many times as long stragglers make the mean step (equation 1 of the paper)."""
        return float(np.mean(self.without_delays_s)) / self.ideal_s


def straggler_figures(
    job: JobTrace, part: JobPart | None = None, done: Callable[[str], None] = lambda far: None
) -> StragglerFigures:
    """Return the figures of a job; ``part``: to which parts its slowdown is told. ``done`` is told how far it is."""
    times, played, bare = job_times(job), [], []
    for at, step in enumerate(job.steps):
        done(f"step {step}")
        played.append(play(job, times.delay_s[at], times.work_s[at]))
        bare.append(play(job, np.zeros_like(times.delay_s[at]), times.work_s[at]))
    ideal = ideal_work(job, times.work_s)
    ideal_s = play(job, np.zeros_like(ideal), ideal)
    by_part: dict[str, float] = {}
    for name, chosen in _parts(job, part):
        done(name)
        steps = [
            play(job, np.zeros_like(ideal), np.where(chosen, times.work_s[at], ideal)) for at in range(len(job.steps))
        ]
        by_part[name] = float(np.mean(steps)) / ideal_s
    return StragglerFigures(
        steps=job.steps,
        recorded_s=tuple(job.step_s.tolist()),
        played_s=tuple(played),
        without_delays_s=tuple(bare),
        ideal_s=ideal_s,
        by_part=dict(sorted(by_part.items(), key=lambda entry: -entry[1])),
    )


def job_times(job: JobTrace) -> JobTimes:
    """Return the delays and the work of all ops."""
    first_of_stage = _first_of_stage(job)
    delay, work = np.zeros_like(job.start_s), job.end_s - job.start_s
    for at, op in enumerate(job.ops):
        ready = np.broadcast_to(job.first_s[:, None], job.start_s.shape[:2])
        if op.after:
            ready = np.max([job.end_s[:, :, first_of_stage[op.stage] + other] for other in op.after], axis=0)
        delay[:, :, at] = np.maximum(job.start_s[:, :, at] - ready, 0.0)
    for meeting, members in _meetings(job):
        arrived = job.start_s[:, :, members].max(axis=2)
        if meeting.ranks in ("stage", "all"):
            arrived = np.broadcast_to(arrived.max(axis=1, keepdims=True), arrived.shape)
        # Ends that clocks show before the last arrival are at once.
        work[:, :, members] = np.maximum(job.end_s[:, :, members] - arrived[:, :, None], 0.0)
    return JobTimes(delay, work)


def _first_of_stage(job: JobTrace) -> dict[int, int]:
    """Return the index of the first op of each stage."""
    first: dict[int, int] = {}
    for at, op in enumerate(job.ops):
        first.setdefault(op.stage, at)
    return first


def _meetings(job: JobTrace) -> Iterator[tuple[JobMeeting, list[int]]]:
    """Yield the meetings of a replica, with the ops that take part in each."""
    members: dict[JobMeeting, list[int]] = {}
    for at, op in enumerate(job.ops):
        if op.meeting is not None:
            members.setdefault(op.meeting, []).append(at)
    yield from members.items()


def ideal_work(job: JobTrace, work_s: Floats) -> Floats:
    """Return the work of each op without stragglers, by replica and op."""
    ideal = np.zeros(work_s.shape[1:])
    for kind in dict.fromkeys(op.kind for op in job.ops):
        chosen = [at for at, op in enumerate(job.ops) if op.kind == kind]
        typical = np.median if kind in COMMUNICATION else np.mean
        ideal[:, chosen] = float(typical(work_s[:, :, chosen]))
    return ideal


def _parts(job: JobTrace, part: JobPart | None) -> Iterator[tuple[str, Bools]]:
    """Yield the parts of a job, with the ops of each by replica and op."""
    shape = job.replicas, len(job.ops)
    if part == "replica":
        for replica in range(job.replicas):
            yield f"replica {replica}", np.broadcast_to((np.arange(job.replicas) == replica)[:, None], shape)
    elif part == "stage":
        for stage in range(job.stages):
            yield f"stage {stage}", np.broadcast_to([op.stage == stage for op in job.ops], shape)
    elif part == "kind":
        names = [kind_name(op.kind) for op in job.ops]
        for name in dict.fromkeys(names):
            yield name, np.broadcast_to([other == name for other in names], shape)


def kind_name(kind: str) -> str:
    """Return the name of a kind, both ends of a hand-over under one.

    >>> kind_name("backward-recv"), kind_name("gc")
    ('backward hand-over', 'gc')
    """
    return f"{HAND_OVERS[kind][0]} hand-over" if kind in HAND_OVERS else kind


def play(job: JobTrace, delay_s: Floats, work_s: Floats) -> float:
    """Return the seconds of a step with these delays and this work, by replica and op."""
    roles: dict[tuple[int, bytes], int] = {}
    distinct: list[Role] = []
    role_of = []
    for replica in range(job.replicas):
        for stage in range(job.stages):
            mine = [at for at, op in enumerate(job.ops) if op.stage == stage]
            key = stage, np.stack((delay_s[replica, mine], work_s[replica, mine])).tobytes()
            if key not in roles:
                roles[key] = len(distinct)
                steps = _lanes([job.ops[at] for at in mine], delay_s[replica, mine], work_s[replica, mine])
                distinct.append(Role(f"stage {stage}, replica {replica}", steps))
            role_of.append(roles[key])
    program = Program(tuple(distinct), tuple(role_of), _groups(job), name="job")
    return simulate(program, ideal_cluster(program.n_ranks), Costs.ideal()).length_s


def _groups(job: JobTrace) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups: each rank alone, pairs of stages, replicas of a stage, ends of a pipeline, and all."""
    replicas, stages = range(job.replicas), range(job.stages)
    groups: dict[str, tuple[tuple[int, ...], ...]] = {
        str(Axis.RANK): tuple((rank,) for rank in range(job.replicas * job.stages))
    }
    groups[_axis("stage")] = tuple(tuple(r * job.stages + s for r in replicas) for s in stages)
    groups[_axis("all")] = (tuple(range(job.replicas * job.stages)),)
    if job.stages > 1:
        groups[_axis("ends")] = tuple((r * job.stages, (r + 1) * job.stages - 1) for r in replicas)
    else:
        groups[_axis("ends")] = tuple((r,) for r in replicas)
    for first in range(job.stages - 1):
        groups[_axis("pair", first)] = tuple((r * job.stages + first, r * job.stages + first + 1) for r in replicas)
    return groups


def _axis(ranks: MeetingRanks, first: int = 0) -> str:
    """Return the axis of ranks that meet; ``first``: the first stage of a pair."""
    number = {"stage": 0, "all": 1, "ends": 2, "pair": 3}[ranks] + (first if ranks == "pair" else 0)
    return numbered_axis(Axis.PROCESS_GROUP, number)


def _lanes(ops: Sequence[JobOp], delay_s: Floats, work_s: Floats) -> dict[str, tuple[Step, ...]]:
    """Return the lanes of a rank; ops of several lanes may follow one another."""
    lanes: RecordedLanes = {}
    for at, op in enumerate(ops):
        after = tuple(f"o{other}" for other in op.after)
        lane_op = LaneOp(at, op.kind, op.lane, after, float(delay_s[at]), float(work_s[at]))
        if op.meeting is None:
            add_op(lanes, lane_op)
        else:
            axis = _axis(op.meeting.ranks, op.meeting.first_stage)
            add_meeting(lanes, lane_op, axis, f"{axis} {op.meeting.name}")
    return {name: tuple(steps) for name, steps in lanes.items()}
