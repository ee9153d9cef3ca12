"""A rank that is played: where it stands, what is on its GPU, and whom it waits for."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import simpy
from numpy.typing import NDArray

from simulator.arrays import Floats
from simulator.costs import Costs
from simulator.engine.blocks import Running
from simulator.engine.host import Errand, HostSpeeds
from simulator.engine.kernel_times import Course
from simulator.engine.representatives import Transfer
from simulator.network.flows import Motion
from simulator.program import Comm

#: What happens within it happens at once, be it added up in one order or another.
INSTANT_s = 1e-12


@dataclass(eq=False)
class Meeting:
    """A communication that waits for its members, then has its bytes in ``motion``. ``done`` fires with the time it
    began. ``takes``: the share of the time of a member's memory that it takes at full speed; ``speeds``: what share of
    that speed each lets it have."""

    comm: Comm
    transfer: Transfer
    done: simpy.Event
    arrived: list[Rank] = field(default_factory=list)
    takes: dict[Rank, float] = field(default_factory=dict)
    speeds: dict[Rank, float] = field(default_factory=dict)
    motion: Motion | None = None


class Rank:
    """One simulated rank: its position on every axis, what has ended, what is under way."""

    def __init__(
        self,
        number: int,
        runs: Running,
        host: HostSpeeds,
        costs: Costs,
        positions: dict[str, int],
        errands: tuple[Errand, ...],
    ) -> None:
        self.number = number
        self.errands = errands
        self.runs = runs
        self.host = host
        self.costs = costs
        self.positions = positions
        self.ended: set[str] = set()
        self.waiters: dict[str, simpy.Event] = {}
        self.host_s = 0.0
        self.issued_s: dict[str, float] = {}
        self.synchronised_s: dict[str, float] = {}
        self.resident: list[Meeting] = []
        self.load: Hashable = None
        self.takes, self.leaves = 0.0, math.inf  # of its memory's time: what moves, what the kernel under way
        self.under_way: UnderWay | None = None
        self.queued: list[simpy.Event] = []
        self.next_step: dict[str, int] = {}
        self.waits_for: dict[str, str | Meeting] = {}

    def synchronise(self, labels: Iterable[str]) -> None:
        """Let the host catch up with the batches among ``labels``, for which it is about to issue what waits.

        Megatron-LM synchronises the device after ``batch_isend_irecv``, so that its host cannot run ahead. What the
        host has issued before, it has issued, however many pieces of it are played at once.
        """
        ended_s = [self.synchronised_s[label] for label in labels if label in self.synchronised_s]
        self.host_s = max([self.host_s, *ended_s])

    def go_on(self, errand: Errand) -> None:
        """Its host does what stands before a step of the compute lane."""
        for label, seconds in errand.issues:
            self.host_s += seconds
            if label:
                self.issued_s[label] = self.host_s
        self.host_s += errand.start_s


@dataclass(slots=True, eq=False)
class UnderWay:
    """A run that is being played: the ``course`` of its ops as far as is known, and which are ``kernels``. ``timer`` is
    what its lane waits for; ``disturbed``: all that has to be worked out anew."""

    course: Course
    kernels: NDArray[np.bool_]
    timer: simpy.Event
    disturbed: bool = False

    def disturb(self) -> None:
        """Who waits for the timer goes on at this instant. What it would call is moved to another event, so that a run
        waits for one, and not for two that race."""
        if not self.disturbed:
            self.disturbed = True
            now = self.timer.env.event()
            now.callbacks, self.timer.callbacks = self.timer.callbacks, []
            now.succeed()

    def computes(self, now: float) -> bool:
        """Whether a kernel that has begun ends after ``now``."""
        op = self.course.under_way(now + INSTANT_s)
        return op < len(self.kernels) and bool(self.kernels[op]) and self.course.begun(op, now + INSTANT_s)


def left_from(leaves: Floats, course: Course, now: float) -> tuple[float, float]:
    """What the op under way ``leaves`` of the memory's time (inf between two), and when that changes (inf: not any
    more)."""
    starts, ends, at = course.starts, course.ends, now + INSTANT_s - course.at_s
    op = course.under_way(now + INSTANT_s)
    if op == len(ends):
        return math.inf, math.inf
    if math.isinf(leaves[op]) or starts[op] > at:
        demanding = np.flatnonzero((leaves[op:] < math.inf) & (starts[op:] > at))
        return math.inf, course.at_s + float(starts[op + demanding[0]]) if len(demanding) else math.inf
    # Until one that leaves another share, or until the host is late.
    other = (leaves[op + 1 :] != leaves[op]) | (starts[op + 1 :] > ends[op:-1] + INSTANT_s)
    last = op + int(other.argmax()) if other.any() else len(ends) - 1
    return float(leaves[op]), course.at_s + float(ends[last])
