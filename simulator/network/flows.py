"""Bytes in motion: transfers share links at their max-min fair rates, on SimPy's clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import simpy

from simulator.network.max_min import Saturation, max_min_rates, saturations
from simulator.network.plan import Phase, Plan
from simulator.network.simulated_time import SimulatedTime

#: Sets of concurrent phases whose rates are remembered.
REMEMBERED = 100_000


@dataclass(slots=True, eq=False)
class Transmission:
    """A plan under way, at ``speed`` times what its phases can drive; ``flow``: its phase that moves bytes now."""

    plan: Plan
    on_end: Callable[[], None]
    speed: float = 1.0
    flow: _Flow | None = None


@dataclass(slots=True, eq=False)
class _Flow:
    """A phase under way: ``left`` bytes at time ``since_s``, moving at ``rate_Bps``; ``on_end`` is called at its end.

    ``timer`` is the end now expected. A flow that found its links empty is ``alone`` until another comes.
    """

    phase: Phase
    on_end: Callable[[], None]
    left: float
    since_s: float
    rate_Bps: float = 0.0
    alone: bool = False
    timer: simpy.Event | None = None


@dataclass(slots=True, eq=False)
class _SharedLink:
    """A link and the ``flows`` that cross it now.

    While it holds some of them up, ``saturation`` is its state, which has lasted since ``since_s``.
    """

    flows: dict[_Flow, None] = field(default_factory=dict)
    saturation: Saturation | None = None
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Solution:
    """Rates of concurrent ``phases``, and the links that hold them up. Keeping the phases keeps their ids unique."""

    phases: list[Phase]
    rates_Bps: list[float]
    saturations: tuple[Saturation, ...]


class Network:
    """Links with capacities, and the transfers now crossing them.

    Rates are solved again only at an instant when a transfer starts or ends. They are solved only for transfers that
    share a link, directly or through others, with what changed. A transfer that meets nobody costs one event.
    ``saturated_s`` is the record of contention: the seconds of each state in which a link held somebody up. It is
    complete once `finish` has been called.
    """

    def __init__(self, env: SimulatedTime, capacity_Bps: Sequence[float]) -> None:
        self.saturated_s: dict[Saturation, float] = {}
        self._env = env
        self._capacity_Bps = np.array(capacity_Bps, dtype=float)
        self._links = [_SharedLink() for _ in capacity_Bps]
        self._saturated: dict[int, _SharedLink] = {}
        self._changed: dict[int, None] = {}  # links on which something has changed at this instant
        self._solutions: dict[tuple[int, ...], _Solution] = {}
        self._slowed: dict[tuple[int, float], Phase] = {}

    def transfer(self, plan: Plan, on_end: Callable[[], None]) -> Transmission:
        """Start ``plan`` now; ``on_end`` is called when its last byte has arrived."""
        transmission = Transmission(plan, on_end)
        self._start(transmission, 0)
        return transmission

    def slow(self, transmission: Transmission, speed: float) -> None:
        """Let ``transmission`` have this share of what its phases can drive, from now on; latencies stay."""
        transmission.speed = speed
        flow = transmission.flow
        if flow is None:
            return
        self._end_solitude(flow)
        flow.phase = self._phase_at(flow.phase.unslowed or flow.phase, speed)
        if flow in self._links[flow.phase.loads[0][0]].flows:
            self._touch(flow.phase)

    def occupy(self, phase: Phase) -> None:
        """Let background traffic cross the links of ``phase`` from now on and for ever.

        It is as fast as its cap and its fair share allow.
        """
        self._join(_Flow(phase, lambda: None, math.inf, self._env.now))

    def alone_s(self, plan: Plan) -> float:
        """Return the seconds that ``plan`` takes while nothing else crosses its links."""
        return sum(
            phase.latency_s + (phase.nbytes / self._solve([phase]).rates_Bps[0] if phase.nbytes > 0 else 0.0)
            for phase in plan.phases
        )

    def add_alone(self, plan: Plan, times: int) -> None:
        """Add to the record that ``plan`` has been played so often with nothing else on its links."""
        for phase in plan.phases:
            if phase.nbytes > 0:
                solution = self._solve([phase])
                for saturation in solution.saturations:
                    self._add(saturation, times * phase.nbytes / solution.rates_Bps[0])

    def prolong(self, saturated_s: Mapping[Saturation, float]) -> None:
        """Add to the record the seconds of states in time that was not played."""
        for saturation, seconds in saturated_s.items():
            if seconds:
                self._add(saturation, seconds)

    def finish(self, at_s: float) -> None:
        """Complete the record of background traffic, which is there until ``at_s``."""
        for link in sorted(self._saturated):
            self._end_saturation(link, at_s)

    # A transmission goes from phase to phase, a flow each.

    def _start(self, transmission: Transmission, index: int) -> None:
        """Start phase ``index``; the next ones follow it, then ``on_end``."""
        phases, transmission.flow = transmission.plan.phases, None
        if index == len(phases):
            transmission.on_end()
            return
        phase = self._phase_at(phases[index], transmission.speed)
        go_on = partial(self._start, transmission, index + 1)
        if phase.nbytes <= 0 or not phase.loads:
            seconds = phase.latency_s + (phase.nbytes / phase.cap_Bps if phase.nbytes > 0 else 0.0)
            self._env.timeout(seconds).callbacks.append(lambda _: go_on())
            return
        flow = transmission.flow = _Flow(phase, go_on, phase.nbytes, self._env.now + phase.latency_s)
        neighbours = dict.fromkeys(other for link, _ in phase.loads for other in self._links[link].flows)
        if neighbours:
            for neighbour in neighbours:
                self._end_solitude(neighbour)
            self._join_later(flow)
            return
        flow.alone = True
        flow.rate_Bps = self._solve([phase]).rates_Bps[0]
        for link, _ in phase.loads:
            self._links[link].flows[flow] = None
        self._expect(flow, phase.latency_s + flow.left / flow.rate_Bps)

    def _phase_at(self, phase: Phase, speed: float) -> Phase:
        """Return ``phase`` at ``speed``. Each slowed phase is made once, so that rates solved for it are remembered."""
        if speed == 1:
            return phase
        key = id(phase), speed
        if key not in self._slowed:
            self._slowed[key] = phase.slowed(speed)
        return self._slowed[key]

    def _end_solitude(self, flow: _Flow) -> None:
        """Solve for the flow's rate from now on, as somebody else comes. Its first bytes may still be on the way."""
        if not flow.alone:
            return
        flow.alone = False
        if self._env.now < flow.since_s:
            for link, _ in flow.phase.loads:
                del self._links[link].flows[flow]
            flow.rate_Bps, flow.timer = 0.0, None
            self._join_later(flow)
            return
        for saturation in self._solve([flow.phase]).saturations:
            self._begin_saturation(saturation, flow.since_s)

    def _join_later(self, flow: _Flow) -> None:
        self._env.timeout(flow.since_s - self._env.now).callbacks.append(lambda _: self._join(flow))

    def _join(self, flow: _Flow) -> None:
        flow.since_s = self._env.now
        for link, _ in flow.phase.loads:
            flows = self._links[link].flows
            for other in list(flows):
                self._end_solitude(other)
            flows[flow] = None
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
            flows = self._links[link].flows
            del flows[flow]
            shared = shared or bool(flows)
        if shared:
            self._touch(flow.phase)
        elif flow.alone:
            for saturation in self._solve([flow.phase]).saturations:
                self._add(saturation, self._env.now - flow.since_s)
        else:
            for link in [link for link, _ in flow.phase.loads if link in self._saturated]:
                self._end_saturation(link, self._env.now)
        flow.on_end()

    # Rates are solved at the end of an instant, once for all that has changed.

    def _touch(self, phase: Phase) -> None:
        if not self._changed:
            self._env.at_end_of_instant(self._update_rates)
        for link, _ in phase.loads:
            self._changed[link] = None

    def _update_rates(self) -> None:
        flows, links = self._connected()
        self._changed.clear()
        now = self._env.now
        solution = self._solve([flow.phase for flow in flows])
        for flow, rate_Bps in zip(flows, solution.rates_Bps, strict=True):
            if rate_Bps == flow.rate_Bps:
                continue
            if flow.rate_Bps > 0:
                flow.left = max(flow.left - flow.rate_Bps * (now - flow.since_s), 0.0)
            flow.since_s, flow.rate_Bps = now, rate_Bps
            self._expect(flow, flow.left / rate_Bps)
        if solution.saturations or self._saturated:
            begun = {saturation.link: saturation for saturation in solution.saturations}
            for link in [link for link in links if link in self._saturated]:
                if begun.get(link) is self._links[link].saturation:
                    del begun[link]
                else:
                    self._end_saturation(link, now)
            for saturation in begun.values():
                self._begin_saturation(saturation, now)

    def _connected(self) -> tuple[list[_Flow], list[int]]:
        """Return the flows connected with a changed link through shared links, and all their links.

        Both are in the order of their discovery. A flow that is alone keeps its rate and its own record: its first
        bytes may still be on the way.
        """
        links = list(self._changed)
        seen_links = set(links)
        flows: dict[_Flow, None] = {}
        for link in links:  # grows while it is walked
            for flow in self._links[link].flows:
                if flow in flows or flow.alone:
                    continue
                flows[flow] = None
                for other, _ in flow.phase.loads:
                    if other not in seen_links:
                        seen_links.add(other)
                        links.append(other)
        return list(flows), links

    def _solve(self, phases: list[Phase]) -> _Solution:
        """Solve for the rates of ``phases`` once: a pipeline's micro-batches meet in the same ways again and again."""
        if not phases:
            return _Solution([], [], ())
        key = tuple(map(id, phases))
        if key not in self._solutions:
            if len(self._solutions) >= REMEMBERED:
                self._solutions.clear()
            rates_Bps = max_min_rates(phases, self._capacity_Bps)
            self._solutions[key] = _Solution(phases, rates_Bps, saturations(phases, rates_Bps, self._capacity_Bps))
        return self._solutions[key]

    # The record of contention

    def _begin_saturation(self, saturation: Saturation, since_s: float) -> None:
        link = self._saturated[saturation.link] = self._links[saturation.link]
        link.saturation, link.since_s = saturation, since_s

    def _end_saturation(self, index: int, at_s: float) -> None:
        link = self._saturated.pop(index)
        assert link.saturation is not None
        self._add(link.saturation, max(at_s - link.since_s, 0.0))
        link.saturation = None

    def _add(self, saturation: Saturation, seconds: float) -> None:
        self.saturated_s[saturation] = self.saturated_s.get(saturation, 0.0) + seconds
