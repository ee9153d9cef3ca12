"""A segment of kernels that runs on a GPU whose speed changes."""

from __future__ import annotations

import math
from collections.abc import Hashable

import simpy

from simulator.arrays import Floats
from simulator.engine.block_pieces import Segment
from simulator.engine.kernel_times import joined_times
from simulator.engine.memory_bandwidth import INSTANT_s, share_left
from simulator.engine.templates import TemplateStore


class RunningSegment:
    """A segment under way: the times of its ops at the GPU's present load, and at those before.

    ``process`` is that of the lane that runs it. The segment begins ``now``; its host launches it from ``host_s`` on.
    """

    def __init__(
        self,
        process: simpy.Process,
        store: TemplateStore,
        segment: Segment,
        host_s: float,
        load: Hashable,
        now: float,
    ) -> None:
        self._process = process
        self._store, self._segment, self._host_s = store, segment, host_s
        self._is_kernel = store.is_kernel[segment.template]
        self._memory_left = store.memory_left(segment.template)
        self._load, self._paced = load, store.paced(segment.template, load)
        self._times = self._paced.times(host_s, 0, None, now)
        self._history = [self._times]
        self.is_interrupted = False
        self.start_s = self._times.at_s + self._times.start[0]
        self.last_op = len(self._is_kernel) - 1

    def op_at(self, now: float) -> int:
        """Return the op that runs now, or the next where none does; the last one at the end."""
        return min(self._times.op_at(now), self.last_op)

    def end_s(self, op: int, now: float) -> float:
        """Return when ``op`` ends if nothing changes, but no time that has passed."""
        return max(self._times.at_s + self._times.end[op], now)

    def computes(self, now: float) -> bool:
        """Tell whether a kernel that has begun, be it at this instant, is still to end."""
        soon_s = now + INSTANT_s
        op = self._times.op_at(soon_s)
        return op <= self.last_op and bool(self._is_kernel[op]) and self._times.has_begun(op, soon_s)

    def has_less_left_than(self, demand: float) -> bool:
        """Tell whether an op leaves a smaller share of the memory's time than ``demand``."""
        return demand > 0 and demand > self._memory_left.least

    def memory_left(self, demand: float, now: float) -> tuple[float, float]:
        """Return the share of the memory's time that the present op leaves, and when that changes (`share_left`).

        Where all ops leave as much as ``demand``, both are inf.
        """
        if not self.has_less_left_than(demand):
            return math.inf, math.inf
        return share_left(self._memory_left.by_op, self._times, now)

    def interrupt(self) -> None:
        """Let the lane go on at this instant: something on the GPU has changed."""
        if not self.is_interrupted:
            self.is_interrupted = True
            self._process.interrupt()

    def change_load(self, load: Hashable, now: float) -> None:
        """Go on under another load. Ops that have ended stay; the present one keeps what is left of its work."""
        if load == self._load:
            return
        op = self.op_at(now)
        begun = self._times.has_begun(op, now)
        left_s = (self._times.at_s + self._times.end[op] - now) * self._paced.speed[op] if begun else None
        self._load, self._paced = load, self._store.paced(self._segment.template, load)
        self._times = self._paced.times(self._host_s, op, left_s, now)
        self._history.append(self._times)

    def stretched(self, now: float) -> tuple[Floats, Floats] | None:
        """Return start and end of each op, once all have ended; None where they ran straight through at full speed."""
        if now - self.start_s > self._segment.seconds * (1 + 1e-12):
            return joined_times(self._history)
        return None
