"""Phases of the network by their numbers, and the rates that they reach, for the compiled event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulator.engine.compiled.handle import SimulationHandle
from simulator.network.max_min import Saturation, max_min_rates, saturations
from simulator.network.plan import Phase, Plan

#: Sets of concurrent phases whose rates are remembered.
_REMEMBERED = 100_000


class RememberedRates:
    """Rates of phases that meet on links, and slower phases, which all plays of some jobs have in common."""

    def __init__(self, capacity_Bps: Sequence[float]) -> None:
        self._capacity_Bps = np.array(capacity_Bps, dtype=float)
        self._slowed: dict[tuple[int, float], tuple[Phase, Phase]] = {}
        #: By ids of phases, which are kept beside.
        self._solved: dict[tuple[int, ...], tuple[Sequence[Phase], list[float], tuple[Saturation, ...]]] = {}

    def solved(self, phases: Sequence[Phase]) -> tuple[list[float], tuple[Saturation, ...]]:
        """Return the rates of phases that meet, and the states of links that hold some of them up."""
        key = tuple(map(id, phases))
        if key not in self._solved:
            if len(self._solved) >= _REMEMBERED:
                self._solved.clear()
            rates_Bps = max_min_rates(phases, self._capacity_Bps)
            self._solved[key] = phases, rates_Bps, saturations(phases, rates_Bps, self._capacity_Bps)
        return self._solved[key][1:]

    def slowed(self, phase: Phase, speed: float) -> Phase:
        """Return a phase at this share of its cap, the same each time."""
        key = id(phase), speed
        if key not in self._slowed:
            self._slowed[key] = phase, phase.slowed(speed)
        return self._slowed[key][1]


class NumberedPhases:
    """The phases that a compiled simulation knows; it is told ``rates`` of those that meet when it asks."""

    def __init__(self, handle: SimulationHandle, rates: RememberedRates) -> None:
        self._handle = handle
        self._rates = rates
        self._phases: list[Phase] = []
        self._numbers: dict[int, int] = {}
        self._states: list[Saturation] = []
        self._alone: dict[int, tuple[float, list[int]]] = {}
        self._alone_s: dict[int, float] = {}

    def number(self, phase: Phase, unslowed: int = -1) -> int:
        """Return the number of ``phase``; it is a slower version of phase ``unslowed``, if any."""
        number = self._numbers.get(id(phase))
        if number is None:
            links = np.array([link for link, _ in phase.loads], dtype=np.int32)
            sizes = phase.nbytes, phase.latency_s, phase.cap_Bps
            number = self._handle.add("add_phase", *sizes, len(links), self._handle.kept(links), unslowed)
            self._numbers[id(phase)] = number
            self._phases.append(phase)
        return number

    def add_slowed(self, number: int, speed: float) -> int:
        """Add a phase at a share of its cap; return its number."""
        return self.number(self._rates.slowed(self._phases[number], speed), number)

    def add_solution(self, numbers: Sequence[int]) -> int:
        """Add the rates of phases that meet; return the number of that."""
        if len(numbers) == 1:
            rate_Bps, states = self._rate_alone(numbers[0])
            return self._add_solution([rate_Bps], states)
        return self._add_solution(*self._solved([self._phases[number] for number in numbers]))

    def alone_s(self, plan: Plan) -> float:
        """Return the seconds that ``plan`` takes while nothing else crosses its links."""
        return sum(phase.latency_s + self._moving_s(phase) for phase in plan.phases)

    def add_alone(self, plan: Plan, times: int) -> None:
        """Add to the record that ``plan`` has been played so often with nothing else on its links."""
        for phase in plan.phases:
            if phase.nbytes > 0:
                rate_Bps, states = self._rate_alone(self.number(phase))
                for state in states:
                    self._alone_s[state] = self._alone_s.get(state, 0.0) + times * phase.nbytes / rate_Bps

    def prolong(self, seconds: Mapping[int, float]) -> None:
        """Add to the record the seconds of states, by their number, in time that was not played."""
        for state, more in seconds.items():
            if more:
                self._alone_s[state] = self._alone_s.get(state, 0.0) + more

    def saturated_s(self, seconds: Mapping[int, float]) -> Mapping[Saturation, float]:
        """Return the seconds of each state of a full link, from those of the loop and those alone."""
        by_state = dict(seconds)
        for state, seconds_alone in self._alone_s.items():
            by_state[state] = by_state.get(state, 0.0) + seconds_alone
        return {self._states[state]: seconds_of_state for state, seconds_of_state in by_state.items()}

    def _moving_s(self, phase: Phase) -> float:
        return phase.nbytes / self._rate_alone(self.number(phase))[0] if phase.nbytes > 0 else 0.0

    def _rate_alone(self, number: int) -> tuple[float, list[int]]:
        if number not in self._alone:
            rates_Bps, states = self._solved([self._phases[number]])
            self._alone[number] = rates_Bps[0], states
        return self._alone[number]

    def _solved(self, phases: Sequence[Phase]) -> tuple[list[float], list[int]]:
        """Return the rates of phases that meet, and the numbers of the states of links then."""
        rates_Bps, states = self._rates.solved(phases)
        if not states:
            return rates_Bps, []
        links = np.array([state.link for state in states], dtype=np.int32)
        first = self._handle.add("add_states", len(states), links.ctypes.data)
        self._states += states
        return rates_Bps, list(range(first, first + len(states)))

    def _add_solution(self, rates_Bps: Sequence[float], states: Sequence[int]) -> int:
        rates, numbers = np.array(rates_Bps, dtype=np.float64), np.array(states, dtype=np.int32)
        return self._handle.add("add_solution", len(rates), rates.ctypes.data, len(numbers), numbers.ctypes.data)
