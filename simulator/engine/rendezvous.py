"""A communication of the simulated ranks of a group: who has called it, and which bytes of it are under way."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import simpy

from simulator.engine.representatives import PlannedComm
from simulator.network.flows import Network, Transmission
from simulator.program import Comm


@dataclass(eq=False)
class Rendezvous:
    """A communication that waits for its members, then has its bytes under way as ``transmission``.

    ``callers``: number of a rank that has called it -> its demand of its memory's time at full speed. ``done`` fires
    with the time that the bytes departed and the time that they arrived.
    """

    network: Network
    comm: Comm
    planned: PlannedComm
    done: simpy.Event
    callers: dict[int, float] = field(default_factory=dict)
    transmission: Transmission | None = None
    _speeds: dict[Hashable, float] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Numbers of the ranks that have not called it yet."""
        return [member for member in self.planned.members if member not in self.callers]

    def limit(self, gpu: Hashable, speed: float) -> None:
        """Let ``gpu`` allow the bytes under way this share of full speed. The slowest member decides."""
        if self._speeds.get(gpu, 1.0) == speed:
            return
        assert self.transmission is not None
        self._speeds[gpu] = speed
        slowest = min(self._speeds.values())
        if slowest != self.transmission.speed:
            self.network.slow(self.transmission, slowest)
