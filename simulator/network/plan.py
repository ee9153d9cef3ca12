"""Plans: the phases of coupled flows of an operation of some size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np

from simulator.arrays import Bools, Floats, Ints


class LinkLoads(Sequence[tuple[int, float]]):
    """Pairs of a link and its load, kept as two arrays until somebody asks for a pair."""

    def __init__(self, links: Ints, load: Floats) -> None:
        self.links, self.load = links, load

    def __len__(self) -> int:
        return len(self.links)

    @overload
    def __getitem__(self, at: int) -> tuple[int, float]: ...

    @overload
    def __getitem__(self, at: slice) -> LinkLoads: ...

    def __getitem__(self, at: int | slice) -> tuple[int, float] | LinkLoads:
        if isinstance(at, slice):
            return LinkLoads(self.links[at], self.load[at])
        return int(self.links[at]), float(self.load[at])

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.links.tolist(), self.load.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True)
class Phase:
    """Flows that advance together, after a latency.

    A ring or a tree is as slow as its slowest hop, so its flows keep a fixed proportion. The phase has one rate, and a
    link carries ``load`` bytes for each byte of the reference flow. Uncontended, the phase lasts
    ``latency_s + nbytes / min(cap_Bps, min over links of capacity / load)``.

    ``nbytes``: bytes of the reference flow. ``loads``: (link index, load) pairs, link indices unique.
    ``cap_Bps``: what the protocol can drive on an idle network (inf: as fast as the links). ``unslowed``: the phase
    without what holds this one up at its ends, if anything does.
    """

    nbytes: float
    loads: Sequence[tuple[int, float]]
    latency_s: float
    cap_Bps: float = math.inf
    unslowed: Phase | None = None

    def slowed(self, speed: float) -> Phase:
        """Return the same phase with this share of its cap, as something at its ends leaves it no more."""
        return replace(self, cap_Bps=self.cap_Bps * speed, unslowed=self)

    @cached_property
    def columns(self) -> tuple[Ints, Floats]:
        """Links with a load, and the loads on them, as arrays."""
        if isinstance(self.loads, LinkLoads):
            links, load = self.loads.links, self.loads.load
        else:
            links = np.array([link for link, _ in self.loads], dtype=np.int64)
            load = np.array([load for _, load in self.loads], dtype=float)
        is_loaded = load > 0
        return (links, load) if is_loaded.all() else (links[is_loaded], load[is_loaded])

    def by_nic(self, is_port: Bools) -> Phase:
        """Return the same phase with the flow through its busiest NIC as reference, where it crosses one.

        ``is_port``: whether each link is a port of a NIC. Max-min fairness is of reference flows. Two operations on one
        NIC then have equal parts of it, however much else each of them moves inside its nodes.
        """
        links, loads = self.columns
        at_nic = float(loads[is_port[links]].max(initial=0.0)) or 1.0
        return Phase(self.nbytes * at_nic, LinkLoads(links, loads / at_nic), self.latency_s, self.cap_Bps * at_nic)


@dataclass(frozen=True, slots=True)
class Plan:
    """An operation as one algorithm performs it: phases one after another.

    ``protocol`` is NCCL's, where it has one. ``sent_bytes``: what all members together send to one another. What a GPU
    hands on to its NIC for another GPU (PXN) is on the links, but is not counted here. ``channels``: the rings or trees
    among which the message is split.
    """

    algorithm: str
    phases: tuple[Phase, ...]
    protocol: str = ""
    sent_bytes: float = 0.0
    channels: int = 1

    def at_most(self, rate_Bps: float) -> Plan:
        """Return the same plan where something at its ends moves no more than ``rate_Bps``."""
        return replace(self, phases=tuple(replace(one, cap_Bps=min(one.cap_Bps, rate_Bps)) for one in self.phases))

    @property
    def moving_s(self) -> float:
        """Seconds in which bytes move, where each phase reaches its cap."""
        return sum(phase.nbytes / phase.cap_Bps for phase in self.phases if phase.loads)

    @property
    def latency_s(self) -> float:
        """Seconds of all latencies."""
        return sum(phase.latency_s for phase in self.phases)
