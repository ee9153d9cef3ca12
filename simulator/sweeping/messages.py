"""Messages between a worker process and its parent: pickles on the worker's standard input and output."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import IO, Any

from simulator.sweeping.outcome import PointOutcome


@dataclass(frozen=True)
class Ready:
    """The worker has loaded the simulator."""


@dataclass(frozen=True)
class Begun:
    """The worker would simulate the point with this key; it waits for True or False."""

    key: str


#: What a worker tells its parent; an outcome is that of the point which it was handed last.
WorkerMessage = Ready | Begun | PointOutcome


def send(stream: IO[bytes], message: object) -> None:
    """Write a message at once."""
    pickle.dump(message, stream, pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Return the next message; None where the other side has ended, be it in the middle of one."""
    try:
        return pickle.load(stream)
    except (EOFError, OSError, pickle.UnpicklingError):
        return None
