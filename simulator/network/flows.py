"""Bytes in motion: transfers share links at their max-min fair rates, on SimPy's clock."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import cast

import simpy
from simpy.events import EventPriority

from simulator.network.plan import Phase, Plan

#: Rates are re-solved after everything else that happens at an instant, so that an instant is solved once.
_AFTER_ALL_ELSE = cast(EventPriority, 2)
#: Two constraints closer than this (relative) bind together.
_TIE = 1e-12


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
    rates = [0.0] * len(phases)
    crossing: dict[int, list[tuple[int, float]]] = {}
    for index, phase in enumerate(phases):
        for link, load in phase.loads:
            crossing.setdefault(link, []).append((index, load))
    left = {link: capacity[link] for link in crossing}
    rising = dict.fromkeys(range(len(phases)))
    level = 0.0
    while rising:
        pressure = {
            link: sum(load for index, load in flows if index in rising) for link, flows in crossing.items()
        }
        rise_of_link = {link: left[link] / load for link, load in pressure.items() if load > 0}
        rise = min(
            min(rise_of_link.values(), default=math.inf), min(phases[index].cap_Bps for index in rising) - level
        )
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
    return rates


@dataclass(slots=True, eq=False)
class _Flow:
    """A phase under way: ``left`` bytes at time ``since``, moving at ``rate``. ``timer`` is the end now expected."""

    phase: Phase
    done: simpy.Event
    left: float
    since: float
    rate: float = 0.0
    timer: simpy.Event | None = None


class Network:
    """Links with capacities, and the transfers now crossing them.

    Rates are solved again only at an instant when a transfer starts or ends, and only for the transfers that share a
    link, directly or through others, with what changed.
    """

    def __init__(self, env: simpy.Environment, capacity_Bps: Sequence[float]) -> None:
        self._env = env
        self._capacity = capacity_Bps
        self._on_link: list[dict[_Flow, float]] = [{} for _ in capacity_Bps]
        self._changed: dict[int, None] = {}
        self._solving = False
        self.bytes_on_link = [0.0] * len(capacity_Bps)

    def transfer(self, plan: Plan) -> simpy.Event:
        """Start ``plan`` now; the event fires when its last byte has arrived."""
        self.carry(plan)
        if len(plan.phases) == 1:
            return self._start(plan.phases[0])
        return self._env.process(self._in_turn(plan.phases))

    def alone_s(self, plan: Plan) -> float:
        """Seconds that ``plan`` takes while nothing else crosses its links."""
        return sum(
            phase.latency_s + (phase.nbytes / max_min_rates([phase], self._capacity)[0] if phase.nbytes > 0 else 0.0)
            for phase in plan.phases
        )

    def carry(self, plan: Plan, times: int = 1) -> None:
        """Count the bytes of ``plan``, done ``times`` times, on its links."""
        for phase in plan.phases:
            for link, load in phase.loads:
                self.bytes_on_link[link] += load * phase.nbytes * times

    def _in_turn(self, phases: Sequence[Phase]) -> Generator[simpy.Event]:
        for phase in phases:
            yield self._start(phase)

    def _start(self, phase: Phase) -> simpy.Event:
        if phase.nbytes <= 0 or not phase.loads:
            seconds = phase.latency_s + (phase.nbytes / phase.cap_Bps if phase.nbytes > 0 else 0.0)
            return self._env.timeout(seconds)
        done = self._env.event()
        if phase.latency_s > 0:
            timer = self._env.timeout(phase.latency_s)
            timer.callbacks.append(lambda _: self._join(phase, done))
        else:
            self._join(phase, done)
        return done

    def _join(self, phase: Phase, done: simpy.Event) -> None:
        flow = _Flow(phase, done, phase.nbytes, self._env.now)
        for link, load in phase.loads:
            self._on_link[link][flow] = load
        self._touch(phase)

    def _leave(self, flow: _Flow) -> None:
        for link, _ in flow.phase.loads:
            del self._on_link[link][flow]
        self._touch(flow.phase)
        flow.done.succeed()

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
        flows = self._concerned()
        self._changed.clear()
        now = self._env.now
        for flow, rate in zip(flows, max_min_rates([f.phase for f in flows], self._capacity), strict=True):
            if rate == flow.rate:
                continue
            if flow.rate > 0:
                flow.left = max(flow.left - flow.rate * (now - flow.since), 0.0)
            flow.since, flow.rate = now, rate
            flow.timer = self._env.timeout(flow.left / rate, value=flow)
            flow.timer.callbacks.append(self._arrive)

    def _arrive(self, timer: simpy.Event) -> None:
        flow = cast(_Flow, timer.value)
        if flow.timer is timer:  # else the rate has changed since, and another timer counts
            self._leave(flow)

    def _concerned(self) -> list[_Flow]:
        """The flows connected with a changed link through shared links, in order of discovery."""
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
        return list(flows)
