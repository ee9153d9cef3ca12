"""Bytes in motion: transfers share links at their max-min fair rates, on SimPy's clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import simpy
from simpy.events import EventPriority

from simulator.network.plan import Phase, Plan

#: Rates are re-solved after everything else that happens at an instant, so that an instant is solved once.
_AFTER_ALL_ELSE = cast(EventPriority, 2)
#: Two constraints closer than this (relative) bind together.
_TIE = 1e-12
#: Meetings of transfers whose rates are remembered.
_REMEMBERED = 100_000
#: A flow slower than its cap by less than this share is not held up, and a link less short of full than that is full.
_SLACK = 1e-9


def max_min_rates(phases: Sequence[Phase], capacity: Sequence[float]) -> list[float]:
    """Max-min fair rates of the phases' reference flows, by progressive filling, bytes/s.

    All rates rise together; when a link is full, the phases that cross it stop; when a phase reaches its cap, it
    stops (Bertsekas and Gallager, Data Networks, section 6.5.2, with loads as weights on the links).
    ``capacity`` is indexed by link, bytes/s. A phase bound by nothing gets ``inf``.

    Two flows share a 10 B/s link; one of them is capped at 2 B/s, so the other takes the rest:

    >>> a, b = Phase(1, ((0, 1.0),), 0.0, cap_Bps=2.0), Phase(1, ((0, 1.0),), 0.0)
    >>> max_min_rates([a, b], [10.0])
    [2.0, 8.0]
    """
    if len(phases) == 1:
        return [min([phases[0].cap_Bps, *[capacity[link] / load for link, load in phases[0].loads if load > 0]])]
    rates = [0.0] * len(phases)
    crossing: dict[int, list[tuple[int, float]]] = {}
    for index, phase in enumerate(phases):
        for link, load in phase.loads:
            crossing.setdefault(link, []).append((index, load))
    left = {link: capacity[link] for link in crossing}
    pressure = {link: total for link, flows in crossing.items() if (total := sum([load for _, load in flows])) > 0}
    rising = dict.fromkeys(range(len(phases)))
    level = 0.0
    while rising:
        rise_of_link = {link: left[link] / load for link, load in pressure.items()}
        rise = min(min(rise_of_link.values(), default=math.inf), min(phases[index].cap_Bps for index in rising) - level)
        if math.isinf(rise):
            for index in rising:
                rates[index] = math.inf
            break
        threshold = rise + _TIE * (level + rise)
        full = [link for link, limit in rise_of_link.items() if limit <= threshold]
        stopped = {index for link in full for index, _ in crossing[link] if index in rising}
        stopped.update(index for index in rising if phases[index].cap_Bps - level <= threshold)
        level += rise
        for link, load in pressure.items():
            left[link] = max(left[link] - load * rise, 0.0)
        for index in sorted(stopped):
            rates[index] = level
            del rising[index]
        # Summed up anew, not subtracted from, so that no rounding is left of those that have stopped.
        for link in {link for index in stopped for link, _ in phases[index].loads}:
            total = sum([load for index, load in crossing[link] if index in rising])
            if total > 0:
                pressure[link] = total
            else:
                pressure.pop(link, None)
    return rates


@dataclass(frozen=True, slots=True, eq=False)
class Full:
    """A state of a link that holds somebody up: the ``phases`` on it, their ``rates`` (bytes/s), and which of them it
    is the ``bottleneck`` of: it is full, and nobody on it is faster."""

    link: int
    phases: tuple[Phase, ...]
    rates: tuple[float, ...]
    bottleneck: tuple[bool, ...]


def full_links(phases: Sequence[Phase], rates: Sequence[float], capacity: Sequence[float]) -> tuple[Full, ...]:
    """The links that hold a phase below its cap, at max-min fair ``rates``, in the order in which phases name them.

    A phase that several links hold up alike is held up by each.
    """
    slow = [rate < phase.cap_Bps * (1 - _SLACK) for phase, rate in zip(phases, rates, strict=True)]
    if not any(slow):
        return ()
    crossing: dict[int, list[tuple[int, float]]] = {}
    for index, phase in enumerate(phases):
        for link, load in phase.loads:
            crossing.setdefault(link, []).append((index, load))
    found = []
    for link, flows in crossing.items():
        if not any(slow[index] for index, _ in flows):
            continue
        if sum(load * rates[index] for index, load in flows) < capacity[link] * (1 - _SLACK):
            continue
        on = [index for index, _ in flows]
        fastest = max(rates[index] for index in on) * (1 - _SLACK)
        held = tuple([slow[index] and rates[index] >= fastest for index in on])
        if any(held):
            found.append(Full(link, tuple([phases[i] for i in on]), tuple([rates[i] for i in on]), held))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Solved:
    """What phases that meet come to. They are kept beside it, so that their ids stay their own."""

    phases: list[Phase]
    rates: list[float]
    full: tuple[Full, ...]


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
        self._capacity = capacity_Bps
        self._on_link: list[dict[_Flow, None]] = [{} for _ in capacity_Bps]
        self._changed: dict[int, None] = {}
        self._solving = False
        self._solved: dict[tuple[int, ...], _Solved] = {}
        self._full: dict[int, tuple[Full, float]] = {}  # link -> its state, and since when
        self.full_s: dict[Full, float] = {}

    def transfer(self, plan: Plan, then: Callable[[], None]) -> None:
        """Start ``plan`` now; ``then`` is called when its last byte has arrived."""
        self._start(plan.phases, 0, then)

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

    def _start(self, phases: Sequence[Phase], index: int, then: Callable[[], None]) -> None:
        """Start phase ``index``; the next ones follow it, then ``then``."""
        if index == len(phases):
            then()
            return
        phase = phases[index]
        go_on = then if index + 1 == len(phases) else partial(self._start, phases, index + 1, then)
        if phase.nbytes <= 0 or not phase.loads:
            seconds = phase.latency_s + (phase.nbytes / phase.cap_Bps if phase.nbytes > 0 else 0.0)
            self._env.timeout(seconds).callbacks.append(lambda _: go_on())
            return
        flow = _Flow(phase, go_on, phase.nbytes, self._env.now + phase.latency_s)
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
        """The flows connected with a changed link through shared links, in order of discovery, and all their links."""
        links = list(self._changed)
        seen_links = set(links)
        flows: dict[_Flow, None] = {}
        for link in links:  # grows while it is walked
            for flow in self._on_link[link]:
                if flow in flows:
                    continue
                flows[flow] = None
                for other, _ in flow.phase.loads:
                    if other not in seen_links:
                        seen_links.add(other)
                        links.append(other)
        return list(flows), seen_links
