"""Max-min fair rates of transfers that share links, and the links that hold transfers up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Bools, Floats, Ints, by_appearance
from simulator.network.plan import Phase

#: Bytes/s of every link, by index.
Capacity = Sequence[float] | NDArray[np.float64]
#: Two constraints closer than this (relative) bind together.
TIE = 1e-12
#: A flow slower than its cap by less than this share is not held up, and a link less short of full than that is full.
SLACK = 1e-9


def max_min_rates(phases: Sequence[Phase], capacity: Capacity) -> list[float]:
    """Return the max-min fair rates of the phases' reference flows, by progressive filling, bytes/s.

    All rates rise together. When a link is full, the phases that cross it stop. When a phase reaches its cap, it stops
    (Bertsekas and Gallager, Data Networks, section 6.5.2, with loads as weights on the links).
    ``capacity`` is indexed by link, bytes/s. A phase bound by nothing gets ``inf``.

    Two flows share a 10 B/s link; one of them is capped at 2 B/s, so the other takes the rest:

    >>> a, b = Phase(1, ((0, 1.0),), 0.0, cap_Bps=2.0), Phase(1, ((0, 1.0),), 0.0)
    >>> max_min_rates([a, b], [10.0])
    [2.0, 8.0]
    """
    if not phases:
        return []
    if len(phases) == 1:
        (phase,) = phases
        return [float(min([phase.cap_Bps, *[capacity[link] / load for link, load in phase.loads if load > 0]]))]
    on = _Crossings.from_phases(phases)
    left = np.asarray(capacity, dtype=float)[on.links]
    caps = np.array([phase.cap_Bps for phase in phases])
    rates, rising = np.zeros(len(phases)), np.ones(len(phases), dtype=bool)
    level = 0.0
    while rising.any():
        # Summed up anew, not subtracted from, so that no rounding is left of those that have stopped.
        pressure = on.sums(rising)
        rise_of_link = np.divide(left, pressure, out=np.full(len(left), math.inf), where=pressure > 0)
        rise = min(float(rise_of_link.min(initial=math.inf)), float(caps[rising].min()) - level)
        if math.isinf(rise):
            rates[rising] = math.inf
            break
        threshold = rise + TIE * (level + rise)
        stopped = caps - level <= threshold
        stopped[on.phase[(rise_of_link <= threshold)[on.link]]] = True
        level += rise
        left = np.maximum(left - pressure * rise, 0.0)
        rates[rising & stopped] = level
        rising &= ~stopped
    as_list: list[float] = rates.tolist()
    return as_list


@dataclass(frozen=True, eq=False)
class _Crossings:
    """Crossings of phases and links: phase number ``phase[i]`` puts ``load[i]`` on link ``links[link[i]]``.

    ``links`` are in the order in which phases name them.
    """

    phase: NDArray[np.int64]
    link: NDArray[np.int64]
    load: NDArray[np.float64]
    links: NDArray[np.int64]

    @classmethod
    def from_phases(cls, phases: Sequence[Phase]) -> _Crossings:
        columns = [phase.columns for phase in phases]
        named = np.concatenate([links for links, _ in columns])
        load = np.concatenate([loads for _, loads in columns])
        phase = np.repeat(np.arange(len(phases)), [len(links) for links, _ in columns])
        first, link = by_appearance(named)
        return cls(phase, link, load, named[first])

    def sums(self, per_phase: NDArray[Any]) -> NDArray[np.float64]:
        """Sum up on every link the loads, each times the value of its phase in ``per_phase``."""
        weights = self.load * per_phase[self.phase]
        return np.bincount(self.link, weights, len(self.links)).astype(float, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class Saturation:
    """A state of a full link that holds somebody up: the ``phases`` that cross it, and their ``rates`` (bytes/s).

    ``held_up`` says of each phase that this link is its bottleneck: nobody on the link is faster.
    """

    link: int
    phases: tuple[Phase, ...]
    rates: tuple[float, ...]
    held_up: tuple[bool, ...]


@dataclass(frozen=True)
class Saturations:
    """States of full links as columns, an entry of each per state, and those of the phases that cross their links.

    ``link``, ``seconds``: of each state, its link, and the seconds in which it held somebody up.
    ``state``: of each phase on a full link, its state; ``phase`` indexes ``phases``, which are without what slows them.
    ``rate_Bps``, ``cap_Bps``: bytes/s of its reference flow, and the most that it could have. ``is_held_up``: as in
    `Saturation`.
    """

    phases: tuple[Phase, ...]
    link: Ints
    seconds: Floats
    state: Ints
    phase: Ints
    rate_Bps: Floats
    cap_Bps: Floats
    is_held_up: Bools

    @classmethod
    def from_states(cls, saturated_s: Mapping[Saturation, float]) -> Saturations:
        """Return the columns of states and their seconds."""
        states = tuple(saturated_s)
        crossing = [phase for state in states for phase in state.phases]
        unslowed = [phase.unslowed or phase for phase in crossing]
        by_id = {id(phase): phase for phase in unslowed}
        numbers = {key: number for number, key in enumerate(by_id)}
        return cls(
            phases=tuple(by_id.values()),
            link=np.array([state.link for state in states], dtype=np.int64),
            seconds=np.array(list(saturated_s.values()), dtype=np.float64),
            state=np.repeat(np.arange(len(states)), np.array([len(state.phases) for state in states], dtype=np.int64)),
            phase=np.array([numbers[id(phase)] for phase in unslowed], dtype=np.int64),
            rate_Bps=np.array([rate for state in states for rate in state.rates], dtype=np.float64),
            cap_Bps=np.array([phase.cap_Bps for phase in crossing], dtype=np.float64),
            is_held_up=np.array([held_up for state in states for held_up in state.held_up], dtype=bool),
        )


def saturations(phases: Sequence[Phase], rates: Sequence[float], capacity: Capacity) -> tuple[Saturation, ...]:
    """Return the links that hold a phase below its cap, at max-min fair ``rates``, in the order of first naming.

    A phase that several links hold up alike is held up by each.
    """
    rate = np.asarray(rates)
    slow = rate < np.array([phase.cap_Bps for phase in phases]) * (1 - SLACK)
    if not slow.any():
        return ()
    on = _Crossings.from_phases(phases)
    full = on.sums(rate) >= np.asarray(capacity, dtype=float)[on.links] * (1 - SLACK)
    fastest = np.zeros(len(on.links))
    np.maximum.at(fastest, on.link, rate[on.phase])
    held_up = slow[on.phase] & full[on.link] & (rate[on.phase] >= fastest[on.link] * (1 - SLACK))
    is_bottleneck = np.zeros(len(on.links), dtype=bool)
    is_bottleneck[on.link[held_up]] = True
    entries = np.flatnonzero(is_bottleneck[on.link])
    entries = entries[np.argsort(on.link[entries], kind="stable")]
    states: dict[int, tuple[list[Phase], list[float], list[bool]]] = {}
    columns = (column[entries].tolist() for column in (on.link, on.phase, held_up))
    for link, number, is_held_up in zip(*columns, strict=True):
        state = states.setdefault(link, ([], [], []))
        state[0].append(phases[number])
        state[1].append(rates[number])
        state[2].append(is_held_up)
    return tuple(
        [
            Saturation(int(on.links[link]), tuple(on_link), tuple(at), tuple(up))
            for link, (on_link, at, up) in states.items()
        ]
    )
