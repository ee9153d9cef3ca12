"""A simulated rank: its place in groups, its GPU and host, and how far its lanes have come."""

from __future__ import annotations

from collections.abc import Container, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import simpy

from simulator.costs.interference import InterferenceCost
from simulator.engine.block_pieces import GpuSpeed
from simulator.engine.gpu import SimulatedGpu
from simulator.engine.host import SimulatedHost
from simulator.engine.rendezvous import Rendezvous


class Awaited(Enum):
    """Things that a lane waits for beside steps and communication."""

    EXTENSION = "an extension of the program"


@dataclass(frozen=True, eq=False)
class PlacedRank:
    """A simulated rank of a role; ``speed`` is that of its GPU.

    ``positions`` are its places in its groups, and ``group_sizes`` the members of these, by axis. ``interference`` says
    what communication takes from kernels of its GPU; None: nothing.
    """

    number: int
    role: int
    positions: Mapping[str, int]
    group_sizes: Mapping[str, int]
    speed: GpuSpeed
    interference: InterferenceCost | None


class Rank:
    """A ``placed`` rank that is played.

    ``next_step[lane]`` is the step that a lane has come to. ``waits_for[lane]`` is the label of the step that the lane
    runs or waits for, or the communication that it waits for. A lane that does nothing has none, unless an extension of
    the program may come for it.
    """

    def __init__(
        self,
        env: simpy.Environment,
        placed: PlacedRank,
        gpu: SimulatedGpu,
        host: SimulatedHost,
    ) -> None:
        self.placed = placed
        self.number = placed.number
        self.role = placed.role
        self.gpu = gpu
        self.host = host
        self.next_step: dict[str, int] = {}
        self.waits_for: dict[str, str | Rendezvous | Awaited] = {}
        self._env = env
        self._ended: set[str] = set()
        self._ends: dict[str, simpy.Event] = {}  # of steps that somebody waits for

    def wait_for_steps(self, lane: str, labels: Sequence[str]) -> Generator[simpy.Event, None, None]:
        """Let ``lane`` wait until these steps of the rank have ended."""
        for label in labels:
            if label not in self._ended:
                self.waits_for[lane] = label
                if label not in self._ends:
                    self._ends[label] = self._env.event()
                yield self._ends[label]

    def end_step(self, lane: str, label: str) -> None:
        """Say that the step that ``lane`` has run has ended."""
        del self.waits_for[lane]
        self._ended.add(label)
        if label in self._ends:
            self._ends.pop(label).succeed()

    def wait_for_extension(self, lane: str, arrival: simpy.Event) -> Generator[simpy.Event, None, None]:
        """Let ``lane`` wait until the program has been extended for it."""
        self.waits_for[lane] = Awaited.EXTENSION
        yield arrival
        del self.waits_for[lane]

    def is_idle_until(self, lane: str, labels: Container[str]) -> bool:
        """Tell whether ``lane`` does nothing until one of these steps has ended, which has not."""
        if lane not in self.next_step:  # it begins at this instant
            return False
        waits_for = self.waits_for.get(lane)
        return waits_for is None or (waits_for in labels and waits_for not in self._ended)
