"""One program being played: its simulated ranks with their GPUs and hosts, and its communicators."""

from __future__ import annotations

from collections import Counter

from simulator.cluster import Cluster, Gpu
from simulator.engine.block_pieces import BlockCutter, GpuSpeed
from simulator.engine.coalescing import CoalescedBlocks
from simulator.engine.communicator import Communicators
from simulator.engine.deadlock import report
from simulator.engine.gpu import SharedGpu, SimulatedGpu
from simulator.engine.growth import Growth
from simulator.engine.host import SimulatedHost
from simulator.engine.issue_order import HostSpeeds, HostWork, host_work
from simulator.engine.lane import Lane
from simulator.engine.placement import Placed, RankKind
from simulator.engine.rank import Rank
from simulator.engine.recorder import GpuClocks, Recorder
from simulator.engine.representatives import Representatives
from simulator.engine.templates import TemplateStore
from simulator.engine.traffic import CommCounts
from simulator.errors import DeadlockError
from simulator.network.flows import Network
from simulator.network.simulated_time import SimulatedTime
from simulator.program import Program


class Play:
    """One program being played, its ranks at ``clocks``. ``counts``: how often each communication was made."""

    def __init__(
        self,
        env: SimulatedTime,
        network: Network,
        placed: Placed,
        representatives: Representatives,
        cluster: Cluster,
        coalesce: bool,
        clocks: GpuClocks,
    ) -> None:
        self.representatives = representatives
        self.clocks = clocks
        self.store = TemplateStore()
        self.recorder = Recorder(self.store)
        self.counts: CommCounts = Counter()
        self._env = env
        self._placed = placed
        self._program = placed.program
        self._host_work: dict[tuple[int, str, HostSpeeds], tuple[HostWork, ...]] = {}
        self._communicators = Communicators(env, network, representatives, self.counts)
        cutter = BlockCutter(placed.costs, self.store)
        self._blocks = CoalescedBlocks(placed.program.roles, representatives, network, cutter, self.counts, coalesce)
        self.ranks = [self._rank(number, cluster.gpus[placed.gpus[number]]) for number in representatives.multiplicity]
        self._growth = (
            None
            if placed.more is None
            else Growth(env, placed.program, placed.more(), placed.costs, self.ranks, self._blocks)
        )

    @property
    def program(self) -> Program:
        """All that has been played."""
        return self._program if self._growth is None else self._growth.program

    def begin(self) -> None:
        """Let every lane of every simulated rank begin now."""
        growth = self._growth
        for rank in self.ranks:
            for name, steps in self._program.roles[rank.role].lanes.items():
                lane = Lane(self._env, rank, name, self._blocks, self._communicators, self.recorder)
                through = lane.go_through(steps) if growth is None else growth.go_through(lane, rank, name)
                self._env.process(through)
        if growth is not None:
            growth.begin()

    def end(self) -> None:
        """Complete the record of traffic: nothing moves any more. Raises `DeadlockError` where a rank still waits."""
        if any(rank.waits_for for rank in self.ranks):
            raise DeadlockError(report(self.program, self.ranks))
        self._blocks.finish()

    def _rank(self, number: int, gpu: Gpu) -> Rank:
        program = self._program
        groups = {
            axis: groups_of_axis[index]
            for axis, groups_of_axis in program.groups.items()
            if (index := program.group_index(axis, number)) >= 0
        }
        role, costs, speeds = program.role_of[number], self._placed.costs.for_gpu(gpu.type), HostSpeeds.from_gpu(gpu)
        key = role, gpu.type, speeds
        if key not in self._host_work:
            self._host_work[key] = host_work(program.roles[role], costs, speeds)
        host = SimulatedHost(costs, speeds, self._host_work[key])
        speed = GpuSpeed(gpu.type, gpu.speed_scale, self.clocks[RankKind.from_gpu(role, gpu)], speeds)
        interference = costs.interference
        simulated = (
            SimulatedGpu(self._env, self.store)
            if interference is None
            else SharedGpu(self._env, self.store, interference)
        )
        return Rank(self._env, number, role, groups, speed, simulated, host)
