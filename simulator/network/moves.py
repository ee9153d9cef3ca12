"""Moves: the hops that an algorithm makes on a group of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from simulator.hardware.transport import TransportKind, Way

#: From the least to the most limiting: a hop is of the last kind that it crosses.
KINDS: tuple[TransportKind, ...] = get_args(TransportKind)
#: The end point that stands for switches that sum up and multicast. Without a NIC it is the NVSwitch of the node that
#: the other end is in. With one it is the switches of the fabric: they add up what all NICs of that number send, and
#: send back the sum.
SWITCH = -1


class Hop(NamedTuple):
    """A transfer between end points: GPUs, hosts' memory, or switches that sum up and multicast.

    It goes through NIC ``nic`` of both nodes if given. It carries ``load`` bytes per byte of message, and stands
    ``weight`` times on the critical path."""

    sender: int
    receiver: int
    nic: int | None
    load: float
    weight: float


@dataclass(frozen=True, eq=False)
class AllPairs:
    """Equal hops from each of ``ranks`` to each other one."""

    ranks: tuple[int, ...]
    load: float
    weight: float

    def __iter__(self) -> Iterator[Hop]:
        for a in self.ranks:
            for b in self.ranks:
                if a != b:
                    yield Hop(a, b, None, self.load, self.weight)


@dataclass(frozen=True, eq=False)
class Moves:
    """Hops that an algorithm makes on a group of ranks at one time; they advance in lock-step.

    ``local_share`` is the share of the message that each rank handles without a link. ``efficiency`` is the bandwidth
    reached, relative to a ring of the same load; ``counted``: the share of it that NCCL's tuner counts on. ``way``:
    what carries it out; of sends and receives, ``peers`` counts those of each rank. ``channels``: the rings or trees
    among which the message is split. ``software``: of a hop, relative to one of a ring. ``goes_on``: it is a further
    step of the kernel that made the moves before it, in the same protocol; else a kernel starts with it.
    """

    hops: AllPairs | Sequence[Hop]
    local_share: float = 0.0
    efficiency: float = 1.0
    way: Way = "protocols"
    peers: int = 0
    counted: float = 1.0
    channels: int = 1
    software: float = 1.0
    goes_on: bool = False

    @property
    def heads(self) -> int:
        """Number of parts of the message, each with a head, that switches sum up; 0 where they sum up nothing."""
        return self.channels if self.way == "in_switch" else 0

    @property
    def manner(self) -> tuple[object, ...]:
        """Everything but the hops that the time of a message depends on."""
        return (
            self.local_share,
            self.efficiency,
            self.way,
            self.peers,
            self.heads,
            self.counted,
            self.software,
            self.goes_on,
        )
