"""Bytes in motion: transfers share links at their max-min fair rates, on SimPy's clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import EventPriority

from simulator.network.plan import Phase, Plan

#: Bytes/s of every link, by index.
Capacity = Sequence[float] | NDArray[np.float64]
#: Rates are re-solved after everything else that happens at an instant, so that an instant is solved once.
_AFTER_ALL_ELSE = cast(EventPriority, 2)
#: Two constraints closer than this (relative) bind together.
_TIE = 1e-12
#: Meetings of transfers whose rates are remembered.
_REMEMBERED = 100_000
#: A flow slower than its cap by less than this share is not held up, and a link less short of full than that is full.
_SLACK = 1e-9


def max_min_rates(phases: Sequence[Phase], capacity: Capacity) -> list[float]:
    """Max-min fair rates of the phases' reference flows, by progressive filling, bytes/s.

    All rates rise together; when a link is full, the phases that cross it stop; when a phase reaches its cap, it
    stops (Bertsekas and Gallager, Data Networks, section 6.5.2, with loads as weights on the links).
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
    on = _Crossings.of(phases)
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
        threshold = rise + _TIE * (level + rise)
        stopped = caps - level <= threshold
        stopped[on.phase[(rise_of_link <= threshold)[on.link]]] = True
        level += rise
        left = np.maximum(left - pressure * rise, 0.0)
        rates[rising & stopped] = level
        rising &= ~stopped
    found: list[float] = rates.tolist()
    return found


