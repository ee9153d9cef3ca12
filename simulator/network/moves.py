"""Moves: the hops that an algorithm makes on a group of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np

from simulator.arrays import Floats, Ints
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
class HopTable:
    """Hops by columns, a place in each for every hop; ``nic`` is -1 where the hop names none."""

    sender: Ints
    receiver: Ints
    nic: Ints
    load: Floats
    weight: Floats

    @classmethod
    def from_hops(cls, hops: Sequence[Hop]) -> HopTable:
        """Return the columns of hops."""
        rows = [(hop.sender, hop.receiver, -1 if hop.nic is None else hop.nic) for hop in hops]
        figures = [(hop.load, hop.weight) for hop in hops]
        sender, receiver, nic = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        load, weight = np.array(figures, dtype=float).reshape(-1, 2).T
        return cls(sender, receiver, nic, load, weight)

    @classmethod
    def alike(
        cls, sender: Ints, receiver: Ints, nic: int | Ints | None, load: float, weight: float | Floats
    ) -> HopTable:
        """Return hops of one load, through one NIC and of one weight unless these are columns."""
        through = np.broadcast_to(np.int64(-1) if nic is None else nic, len(sender))
        figures = (np.broadcast_to(np.asarray(figure, dtype=float), len(sender)) for figure in (load, weight))
        return cls(sender, receiver, through, *figures)

    @classmethod
    def joined(cls, tables: Sequence[HopTable]) -> HopTable:
        """Return the hops of one table after those of another."""
        columns = zip(*[(one.sender, one.receiver, one.nic, one.load, one.weight) for one in tables], strict=True)
        sender, receiver, nic, load, weight = map(np.concatenate, columns)
        return cls(sender, receiver, nic, load, weight)

    def __len__(self) -> int:
        return len(self.sender)

    def __iter__(self) -> Iterator[Hop]:
        ends = zip(self.sender.tolist(), self.receiver.tolist(), self.nic.tolist(), strict=True)
        for (sender, receiver, nic), load, weight in zip(ends, self.load.tolist(), self.weight.tolist(), strict=True):
            yield Hop(sender, receiver, None if nic < 0 else nic, load, weight)


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

    hops: AllPairs | HopTable | Sequence[Hop]
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
