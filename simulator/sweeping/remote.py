"""Simulation of a point on a machine of a cluster, which first makes sure that it would simulate the same job."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from simulator.errors import SimulatorError, in_one_line
from simulator.sweeping.evaluation import OpenedPoint, simulated
from simulator.sweeping.key import job_key
from simulator.sweeping.outcome import PointOutcome


@dataclass(frozen=True)
class Mismatch:
    """A machine would simulate another job than was asked for. ``why``: in words."""

    machine: str
    why: str


def simulated_alike(opened: OpenedPoint) -> PointOutcome | Mismatch:
    """Return the outcome of a point, unless the simulator or files here are others than where it was opened."""
    try:
        key = job_key(opened.workload)
    except SimulatorError as error:
        return Mismatch(socket.gethostname(), in_one_line(error))
    if key != opened.key:
        return Mismatch(socket.gethostname(), "its simulator, or a file that the job names, is another one")
    return simulated(opened)
