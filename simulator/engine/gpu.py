"""The GPU of a simulated rank: who holds its SMs, who uses its memory, and how fast its kernels run."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable
from functools import reduce
from operator import add
from typing import NamedTuple

import simpy

from simulator.arrays import Floats
from simulator.costs.interference import InterferenceCost
from simulator.engine.block_pieces import Segment
from simulator.engine.memory_bandwidth import INSTANT_s, equal_part
from simulator.engine.rendezvous import Rendezvous
from simulator.engine.running_segment import RunningSegment
from simulator.engine.templates import TemplateStore


class SegmentRun(NamedTuple):
    """When a segment began.

    ``stretched``: start and end of each op, where they did not run straight through at full speed.
    """

    start_s: float
    stretched: tuple[Floats, Floats] | None


class SimulatedGpu:
    """A GPU whose kernels and communication leave each other alone. It runs one segment of kernels at a time."""

    def __init__(self, env: simpy.Environment, store: TemplateStore) -> None:
        #: True where communication starts only when the running kernel has ended (`wait_for_sms`).
        self.communication_waits = False
        self._env = env
        self._store = store

    def run(self, segment: Segment, host_s: float) -> Generator[simpy.Event, None, SegmentRun]:
        """Run ``segment``, which the host launches from ``host_s`` on."""
        now = self._env.now
        template = self._store.templates[segment.template]
        start_s = max(now, host_s + float(template.launched_s[0]))
        end_s = max(start_s + segment.seconds, host_s + segment.tail_s)
        yield self._env.timeout(end_s - now)
        is_stretched = end_s > start_s + segment.seconds * (1 + 1e-12)
        return SegmentRun(start_s, template.play(host_s + template.launched_s, start_s) if is_stretched else None)

    def wait_for_sms(self) -> Generator[simpy.Event, None, bool]:
        """Wait until a communication kernel finds SMs; return whether it had to wait."""
        yield from ()
        return False

    def spin(self, rendezvous: Rendezvous) -> None:
        """Put the kernel of a communication on the GPU, where it waits for its peers."""

    def move_bytes(self, rendezvous: Rendezvous, memory_demand: float) -> None:
        """Let a communication move its bytes from now on, with this demand of the memory's time."""

    def release(self, rendezvous: Rendezvous) -> None:
        """Take the kernel of a communication off the GPU."""


class SharedGpu(SimulatedGpu):
    """A GPU whose SMs and memory kernels share with communication.

    Communication kernels hold SMs from when they are on the GPU, be their peers there or not. They get SMs when a
    kernel ends, and slow those beside them. What moves bytes has of the memory's time what the running kernel leaves.
    """

    def __init__(self, env: simpy.Environment, store: TemplateStore, interference: InterferenceCost) -> None:
        super().__init__(env, store)
        self.communication_waits = interference.queues
        self._interference = interference
        #: Communication on the GPU: what spins until its peers are there, and what moves bytes, with its demand.
        self._spinning: dict[Rendezvous, None] = {}
        self._moving: dict[Rendezvous, float] = {}
        self._running: RunningSegment | None = None
        #: Communication that is not on the GPU yet, as it waits for SMs.
        self._waiting: list[simpy.Event] = []
        self._load: Hashable = None
        #: Shares of the memory's time: demanded by all that moves bytes, left by the running kernel.
        self._memory_demand, self._memory_left = 0.0, math.inf

    def run(self, segment: Segment, host_s: float) -> Generator[simpy.Event, None, SegmentRun]:
        """Run ``segment``; its lane wakes at the end, and where its speed or the demands on it change."""
        self._load, self._memory_demand = self._present_load()
        process, now = self._env.active_process, self._env.now
        assert process is not None
        running = self._running = RunningSegment(process, self._store, segment, host_s, self._load, now)
        while True:
            until = running.op_at(now) if self._waiting else running.last_op
            end_s = running.end_s(until, now)
            self._memory_left, change_s = running.memory_left(self._memory_demand, now)
            self._share_memory()
            interrupted = False
            try:
                yield self._env.timeout(min(end_s, change_s) - now)
            except simpy.Interrupt:
                interrupted, running.is_interrupted = True, False
            now = self._env.now
            if now >= end_s or (change_s >= end_s and not interrupted):
                while self._waiting:
                    self._waiting.pop().succeed()
                if until == running.last_op:
                    break
            running.change_load(self._load, now)
        self._running, self._memory_left = None, math.inf
        self._share_memory()
        return SegmentRun(running.start_s, running.stretched(now))

    def wait_for_sms(self) -> Generator[simpy.Event, None, bool]:
        """Wait until the running kernel has ended, as it holds the SMs that communication needs.

        A kernel that begins at this instant holds them too: it stands in its stream already, where communication waits
        for an event of another.
        """
        yield self._env.timeout(2 * INSTANT_s)
        if self._running is None or not self._running.computes(self._env.now):
            return False
        room = self._env.event()
        self._waiting.append(room)
        self._running.interrupt()
        yield room
        return True

    def spin(self, rendezvous: Rendezvous) -> None:
        """Put the kernel of a communication on the GPU, where it waits for its peers."""
        self._spinning[rendezvous] = None
        self._change_load()

    def move_bytes(self, rendezvous: Rendezvous, memory_demand: float) -> None:
        """Let a communication move its bytes from now on, with this demand of the memory's time."""
        self._spinning.pop(rendezvous, None)
        self._moving[rendezvous] = memory_demand
        self._change_load()
        self._share_memory()

    def release(self, rendezvous: Rendezvous) -> None:
        """Take the kernel of a communication off the GPU."""
        self._spinning.pop(rendezvous, None)
        self._moving.pop(rendezvous, None)
        self._change_load()
        self._share_memory()

    def _change_load(self) -> None:
        """Wake the running segment where the communication on the GPU changes its speed, or the demand of memory.

        What does not run yet asks when it begins.
        """
        if self._running is None:
            return
        load_before, demand_before = self._load, self._memory_demand
        self._load, self._memory_demand = self._present_load()
        if self._load != load_before or self._running.has_less_left_than(max(self._memory_demand, demand_before)):
            self._running.interrupt()

    def _present_load(self) -> tuple[Hashable, float]:
        """Return the load of the communication on kernels, and its demand of the memory's time."""
        spinning, moving = [other.comm for other in self._spinning], [other.comm for other in self._moving]
        # One after another: `sum` of newer Pythons rounds in another way, and the compiled engine is to be equal.
        return self._interference.load(spinning, moving), reduce(add, self._moving.values(), 0.0)

    def _share_memory(self) -> None:
        """Give to what moves bytes the memory's time that the running kernel leaves, in max-min fair shares.

        Where a collective cannot use its share, because others or links hold it back, nobody else gets it.
        """
        if not self._moving:
            return
        part = equal_part(self._moving.values(), self._memory_left)
        for rendezvous, demand in self._moving.items():
            rendezvous.limit(self, part / demand if part < demand else 1.0)
