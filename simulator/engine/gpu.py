"""The GPU of a simulated rank: who holds its SMs, who uses its memory, and how fast its kernels run."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable
from typing import TYPE_CHECKING, NamedTuple

import simpy

from simulator.costs.interference import Beside as Interference
from simulator.engine.block_pieces import Segment
from simulator.engine.memory_bandwidth import INSTANT_s, equal_part, memory_demand
from simulator.engine.representatives import PlannedTransfer
from simulator.engine.running_segment import RunningSegment
from simulator.engine.templates import TemplateStore
from simulator.program import Comm
from simulator.timeline import Floats

if TYPE_CHECKING:
    from simulator.engine.communicator import Rendezvous


class SegmentRun(NamedTuple):
    """When a segment began.

    ``stretched``: start and end of each op, where they did not run straight through at full speed.
    """

    start_s: float
    stretched: tuple[Floats, Floats] | None


class SimulatedGpu:
    """A GPU whose kernels and communication leave each other alone. It runs one segment of kernels at a time."""

    #: Whether communication takes SMs and memory from kernels, and they from it.
    is_shared = False

    def __init__(self, env: simpy.Environment, store: TemplateStore) -> None:
        self._env = env
        self._store = store

    def run(self, segment: Segment, host_s: float) -> Generator[simpy.Event, None, SegmentRun]:
        """Run ``segment``, which the host launches from ``host_s`` on."""
        now = self._env.now
        template = self._store.templates[segment.template]
        start_s = max(now, host_s + float(template.launch_s[0]))
        end_s = max(start_s + segment.seconds, host_s + segment.tail_s)
        yield self._env.timeout(end_s - now)
        is_stretched = end_s > start_s + segment.seconds * (1 + 1e-12)
        return SegmentRun(start_s, template.play(host_s + template.launch_s, start_s) if is_stretched else None)

    def wait_for_sms(self) -> Generator[simpy.Event, None, bool]:
        """Wait until a communication kernel finds SMs; return whether it had to wait."""
        yield from ()
        return False

    def memory_demand(self, comm: Comm, members: int, transfer: PlannedTransfer) -> float:
        """Return the share of the memory's time that ``comm`` would take while its bytes move at full speed."""
        return 0.0

    def hold_sms(self, rendezvous: Rendezvous, memory_demand: float) -> None:
        """Put the kernel of a communication on the GPU; `communication_changed` is to follow."""

    def release_sms(self, rendezvous: Rendezvous) -> None:
        """Take the kernel of a communication off the GPU; `communication_changed` is to follow."""

    def communication_changed(self) -> None:
        """Work out anew how kernels and communication share the GPU."""


class SharedGpu(SimulatedGpu):
    """A GPU whose SMs and memory kernels share with communication.

    Communication kernels hold SMs from when they are on the GPU, be their peers there or not. They get SMs when a
    kernel ends, and slow those beside them. What moves bytes has of the memory's time what the running kernel leaves.
    """

    is_shared = True

    def __init__(self, env: simpy.Environment, store: TemplateStore, interference: Interference) -> None:
        super().__init__(env, store)
        self._interference = interference
        #: Communication whose kernels are on the GPU, with its demand of the memory's time.
        self._resident: dict[Rendezvous, float] = {}
        self._running: RunningSegment | None = None
        #: Communication that waits for SMs.
        self._waiting: list[simpy.Event] = []
        self._load: Hashable = None
        #: Shares of the memory's time: demanded by all that moves bytes, left by the running kernel.
        self._memory_demand, self._memory_left = 0.0, math.inf

    def run(self, segment: Segment, host_s: float) -> Generator[simpy.Event, None, SegmentRun]:
        """Run ``segment``; its lane wakes at the end, and where its speed or the demands on it change."""
        self._load, self._memory_demand = self._present_load()
        process = self._env.active_process
        assert process is not None
        running = self._running = RunningSegment(process, self._store, segment, host_s, self._load)
        while True:
            until = running.op if self._waiting else running.last_op
            end_s = running.end_s(until)
            self._memory_left, change_s = running.memory_left(self._memory_demand)
            self._share_memory()
            interrupted = yield from running.wait_until(min(end_s, change_s))
            if self._env.now >= end_s or (change_s >= end_s and not interrupted):
                while self._waiting:
                    self._waiting.pop().succeed()
                if until == running.last_op:
                    break
            running.change_load(self._load)
        self._running, self._memory_left = None, math.inf
        self._share_memory()
        return SegmentRun(running.start_s, running.stretched())

    def wait_for_sms(self) -> Generator[simpy.Event, None, bool]:
        """Wait until the running kernel has ended, as it holds the SMs that communication needs.

        A kernel that begins at this instant holds them too: it stands in its stream already, where communication waits
        for an event of another.
        """
        if not self._interference.queues:
            return False
        yield self._env.timeout(2 * INSTANT_s)
        if self._running is None or not self._running.computes():
            return False
        room = self._env.event()
        self._waiting.append(room)
        self._running.interrupt()
        yield room
        return True

    def memory_demand(self, comm: Comm, members: int, transfer: PlannedTransfer) -> float:
        """Return the share of the memory's time that ``comm`` would take while its bytes move at full speed."""
        return memory_demand(self._interference, comm, members, transfer) if comm.holds_sms else 0.0

    def hold_sms(self, rendezvous: Rendezvous, memory_demand: float) -> None:
        """Put the kernel of a communication on the GPU, where it is not there yet."""
        self._resident[rendezvous] = memory_demand

    def release_sms(self, rendezvous: Rendezvous) -> None:
        """Take the kernel of a communication off the GPU."""
        del self._resident[rendezvous]

    def communication_changed(self) -> None:
        """Wake the running segment where its speed or the demand of memory changes, and share the memory anew.

        What does not run yet asks when it begins.
        """
        if self._running is not None:
            before = self._load, self._memory_demand
            self._load, self._memory_demand = self._present_load()
            if (self._load, self._memory_demand) != before:
                self._running.interrupt()
        self._share_memory()

    def _present_load(self) -> tuple[Hashable, float]:
        """Return the load of the resident communication on kernels, and its demand of the memory's time."""
        waiting = [rendezvous.comm for rendezvous in self._resident if not rendezvous.is_moving]
        moving = [rendezvous.comm for rendezvous in self._resident if rendezvous.is_moving]
        demand = sum(demand for rendezvous, demand in self._resident.items() if rendezvous.is_moving)
        return self._interference.load(waiting, moving), demand

    def _share_memory(self) -> None:
        """Give to what moves bytes the memory's time that the running kernel leaves, in max-min fair shares.

        Where a collective cannot use its share, because others or links hold it back, nobody else gets it.
        """
        if not self._resident:
            return
        moving = [(rendezvous, demand) for rendezvous, demand in self._resident.items() if rendezvous.is_moving]
        part = equal_part([demand for _, demand in moving], self._memory_left)
        for rendezvous, demand in moving:
            rendezvous.limit(self, part / demand if part < demand else 1.0)
