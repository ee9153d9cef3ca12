"""Plans: the phases of coupled flows of an operation of some size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Bools


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
    loads: tuple[tuple[int, float], ...]
    latency_s: float
    cap_Bps: float = math.inf
    unslowed: Phase | None = None

    def slowed(self, speed: float) -> Phase:
        """Return the same phase with this share of its cap, as something at its ends leaves it no more."""
        return replace(self, cap_Bps=self.cap_Bps * speed, unslowed=self)

    @cached_property
    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Links with a load, and the loads on them, as arrays."""
        loaded = [(link, load) for link, load in self.loads if load > 0]
        return np.array([link for link, _ in loaded], dtype=np.int64), np.array(
            [load for _, load in loaded], dtype=float
        )

    def by_nic(self, is_port: Bools) -> Phase:
        """Return the same phase with the flow through its busiest NIC as reference, where it crosses one.

        ``is_port``: whether each link is a port of a NIC. Max-min fairness is of reference flows. Two operations on one
        NIC then have equal parts of it, however much else each of them moves inside its nodes.
        """
        links, loads = self.columns
        at_nic = float(loads[is_port[links]].max(initial=0.0)) or 1.0
        per_nic = tuple(zip(links.tolist(), (loads / at_nic).tolist(), strict=True))
        return Phase(self.nbytes * at_nic, per_nic, self.latency_s, self.cap_Bps * at_nic)


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
