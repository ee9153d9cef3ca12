"""The runner that a user asks for: processes of this machine, or machines of a Ray cluster."""

from __future__ import annotations

from simulator.config.section import is_whole
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.sweeping.in_turn import InTurn
from simulator.sweeping.processes import Processes, cores
from simulator.sweeping.runner import Runner


def runner_on(jobs: int | None, on: str | None = None) -> Runner:
    """Return the runner of so many points at once [one per core]: on this machine, or on a Ray cluster.

    ``on``: local-ray or ray://HOST:PORT. Raises `InputError` for no number of points, and no such place.
    """
    if jobs is not None and not (is_whole(jobs) and jobs >= 1):
        raise InputError(
            "needs a process",
            file="jobs",
            found=brief(jobs),
            allowed=f"a whole number, 1 or more; here are {cores()} cores",
        )
    if on is None:
        return Processes(cores() if jobs is None else jobs)
    from simulator.sweeping.on_ray import RayCluster

    if not isinstance(on, str):
        raise InputError("is no place to run", file="on", found=brief(on), allowed="local-ray or ray://HOST:PORT")
    return RayCluster(on, jobs)


def search_runner_on(jobs: int | None, on: str | None = None) -> Runner:
    """Return `runner_on`, but of one point at a time this process itself: a search may end after a few points."""
    runner = runner_on(jobs, on)
    return InTurn() if jobs == 1 and on is None else runner
