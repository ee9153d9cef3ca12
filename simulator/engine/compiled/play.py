"""Programs played by the compiled event loop, to the same times as `simulator.engine.play` plays them on SimPy."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from simulator.arrays import Floats
from simulator.cluster import Cluster
from simulator.engine import progress
from simulator.engine.communicator import mismatch
from simulator.engine.compiled import library
from simulator.engine.compiled.description import CommNumbers, JobDescription
from simulator.engine.compiled.handle import SimulationHandle
from simulator.engine.compiled.job import CompiledJob, FirstNumbers
from simulator.engine.compiled.network import NumberedPhases
from simulator.engine.compiled.tables import Tables
from simulator.engine.deadlock import BlockedLane, UncalledComm, report
from simulator.engine.marks import Marks, PeriodMark
from simulator.engine.periods import stop_unsteady, whole_spans
from simulator.engine.placed_ranks import n_blocks, ranks_of_jobs
from simulator.engine.placement import Placed
from simulator.engine.play import PlayedJob, PlayedJobs
from simulator.engine.rank import Awaited, PlacedRank
from simulator.engine.recorder import GpuClocks, RecordedSpans
from simulator.engine.representatives import SimulatedCluster
from simulator.errors import DeadlockError
from simulator.program import COMPUTE_LANE


class CompiledEngine:
    """Plays jobs on the compiled event loop, as often as it takes, as does `simulator.engine.play.SimpyEngine`."""

    def __init__(self, jobs: Sequence[Placed], simulated: SimulatedCluster, cluster: Cluster, coalesce: bool) -> None:
        self._jobs, self._simulated, self._cluster, self._coalesce = jobs, simulated, cluster, coalesce
        self._comms = CommNumbers()
        #: Descriptions of jobs that do not grow, which are alike in all plays.
        self._descriptions: dict[int, JobDescription] = {}

    def play(self, clocks: Sequence[GpuClocks]) -> PlayedJobs:
        """Play all jobs to the end, each at its clocks. Raises `DeadlockError` where a rank still waits then."""
        ranks = ranks_of_jobs(self._jobs, self._simulated, self._cluster, clocks)
        play = _CompiledPlay(self._jobs, self._simulated, ranks, self._comms)
        try:
            descriptions = [self._description(job, ranks_of_job) for job, ranks_of_job in enumerate(ranks)]
            play.describe(self._jobs, self._simulated, ranks, descriptions, self._coalesce)
            return play.played()
        finally:
            play.close()

    def _description(self, job: int, ranks: Sequence[PlacedRank]) -> JobDescription:
        placed = self._jobs[job]
        if placed.more is not None:
            return JobDescription(placed, ranks, self._comms)
        if job not in self._descriptions:
            self._descriptions[job] = JobDescription(placed, ranks, self._comms)
        return self._descriptions[job]


class _CompiledPlay:
    """Jobs on the loop, and the answers to what it asks. Roles, ranks and lanes of all jobs are numbered on."""

    def __init__(
        self,
        jobs: Sequence[Placed],
        simulated: SimulatedCluster,
        ranks: Sequence[Sequence[PlacedRank]],
        comms: CommNumbers,
    ) -> None:
        self._jobs: list[CompiledJob] = []
        roles = [placed.program.roles for placed in jobs]
        n_lanes = sum(len(roles[job][rank.role].lanes) for job, job_ranks in enumerate(ranks) for rank in job_ranks)
        sizes = len(jobs), sum(map(len, roles)), sum(map(len, ranks)), n_lanes
        self._handle = SimulationHandle(self._answers(), [link.capacity_Bps for link in simulated.links], sizes)
        self._phases = NumberedPhases(self._handle)
        self._tables = Tables(self._handle, self._phases, comms)
        self._marks: Marks[int, int] = Marks(())
        #: By job the spans that have been counted, and the blocks that had ended with them.
        self._told: dict[int, tuple[int, int]] = {}

    def describe(
        self,
        jobs: Sequence[Placed],
        simulated: SimulatedCluster,
        ranks: Sequence[Sequence[PlacedRank]],
        descriptions: Sequence[JobDescription],
        coalesce: bool,
    ) -> None:
        """Tell the loop of background traffic and of all jobs, and let them begin."""
        for phase in simulated.background:
            self._handle.add("begin_background", self._phases.number(phase))
        role = rank = lane = 0
        for placed, representatives, ranks_of_job, description in zip(
            jobs, simulated.representatives, ranks, descriptions, strict=True
        ):
            first = FirstNumbers(len(self._jobs), role, rank, lane)
            job = CompiledJob(self._tables, first, placed, representatives, ranks_of_job, coalesce, description)
            self._jobs.append(job)
            role, rank, lane = role + len(placed.program.roles), rank + len(job.ranks), lane + len(job.lanes)
        for job in self._jobs:
            job.begin()
            if marked := job.marked_steps():
                self._marks = Marks(marked)
                steps = np.array(self._marks.steps, dtype=np.int32)
                lane = job.lanes.index((job.ranks[0], COMPUTE_LANE))
                self._handle.call("set_marks", job.first.lane + lane, len(steps), self._handle.kept(steps))

    def played(self) -> PlayedJobs:
        """Let everything happen, and read what did."""
        if self._handle.run(self._teller()) == library.CALLS_DIFFER:
            self._raise_mismatch()
        for job in self._jobs:
            if blocked := self._blocked(job):
                raise DeadlockError(report(job.program, blocked))
        counted = self._counted()
        jobs = tuple([self._played(job, counted) for job in self._jobs])
        self._handle.add("finish", max(job.spans.length_s for job in jobs))
        return PlayedJobs(jobs, self._phases.saturations(), self._handle.call("n_events"))

    def close(self) -> None:
        """Give the loop's memory back."""
        self._handle.close()

    def _answers(self) -> dict[str, Callable[..., int]]:
        """Return what answers each question of the loop."""
        return {
            "load": lambda *load: self._tables.load(*load),
            "paced": lambda template, load: self._tables.paced(template, load),
            "meeting": self._meeting,
            "cut": lambda lane, block, phase, n, idle: self._job_of(lane).cut(lane, block, phase, idle[:n]),
            "call": lambda lane, kind: self._job_of(lane).call(lane, kind),
            "grow": self._grow,
            "mark": self._mark,
        }

    def _teller(self) -> Callable[[], object]:
        """Return what tells who watches, if anybody does, how far all jobs are."""
        jobs, ranks = [job.placed for job in self._jobs], [job.ranks for job in self._jobs]
        blocks = n_blocks(jobs, ranks) if progress.is_watched() else 0
        return partial(self._tell, blocks) if blocks else lambda: None

    def _tell(self, blocks: int) -> None:
        """Tell who watches how many blocks of kernels have ended, of so many."""
        for number, job in enumerate(self._jobs):
            self._count_blocks(number, job)
        progress.tell(sum(ended for _, ended in self._told.values()), blocks)

    def _count_blocks(self, number: int, job: CompiledJob) -> None:
        """Count the blocks of a job that have ended, beside the spans that have been counted."""
        counted, ended = self._told.get(number, (0, 0))
        address = ctypes.c_void_p()
        n = self._handle.call("read_spans", job.first.job, ctypes.byref(address))
        spans = library.array_at(address.value, library.SPAN, n)[counted:]
        lanes = self._tables.comms.lane_names.things
        code = lanes.index(COMPUTE_LANE) if COMPUTE_LANE in lanes else -1
        more = np.count_nonzero((spans["lane_name"] == code) & (spans["flags"] & library.IS_LAST > 0))
        self._told[number] = n, ended + int(more)

    def _job_of(self, lane: int) -> CompiledJob:
        return next(job for job in reversed(self._jobs) if job.first.lane <= lane)

    def _meeting(self, lane: int, block: int, lanes: Any) -> int:
        meeting = self._job_of(lane).meeting(lane, block)
        for index, place in enumerate(meeting):
            lanes[index] = place
        return len(meeting)

    def _grow(self, job: int, what: int, now: float, release_s: Any) -> int:
        if what == library.HAND_OUT:
            return int(self._jobs[job].hand_out())
        release = self._jobs[job].next_release(now)
        if release is None:
            return library.NO_MORE
        release_s[0] = release
        return library.AT_RELEASE

    def _mark(self, now: float) -> int:
        (job,) = self._jobs
        mark = PeriodMark(now, self._hosts_s(), self._counted(), job.runs(), self._phases.seconds_of_states())
        self._marks.put(mark)
        stop_unsteady(self._marks)
        return 0

    # Results

    def _played(self, job: CompiledJob, counted: Mapping[int, int]) -> PlayedJob:
        clocks = {rank.number: rank.speed.clock_hz for rank in job.ranks}
        spans, more_runs = self._spans(job), list[list[int]]()
        if job.placed.repetition is not None:
            roles = dict.fromkeys(rank.role for rank in job.ranks)
            spans, periods = whole_spans(spans, self._marks, self._hosts_s(), job.placed, tuple(roles))
            for period in periods:
                counted = Counter(counted) + Counter(period.more_counts())
                more_runs.append(period.more_runs())
                self._phases.prolong(period.more_seconds())
        return PlayedJob(
            job.program,
            job.store,
            spans,
            job.counts(counted, more_runs),
            {number: clock_hz for number, clock_hz in clocks.items() if clock_hz is not None},
        )

    def _spans(self, job: CompiledJob) -> RecordedSpans:
        address = ctypes.c_void_p()
        n = self._handle.call("read_spans", job.first.job, ctypes.byref(address))
        spans = library.array_at(address.value, library.SPAN, n)
        # All columns are copies, as the loop's memory is given back.
        columns = {name: spans[name].astype(np.int64) for name in ("rank", "lane_name", "position", "step", "template")}
        times = {name: spans[name].copy() for name in ("posted_s", "launched_s", "start_s", "end_s")}
        flags, templates = spans["flags"].copy(), np.array(self._tables.index_of_template, dtype=np.int64)
        return RecordedSpans(
            lane_names=tuple(self._tables.comms.lane_names.things),
            steps=job.steps,
            rank=columns["rank"],
            lane=columns["lane_name"],
            position_in_lane=columns["position"],
            step=columns["step"],
            template=templates[columns["template"]] if n else np.zeros(0, dtype=np.int64),
            is_first=(flags & library.IS_FIRST) > 0,
            is_last=(flags & library.IS_LAST) > 0,
            in_row=(flags & library.IN_ROW) > 0,
            posted_s=times["posted_s"],
            launched_s=times["launched_s"],
            start_s=times["start_s"],
            end_s=times["end_s"],
            stretched=self._stretched(job),
        )

    def _stretched(self, job: CompiledJob) -> dict[int, tuple[Floats, Floats]]:
        first, second, n_rows = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int64()
        pointers = ctypes.byref(first), ctypes.byref(second), ctypes.byref(n_rows)
        n = self._handle.call("read_stretched", job.first.job, *pointers)
        stretched = library.array_at(first.value, library.STRETCHED, n)
        rows_s = library.array_at(second.value, np.dtype(np.float64), n_rows.value).copy()
        columns = (stretched[name].tolist() for name in ("span", "at", "n_ops"))
        return {
            span: (rows_s[at : at + ops], rows_s[at + ops : at + 2 * ops])
            for span, at, ops in zip(*columns, strict=True)
        }

    def _counted(self) -> dict[int, int]:
        first, second, n_counts = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int32()
        n = self._handle.call("read_counts", ctypes.byref(first), ctypes.byref(second), ctypes.byref(n_counts))
        order = library.array_at(first.value, np.dtype(np.int32), n).tolist()
        counts = library.array_at(second.value, np.dtype(np.int64), n_counts.value).tolist()
        return {number: counts[number] for number in order}

    def _hosts_s(self) -> Floats:
        hosts_s = np.zeros(sum(len(job.ranks) for job in self._jobs))
        self._handle.call("read_hosts", hosts_s.ctypes.data)
        return hosts_s

    # Errors

    def _raise_mismatch(self) -> None:
        differing = (ctypes.c_int32 * 4)()
        self._handle.call("read_differing", differing)
        lane, kind, other, first_caller = differing
        kinds, job = self._tables.comms.kinds.things, self._job_of(lane)
        caller = job.lanes[lane - job.first.lane][0].number
        raise mismatch(caller, kinds[kind], job.ranks[first_caller - job.first.rank].number, kinds[other])

    def _blocked(self, job: CompiledJob) -> list[BlockedLane]:
        """Return the lanes of a job that wait for something, rank by rank in the order in which they stopped."""
        blocked: list[tuple[tuple[int, int], BlockedLane]] = []
        for number, (rank, name) in enumerate(job.lanes, job.first.lane):
            place = (ctypes.c_int32 * 4)()
            stopped = self._handle.call("read_lane", number, place)
            if place[0] != library.NO_STEP:
                waits_for = self._waits_for(job, number, rank, list(place))
                blocked.append(((rank.number, stopped), BlockedLane(rank.number, rank.role, name, place[3], waits_for)))
        return [lane for _, lane in sorted(blocked, key=lambda one: one[0])]

    def _waits_for(
        self, job: CompiledJob, lane: int, rank: PlacedRank, place: Sequence[int]
    ) -> str | UncalledComm | Awaited:
        awaits, number, tag, _ = place
        if awaits == library.AN_EXTENSION:
            return Awaited.EXTENSION
        if awaits == library.A_STEP:
            return job.label(rank.role, number)
        comm = self._tables.comms.tagged(number, tag)
        members = job.members(rank, number)
        missing = [member for member in members if not self._handle.call("has_rank_called", lane, member)]
        return UncalledComm(comm, missing)
