"""Phases of the network by their numbers, for the compiled event loop."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from simulator.arrays import Floats
from simulator.engine.compiled import library
from simulator.engine.compiled.handle import SimulationHandle
from simulator.network.max_min import Saturations
from simulator.network.plan import Phase, Plan


class NumberedPhases:
    """The phases that a compiled simulation knows, and its record of contention."""

    def __init__(self, handle: SimulationHandle) -> None:
        self._handle = handle
        self._phases: dict[int, Phase] = {}  # by their number; phases that the loop has slowed are not among them
        self._numbers: dict[int, int] = {}
        self._alone_Bps: dict[int, float] = {}

    def number(self, phase: Phase) -> int:
        """Return the number of ``phase``."""
        number = self._numbers.get(id(phase))
        if number is None:
            links = np.array([link for link, _ in phase.loads], dtype=np.int32)
            loads = np.array([load for _, load in phase.loads], dtype=np.float64)
            sizes = phase.nbytes, phase.latency_s, phase.cap_Bps, len(links)
            number = self._handle.add("add_phase", *sizes, self._handle.kept(links), self._handle.kept(loads))
            self._numbers[id(phase)] = number
            self._phases[number] = phase
        return number

    def alone_s(self, plan: Plan) -> float:
        """Return the seconds that ``plan`` takes while nothing else crosses its links."""
        return sum(phase.latency_s + self._moving_s(phase) for phase in plan.phases)

    def add_alone(self, plan: Plan, times: int) -> None:
        """Add to the record that ``plan`` has been played so often with nothing else on its links."""
        for phase in plan.phases:
            if phase.nbytes > 0:
                self._handle.add("add_alone", self.number(phase), times)

    def prolong(self, seconds: Mapping[int, float]) -> None:
        """Add to the record the seconds of states, by their number, in time that was not played."""
        for state, more in seconds.items():
            if more:
                self._handle.add("prolong", state, more)

    def seconds_of_states(self) -> dict[int, float]:
        """Return the seconds of each state of a full link so far, by its number."""
        order, states, _ = self._states()
        return dict(zip(order.tolist(), states["seconds"][order].tolist(), strict=True))

    def saturations(self) -> Saturations:
        """Return all states in which links held phases up."""
        numbers, states, crossers = self._states()
        chosen = states[numbers]
        crossing = np.repeat(np.arange(len(numbers)), chosen["n"])
        first_of_state = np.cumsum(chosen["n"]) - chosen["n"]
        rows = crossers[np.arange(len(crossing)) + (chosen["first"] - first_of_state)[crossing]]
        phases, place = np.unique(rows["phase"], return_inverse=True)
        return Saturations(
            phases=tuple([self._phases[number] for number in phases.tolist()]),
            link=chosen["link"].astype(np.int64),
            seconds=chosen["seconds"].copy(),
            state=crossing,
            phase=place,
            rate_Bps=rows["rate_Bps"].copy(),
            cap_Bps=rows["cap_Bps"].copy(),
            is_held_up=rows["is_held_up"] > 0,
        )

    def _states(self) -> tuple[library.Records, library.Records, library.Records]:
        """Return numbers of states in the order in which they first ended, all states, and what crosses their links."""
        order, states, crossers = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        sizes = (ctypes.c_int64 * 2)()
        n = self._handle.call("read_states", ctypes.byref(order), ctypes.byref(states), ctypes.byref(crossers), sizes)
        return (
            library.array_at(order.value, np.dtype(np.int32), n),
            library.array_at(states.value, library.SATURATION, sizes[0]),
            library.array_at(crossers.value, library.CROSSER, sizes[1]),
        )

    def _moving_s(self, phase: Phase) -> float:
        return phase.nbytes / self._rate_alone_Bps(self.number(phase)) if phase.nbytes > 0 else 0.0

    def rates_Bps(self, numbers: Sequence[int]) -> Floats:
        """Return the rates of phases that meet, by their numbers, of which there is one at least."""
        rates, phases = np.zeros(len(numbers)), np.array(numbers, dtype=np.int32)
        self._handle.add("work_out_rates", len(phases), phases.ctypes.data, rates.ctypes.data)
        return rates

    def _rate_alone_Bps(self, number: int) -> float:
        """Return the rate of a phase with nothing else on its links."""
        if number not in self._alone_Bps:
            self._alone_Bps[number] = float(self.rates_Bps([number])[0])
        return self._alone_Bps[number]
