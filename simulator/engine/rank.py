"""A rank that is played: where it stands, what is on its GPU, and whom it waits for."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import simpy
from numpy.typing import NDArray

from simulator.costs import Costs
from simulator.engine.blocks import Running
from simulator.engine.host import Errand, HostSpeeds
from simulator.engine.world import Transfer
from simulator.network.flows import Motion
from simulator.program import Comm
from simulator.timeline import Floats

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
        self.resident: list[Meeting] = []
        self.load: Hashable = None
        self.takes, self.leaves = 0.0, math.inf  # of its memory's time: what moves, what the kernel under way
        self.under_way: UnderWay | None = None
        self.queued: list[simpy.Event] = []
        self.next_step: dict[str, int] = {}
        self.waits_for: dict[str, str | Meeting] = {}

    def go_on(self, errand: Errand) -> None:
        """Its host does what stands before a step of the compute lane."""
        for label, seconds in errand.issues:
            self.host_s += seconds
            if label:
                self.issued_s[label] = self.host_s
        self.host_s += errand.start_s


@dataclass(eq=False)
class UnderWay:
    """A run that is being played: when its ops start and end as far as is known, and which are kernels.
    ``disturbed`` fires when that has to be worked out anew."""

    starts: Floats
    ends: Floats
    kernels: NDArray[np.bool_]
    disturbed: simpy.Event

    def disturb(self) -> None:
        if not self.disturbed.triggered:
            self.disturbed.succeed()

    def computes(self, now: float) -> bool:
        """Whether a kernel that has begun ends after ``now``."""
        op = int(np.searchsorted(self.ends, now + INSTANT_s, side="right"))
        return op < len(self.ends) and bool(self.kernels[op]) and bool(self.starts[op] <= now)


def left_from(leaves: Floats, starts: Floats, ends: Floats, now: float) -> tuple[float, float]:
    """What the op under way ``leaves`` of the memory's time (inf between two), and when that changes (inf: not any
    more)."""
    op = int(np.searchsorted(ends, now + INSTANT_s, side="right"))
    if op == len(ends):
        return math.inf, math.inf
    if math.isinf(leaves[op]) or starts[op] > now + INSTANT_s:
        demanding = np.flatnonzero((leaves[op:] < math.inf) & (starts[op:] > now + INSTANT_s))
        return math.inf, float(starts[op + demanding[0]]) if len(demanding) else math.inf
    # Until one that leaves another share, or until the host is late.
    other = (leaves[op + 1 :] != leaves[op]) | (starts[op + 1 :] > ends[op:-1] + INSTANT_s)
    last = op + int(other.argmax()) if other.any() else len(ends) - 1
    return float(leaves[op]), float(ends[last])
