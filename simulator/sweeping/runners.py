"""The runner that a user asks for."""

from __future__ import annotations

from simulator.config.section import is_whole
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.sweeping.processes import Processes, cores
from simulator.sweeping.runner import Runner


def runner_on(jobs: int | None, option: str = "jobs") -> Runner:
    """Return the runner of so many points at once [one per core]. Raises `InputError`, naming the option, for none."""
    if jobs is not None and not (is_whole(jobs) and jobs >= 1):
        raise InputError(
            "needs a process",
            file=option,
            found=brief(jobs),
            allowed=f"a whole number, 1 or more; here are {cores()} cores",
        )
    return Processes(cores() if jobs is None else jobs)
