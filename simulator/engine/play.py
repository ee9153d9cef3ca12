"""Programs played once, on SimPy: simulated ranks with their GPUs and hosts, and communicators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.arrays import Floats
from simulator.cluster import Cluster
from simulator.engine import progress
from simulator.engine.block_pieces import BlockCutter
from simulator.engine.coalescing import CoalescedBlocks
from simulator.engine.communicator import Communicators
from simulator.engine.deadlock import BlockedLane, UncalledComm, report
from simulator.engine.gpu import SharedGpu, SimulatedGpu
from simulator.engine.growing_lanes import GrowingLanes
from simulator.engine.growth import Growth, host_type
from simulator.engine.host import SimulatedHost
from simulator.engine.lane import Lane
from simulator.engine.marks import Marks, PeriodMark, marked_steps
from simulator.engine.periods import stop_unsteady, whole_spans
from simulator.engine.placed_ranks import n_blocks, ranks_of_jobs, work_of_hosts
from simulator.engine.placement import Placed
from simulator.engine.progress import EndedBlocks
from simulator.engine.rank import PlacedRank, Rank
from simulator.engine.recorder import GpuClocks, RecordedSpans, Recorder
from simulator.engine.rendezvous import Rendezvous
from simulator.engine.representatives import Representatives, SimulatedCluster
from simulator.engine.templates import TemplateStore
from simulator.engine.traffic import CommCounts
from simulator.errors import DeadlockError
from simulator.network.flows import Network
from simulator.network.max_min import Saturation, Saturations
from simulator.network.simulated_time import SimulatedTime
from simulator.program import COMPUTE_LANE, Block, Program, Step


@dataclass(frozen=True)
class PlayedJob:
    """A job that has been played: its program with all extensions, its spans, and how often it communicated.

    Spans are of templates in ``store``. ``clocks_hz``: rank -> clock of its GPU, where that is not each kernel's own.
    """

    program: Program
    store: TemplateStore
    spans: RecordedSpans
    counts: CommCounts
    clocks_hz: Mapping[int, float]


@dataclass(frozen=True)
class PlayedJobs:
    """Jobs that have been played together, the states in which links held transfers up, and the number of events."""

    jobs: tuple[PlayedJob, ...]
    saturations: Saturations
    events: int


class SimpyEngine:
    """Plays jobs on SimPy, as often as it takes."""

    def __init__(self, jobs: Sequence[Placed], simulated: SimulatedCluster, cluster: Cluster, coalesce: bool) -> None:
        self._jobs, self._simulated, self._cluster, self._coalesce = jobs, simulated, cluster, coalesce

    def play(self, clocks: Sequence[GpuClocks]) -> PlayedJobs:
        """Play all jobs to the end, each at its clocks. Raises `DeadlockError` where a rank still waits then."""
        env = SimulatedTime()
        network = Network(env, [link.capacity_Bps for link in self._simulated.links])
        for phase in self._simulated.background:
            network.occupy(phase)
        ranks = ranks_of_jobs(self._jobs, self._simulated, self._cluster, clocks)
        each = zip(self._jobs, self._simulated.representatives, ranks, strict=True)
        plays = [_Play(env, network, *job, self._coalesce) for job in each]
        blocks = n_blocks(self._jobs, ranks) if progress.is_watched() else 0
        ended = EndedBlocks(blocks) if blocks else None
        for play in plays:
            play.begin(ended)
        env.run()
        played = tuple([play.end() for play in plays])
        network.finish(max(job.spans.length_s for job in played))
        return PlayedJobs(played, Saturations.from_states(network.saturated_s), env.events)


class _Play:
    """One program being played on simulated ``ranks``."""

    def __init__(
        self,
        env: SimulatedTime,
        network: Network,
        placed: Placed,
        representatives: Representatives,
        ranks: list[PlacedRank],
        coalesce: bool,
    ) -> None:
        self._env = env
        self._network = network
        self._placed = placed
        repetition = placed.repetition
        marked = [] if repetition is None else marked_steps(placed.program.roles[ranks[0].role], repetition)
        self._marks: Marks[tuple[int, str], Saturation] = Marks(marked)
        self._store = TemplateStore()
        self._recorder = Recorder(self._store)
        self._counts: CommCounts = Counter()
        self._communicators = Communicators(env, network, representatives, self._counts)
        cutter, roles = BlockCutter(placed.costs, self._store), placed.program.roles
        self._blocks = CoalescedBlocks(roles, representatives, network, cutter, self._counts, coalesce)
        work = work_of_hosts(placed, ranks)
        self._ranks = [
            Rank(
                env,
                rank,
                SimulatedGpu(env, self._store)
                if rank.interference is None
                else SharedGpu(env, self._store, rank.interference),
                SimulatedHost(placed.costs.for_gpu(rank.speed.gpu), rank.speed.host, work[rank.role, host_type(rank)]),
            )
            for rank in ranks
        ]
        self._growth = (
            None if placed.more is None else Growth(placed.program, placed.more(), placed.costs, ranks, self._blocks)
        )

    def begin(self, ended: EndedBlocks | None) -> None:
        """Let every lane of every simulated rank begin now.

        ``ended`` counts blocks of kernels, where anybody asks how far the play is.
        """
        growing = None if self._growth is None else GrowingLanes(self._env, self._growth)
        for rank in self._ranks:
            for name, work in self._placed.program.roles[rank.role].lanes.items():
                steps = self._marked(work) if rank is self._ranks[0] and name == COMPUTE_LANE else work
                steps = _counted(steps, ended) if name == COMPUTE_LANE and ended is not None else steps
                lane = Lane(self._env, rank, name, self._blocks, self._communicators, self._recorder)
                through = lane.go_through(steps) if growing is None else growing.go_through(lane, rank, name)
                self._env.process(through)
        if growing is not None:
            growing.begin()

    def _marked(self, steps: Sequence[Step]) -> Iterable[Step]:
        """Yield the steps of the first rank's compute lane, and put a mark where periods begin that are repeated."""
        marked = set(self._marks.steps)
        for index, step in enumerate(steps):
            if index in marked:
                counts, saturated_s = dict(self._counts), dict(self._network.saturated_s)
                mark = PeriodMark(self._env.now, self._hosts_s(), counts, self._blocks.runs, saturated_s)
                self._marks.put(mark)
                stop_unsteady(self._marks)
            yield step

    def _hosts_s(self) -> Floats:
        return np.array([rank.host.free_s for rank in self._ranks])

    def end(self) -> PlayedJob:
        """Return what has been played: nothing moves any more. Raises `DeadlockError` where a rank still waits."""
        program = self._placed.program if self._growth is None else self._growth.program
        if blocked := [lane for rank in self._ranks for lane in _blocked(rank)]:
            raise DeadlockError(report(program, blocked))
        spans = self._recorder.spans()
        if self._placed.repetition is not None:
            roles = dict.fromkeys(rank.role for rank in self._ranks)
            spans, periods = whole_spans(spans, self._marks, self._hosts_s(), self._placed, tuple(roles))
            for period in periods:
                self._counts.update(period.more_counts())
                self._blocks.add_runs(period.more_runs())
                self._network.prolong(period.more_seconds())
        self._blocks.finish()
        clocks = {rank.number: rank.placed.speed.clock_hz for rank in self._ranks}
        clocks_hz = {number: clock_hz for number, clock_hz in clocks.items() if clock_hz is not None}
        return PlayedJob(program, self._store, spans, self._counts, clocks_hz)


def _counted(steps: Iterable[Step], ended: EndedBlocks) -> Iterable[Step]:
    """Yield the steps of a compute lane, and count each block when it has ended."""
    for step in steps:
        yield step
        if isinstance(step.op, Block):
            ended.add_one()


def _blocked(rank: Rank) -> list[BlockedLane]:
    """Return the lanes of ``rank`` that still wait for something, in the order in which they stopped."""
    return [
        BlockedLane(
            rank.number,
            rank.role,
            lane,
            rank.next_step.get(lane, 0),
            UncalledComm(awaited.comm, awaited.missing) if isinstance(awaited, Rendezvous) else awaited,
        )
        for lane, awaited in rank.waits_for.items()
    ]