@dataclass(frozen=True, eq=False)
class _Crossings:
    """Who crosses what: phase number ``phase[i]`` puts ``load[i]`` on link ``links[link[i]]``; ``links`` are in the
    order in which phases name them."""

    phase: NDArray[np.int64]
    link: NDArray[np.int64]
    load: NDArray[np.float64]
    links: NDArray[np.int64]

    @classmethod
    def of(cls, phases: Sequence[Phase]) -> _Crossings:
        columns = [phase.columns for phase in phases]
        named = np.concatenate([links for links, _ in columns])
        load = np.concatenate([loads for _, loads in columns])
        phase = np.repeat(np.arange(len(phases)), [len(links) for links, _ in columns])
        links, first, link = np.unique(named, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return cls(phase, place[link], load, links[order])

    def sums(self, of_phase: NDArray[Any]) -> NDArray[np.float64]:
        """On every link, the loads times what ``of_phase`` says of their phases."""
        weights = self.load * of_phase[self.phase]
        return np.bincount(self.link, weights, len(self.links)).astype(float, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class Full:
    """A state of a link that holds somebody up: the ``phases`` on it, their ``rates`` (bytes/s), and which of them it
    is the ``bottleneck`` of: it is full, and nobody on it is faster."""

    link: int
    phases: tuple[Phase, ...]
    rates: tuple[float, ...]
    bottleneck: tuple[bool, ...]


def full_links(phases: Sequence[Phase], rates: Sequence[float], capacity: Capacity) -> tuple[Full, ...]:
    """The links that hold a phase below its cap, at max-min fair ``rates``, in the order in which phases name them.

    A phase that several links hold up alike is held up by each.
    """
    rate = np.asarray(rates)
    slow = rate < np.array([phase.cap_Bps for phase in phases]) * (1 - _SLACK)
    if not slow.any():
        return ()
    on = _Crossings.of(phases)
    full = on.sums(rate) >= np.asarray(capacity, dtype=float)[on.links] * (1 - _SLACK)
    fastest = np.zeros(len(on.links))
    np.maximum.at(fastest, on.link, rate[on.phase])
    held = slow[on.phase] & full[on.link] & (rate[on.phase] >= fastest[on.link] * (1 - _SLACK))
    full = np.zeros(len(on.links), dtype=bool)
    full[on.link[held]] = True
    states: dict[int, tuple[list[Phase], list[float], list[bool]]] = {}
    there = np.flatnonzero(full[on.link])
    there = there[np.argsort(on.link[there], kind="stable")]
    for link, number, is_held in zip(
        on.link[there].tolist(), on.phase[there].tolist(), held[there].tolist(), strict=True
    ):
        state = states.setdefault(link, ([], [], []))
        state[0].append(phases[number])
        state[1].append(rates[number])
        state[2].append(is_held)
    return tuple(
        [Full(int(on.links[link]), tuple(who), tuple(at), tuple(kept)) for link, (who, at, kept) in states.items()]
    )


@dataclass(frozen=True, slots=True)
class _Solved:
    """What phases that meet come to. They are kept beside it, so that their ids stay their own."""

    phases: list[Phase]
    rates: list[float]
    full: tuple[Full, ...]


@dataclass(slots=True, eq=False)
class Motion:
    """A plan under way, at ``speed`` of what its phases can drive; ``flow``: that of its phase, where bytes move."""

    plan: Plan
    then: Callable[[], None]
    speed: float = 1.0
    flow: _Flow | None = None


@dataclass(slots=True, eq=False)
class _Flow:
    """A phase under way: ``left`` bytes at time ``since``, moving at ``rate``; ``then`` is called at its end.

    ``timer`` is the end now expected. A flow that found its links empty is ``alone`` until another comes; ``full`` are
    those of them that hold it up even then.
    """

    phase: Phase
    then: Callable[[], None]
    left: float
    since: float
    rate: float = 0.0
    alone: bool = False
    full: tuple[Full, ...] = ()
    timer: simpy.Event | None = None


class Network:
    """Links with capacities, and the transfers now crossing them.

    Rates are solved again only at an instant when a transfer starts or ends, and only for the transfers that share a
    link, directly or through others, with what changed. A transfer that meets nobody costs one event.
    ``full_s`` is the record of contention: for how long links have been in each state in which they held somebody up;
    complete once `finish` has been called.
    """

    def __init__(self, env: simpy.Environment, capacity_Bps: Sequence[float]) -> None:
        self._env = env
        self._capacity = np.array(capacity_Bps, dtype=float)
        self._on_link: list[dict[_Flow, None]] = [{} for _ in capacity_Bps]
        self._changed: dict[int, None] = {}
        self._solving = False
        self._solved: dict[tuple[int, ...], _Solved] = {}
        self._slowed: dict[tuple[int, float], Phase] = {}
        self._full: dict[int, tuple[Full, float]] = {}  # link -> its state, and since when
        self.full_s: dict[Full, float] = {}

    def transfer(self, plan: Plan, then: Callable[[], None]) -> Motion:
        """Start ``plan`` now; ``then`` is called when its last byte has arrived."""
        motion = Motion(plan, then)
        self._start(motion, 0)
        return motion

    def pace(self, motion: Motion, speed: float) -> None:
        """From now on its ends let ``motion`` have this share of what its phases can drive; latencies stay."""
        motion.speed = speed
        flow = motion.flow
        if flow is None:
            return
        self._no_longer_alone(flow)
        flow.phase = self._paced(flow.phase.unslowed or flow.phase, speed)
        if flow in self._on_link[flow.phase.loads[0][0]]:
            self._touch(flow.phase)

    def _paced(self, phase: Phase, speed: float) -> Phase:
        """Each slowed phase once, so that rates solved for it are found again."""
        if speed == 1:
            return phase
        key = id(phase), speed
        if key not in self._slowed:
            self._slowed[key] = phase.slowed(speed)
        return self._slowed[key]

    def occupy(self, phase: Phase) -> None:
        """Let background traffic cross the links of ``phase`` from now on and for ever, as fast as its cap and its fair
        share allow."""
        self._join(_Flow(phase, lambda: None, math.inf, self._env.now))

    def alone_s(self, plan: Plan) -> float:
        """Seconds that ``plan`` takes while nothing else crosses its links."""
        return sum(
            phase.latency_s + (phase.nbytes / self._solve_for([phase]).rates[0] if phase.nbytes > 0 else 0.0)
            for phase in plan.phases
        )

    def add_alone(self, plan: Plan, times: int) -> None:
        """Add to the record that ``plan`` has been played so often with nothing else on its links."""
        for phase in plan.phases:
            if phase.nbytes > 0:
                solved = self._solve_for([phase])
                for full in solved.full:
                    self._add(full, times * phase.nbytes / solved.rates[0])

    def finish(self, at_s: float) -> None:
        """Complete the record of background traffic, which is there until ``at_s``."""
        for link in list(self._full):
            self._leave(link, at_s)

    def _start(self, motion: Motion, index: int) -> None:
        """Start phase ``index``; the next ones follow it, then ``then``."""
        phases, motion.flow = motion.plan.phases, None
        if index == len(phases):
            motion.then()
            return
        phase = self._paced(phases[index], motion.speed)
        go_on = partial(self._start, motion, index + 1)
        if phase.nbytes <= 0 or not phase.loads:
            seconds = phase.latency_s + (phase.nbytes / phase.cap_Bps if phase.nbytes > 0 else 0.0)
            self._env.timeout(seconds).callbacks.append(lambda _: go_on())
            return
        flow = motion.flow = _Flow(phase, go_on, phase.nbytes, self._env.now + phase.latency_s)
        met = dict.fromkeys(other for link, _ in phase.loads for other in self._on_link[link])
        if met:
            for other in met:
                self._no_longer_alone(other)
            self._join_later(flow)
            return
        flow.alone = True
        solved = self._solve_for([phase])
        flow.rate, flow.full = solved.rates[0], solved.full
        for link, _ in phase.loads:
            self._on_link[link][flow] = None
        self._expect(flow, phase.latency_s + flow.left / flow.rate)

    def _no_longer_alone(self, flow: _Flow) -> None:
        """Somebody else comes: from now on the flow's rate is solved for. Its first bytes may still be on the way."""
        if not flow.alone:
            return
        flow.alone = False
        if self._env.now < flow.since:
            for link, _ in flow.phase.loads:
                del self._on_link[link][flow]
            flow.rate, flow.timer = 0.0, None
            self._join_later(flow)
            return
        for full in flow.full:
            self._full[full.link] = full, flow.since

    def _join_later(self, flow: _Flow) -> None:
        self._env.timeout(flow.since - self._env.now).callbacks.append(lambda _: self._join(flow))

    def _join(self, flow: _Flow) -> None:
        flow.since = self._env.now
        for link, _ in flow.phase.loads:
            for other in list(self._on_link[link]):
                self._no_longer_alone(other)
            self._on_link[link][flow] = None
        self._touch(flow.phase)

    def _expect(self, flow: _Flow, seconds: float) -> None:
        if math.isinf(seconds):  # background traffic does not end
            return
        flow.timer = self._env.timeout(seconds, value=flow)
        flow.timer.callbacks.append(self._arrive)

    def _arrive(self, timer: simpy.Event) -> None:
        flow = cast(_Flow, timer.value)
        if flow.timer is not timer:  # the rate has changed since: another timer counts
            return
        flow.timer = None  # else each holds the other until garbage is searched for
        shared = False
        for link, _ in flow.phase.loads:
            flows = self._on_link[link]
            del flows[flow]
            shared = shared or bool(flows)
        if shared:
            self._touch(flow.phase)
        elif flow.alone:
            for full in flow.full:
                self._add(full, self._env.now - flow.since)
        else:
            for link in [link for link, _ in flow.phase.loads if link in self._full]:
                self._leave(link, self._env.now)
        flow.then()

    def _touch(self, phase: Phase) -> None:
        for link, _ in phase.loads:
            self._changed[link] = None
        if not self._solving:
            self._solving = True
            solve = self._env.event()
            solve.callbacks.append(self._solve)
            solve._ok, solve._value = True, None
            self._env.schedule(solve, priority=_AFTER_ALL_ELSE)

    def _solve(self, _: simpy.Event) -> None:
        self._solving = False
        flows, links = self._concerned()
        self._changed.clear()
        now = self._env.now
        solved = self._solve_for([flow.phase for flow in flows])
        for flow, rate in zip(flows, solved.rates, strict=True):
            if rate == flow.rate:
                continue
            if flow.rate > 0:
                flow.left = max(flow.left - flow.rate * (now - flow.since), 0.0)
            flow.since, flow.rate = now, rate
            self._expect(flow, flow.left / rate)
        if solved.full or self._full:
            full = {state.link: state for state in solved.full}
            for link in self._full.keys() & links:
                if full.get(link) is self._full[link][0]:
                    del full[link]
                else:
                    self._leave(link, now)
            for link, state in full.items():
                self._full[link] = state, now

    def _leave(self, link: int, at_s: float) -> None:
        """The link's state ends."""
        full, since = self._full.pop(link)
        self._add(full, max(at_s - since, 0.0))

    def _add(self, full: Full, seconds: float) -> None:
        self.full_s[full] = self.full_s.get(full, 0.0) + seconds

    def _solve_for(self, phases: list[Phase]) -> _Solved:
        """`max_min_rates`, remembered: the micro-batches of a pipeline meet in the same ways again and again."""
        key = tuple(map(id, phases))
        if key not in self._solved:
            if len(self._solved) >= _REMEMBERED:
                self._solved.clear()
            rates = max_min_rates(phases, self._capacity)
            self._solved[key] = _Solved(phases, rates, full_links(phases, rates, self._capacity))
        return self._solved[key]

    def _concerned(self) -> tuple[list[_Flow], set[int]]:
        """The flows connected with a changed link through shared links, in order of discovery, and all their links.

        A flow that is alone keeps its rate and its own record: its first bytes may still be on the way.
        """
        links = list(self._changed)
        seen_links = set(links)
        flows: dict[_Flow, None] = {}
        for link in links:  # grows while it is walked
            for flow in self._on_link[link]:
                if flow in flows or flow.alone:
                    continue
                flows[flow] = None
                for other, _ in flow.phase.loads:
                    if other not in seen_links:
                        seen_links.add(other)
                        links.append(other)
        return list(flows), seen_links
