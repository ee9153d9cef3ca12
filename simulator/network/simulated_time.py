"""The simulated time: SimPy's environment, with an end to each instant."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import simpy
from simpy.core import BoundClass, EmptySchedule, StopSimulation


class _WorkError(Exception):
    """Carries an ``error`` that work raised and that SimPy would take for the end of its run."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class SimulatedTime(simpy.Environment):
    """SimPy's environment, which counts its ``events`` and can put work off to the end of an instant."""

    if not TYPE_CHECKING:  # an environment binds what its own class says; what it inherits is bound at every use
        event, timeout, process = BoundClass(simpy.Event), BoundClass(simpy.Timeout), BoundClass(simpy.Process)

    def __init__(self) -> None:
        super().__init__()
        self.events = 0
        self._put_off: list[Callable[[], None]] = []

    def at_end_of_instant(self, work: Callable[[], None]) -> None:
        """Do ``work`` once nothing else is left to happen now. It counts as an event."""
        self._put_off.append(work)

    def run(self, until: Any = None) -> Any:
        """Process events as SimPy does. What work that was put off raises comes out as itself, whatever it is."""
        try:
            return super().run(until)
        except _WorkError as carrier:
            raise carrier.error from None

    def peek(self) -> float:
        """Return the time of the next event, which is now where work was put off; inf where there is none."""
        return self.now if self._put_off else super().peek()

    def step(self) -> None:
        """Process the next event, or what was put off where the next event is later."""
        if self._put_off and super().peek() > self.now:
            try:
                self._put_off.pop(0)()
            except (EmptySchedule, StopSimulation) as error:
                raise _WorkError(error) from error
        else:
            super().step()
        self.events += 1
