"""A simulation of the compiled event loop: its memory, what Python keeps for it, and the errors of what it asks."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.engine.compiled.library import OUT_OF_MEMORY, RUNNING, QuestionsRecord, event_loop
from simulator.network import flows, max_min

#: Events between looks at what Python has to do, such as an interrupt by the user: a fraction of a second.
EVENTS_AT_ONCE = 50_000


class SimulationHandle:
    """A simulation of the compiled event loop, whose memory is given back by `close`.

    ``capacity_Bps``: of each link, bytes/s. Answers to its questions are functions of Python. What one of them raises,
    `run` raises.
    """

    def __init__(
        self, answers: dict[str, Callable[..., int]], capacity_Bps: Sequence[float], sizes: tuple[int, int, int, int]
    ) -> None:
        self._loop = event_loop()
        self._kept: list[Any] = []
        self._error: BaseException | None = None
        self._answer = ctypes.c_int32()
        types: dict[str, Any] = dict(QuestionsRecord._fields_)
        self._questions: QuestionsRecord | None = QuestionsRecord(
            answer=ctypes.pointer(self._answer),
            **{name: types[name](self._guarded(answer)) for name, answer in answers.items()},
        )
        self._address = self._loop.new_simulation(
            ctypes.byref(self._questions),
            self.kept(np.array(capacity_Bps, dtype=np.float64)),
            len(capacity_Bps),
            *sizes,
            max_min.TIE,
            max_min.SLACK,
            flows.REMEMBERED,
        )
        if not self._address:
            raise MemoryError

    def kept(self, array: NDArray[Any]) -> int:
        """Keep an array for as long as the simulation; return where it is."""
        self._kept.append(array)
        return array.ctypes.data

    def add(self, function: str, *arguments: Any) -> int:
        """Call a function that adds something; return its number."""
        number: int = getattr(self._loop, function)(self._address, *arguments)
        if number < 0:
            raise MemoryError
        return number

    def add_record(self, function: str, record: ctypes.Structure, *before: int) -> int:
        """Call a function that adds what ``record`` describes; return its number."""
        return self.add(function, *before, ctypes.byref(record))

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function; return its result."""
        return getattr(self._loop, function)(self._address, *arguments)

    def run(self, between: Callable[[], object] = lambda: None) -> int:
        """Let everything happen; return how it ended. Between stretches of events Python handles signals, and calls
        ``between``."""
        outcome = RUNNING
        with self._interrupts_kept():
            while outcome == RUNNING:
                outcome = self.call("run", EVENTS_AT_ONCE)
                between()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if outcome == OUT_OF_MEMORY:
            raise MemoryError
        return outcome

    def close(self) -> None:
        """Give the memory back."""
        self._loop.free_simulation(self._address)
        self._address = None
        self._questions = None
        self._kept.clear()

    def _guarded(self, answer: Callable[..., int]) -> Callable[..., None]:
        """Return what writes an ``answer`` where the loop reads it, and keeps what is raised."""

        def guarded(*arguments: Any) -> None:
            try:
                self._answer.value = answer(*arguments)
            except BaseException as error:
                self._error = error

        return guarded

    @contextmanager
    def _interrupts_kept(self) -> Iterator[None]:
        """Within, keep what a signal raises before the first line of an answer: ctypes would only print it."""
        if threading.current_thread() is not threading.main_thread():  # no other handles signals
            yield
            return
        before = sys.unraisablehook

        def keep(lost: sys.UnraisableHookArgs) -> None:
            if "ctypes callback" in (lost.err_msg or ""):
                self._error = lost.exc_value
            else:
                before(lost)

        sys.unraisablehook = keep
        try:
            yield
        finally:
            sys.unraisablehook = before
