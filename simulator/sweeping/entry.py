"""Python entry point of many jobs that differ in a few keys: `sweep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from simulator.config.section import is_whole
from simulator.errors import InputError
from simulator.input_files import as_path, brief
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Source
from simulator.sweeping.processes import Processes, cores
from simulator.sweeping.result import SweepResult
from simulator.sweeping.runner import Runner
from simulator.sweeping.space import Space, grid, listed, zipped
from simulator.sweeping.store import Store


def sweep(
    workloads: Source | Sequence[Source],
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    zip: Mapping[str, Sequence[Any]] | None = None,
    points: Sequence[Mapping[str, Any]] | None = None,
    set: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    out: str | Path | None = None,
    watch: Callable[[PointOutcome], object] | None = None,
) -> SweepResult:
    """Simulate every combination of changes of ``workloads``: files, shipped names or mappings.

    ``grid``: dotted key -> values, all combined. ``zip``: keys whose values walk together. ``points``: mappings of
    dotted keys, one after another. ``set``: what all points change. ``jobs``: processes [one per core].

    ``out``: a database that keeps every point as soon as it is finished [none]. Its points are not simulated
    again. A point that is not legal has an error in place of figures. ``watch`` is told of every outcome as it comes.

    Raises `InputError` on a key that does not exist, and on files that cannot be used.
    """
    several = isinstance(workloads, Sequence) and not isinstance(workloads, str)
    sources = list(cast(Sequence[Source], workloads)) if several else [cast(Source, workloads)]
    dimensions = (
        *(_grid(grid) if grid is not None else ()),
        *(zipped(zip) if zip is not None else ()),
        *([listed(points)] if points is not None else []),
    )
    space = Space(tuple(sources), dimensions, {} if set is None else set)
    runner, database = runner_on(jobs, "jobs"), None if out is None else _database_path(out)
    space.check()
    return sweep_space(space, runner, database, watch=watch)


def _database_path(out: object) -> Path:
    if not isinstance(out, str | Path):
        raise InputError("must be the path of a file", file="out", found=brief(out))
    return as_path(out, file="out")


#: The function whose name is a parameter of `sweep`.
_grid = grid


def runner_on(jobs: int | None, option: str) -> Processes:
    """Return the runner on so many processes [one per core]. Raises `InputError`, naming ``option``, for no such."""
    if jobs is not None and not (is_whole(jobs) and jobs >= 1):
        raise InputError(
            "needs a process",
            file=option,
            found=brief(jobs),
            allowed=f"a whole number, 1 or more; here are {cores()} cores",
        )
    return Processes(cores() if jobs is None else jobs)


def sweep_space(
    space: Space,
    runner: Runner,
    out: Path | None = None,
    *,
    retry_failed: bool = False,
    watch: Callable[[PointOutcome], object] | None = None,
) -> SweepResult:
    """Simulate the points of a checked space that are not in the database at ``out`` yet; return what came of all.

    ``retry_failed``: points whose simulator or process broke down are tried again. ``watch`` is told of every outcome
    as it comes.
    """
    outcomes: list[PointOutcome | None] = [None] * len(space)
    kept = 0
    with Store.open(out) as store:
        finished = store.finished(failed=not retry_failed)
        with closing(runner.outcomes(space.points(), finished)) as stream:
            for point, outcome in stream:
                if outcome.status == Status.KEPT:
                    kept += 1
                    outcomes[point.number] = store.outcome(outcome.key)
                else:
                    store.add(point, outcome)
                    outcomes[point.number] = outcome
                if watch is not None:
                    watch(outcome)
    return SweepResult(space, tuple(one for one in outcomes if one is not None), kept)
