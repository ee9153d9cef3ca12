"""Python entry point of many jobs that differ in a few keys: `sweep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from simulator.errors import InputError
from simulator.input_files import as_path, brief
from simulator.sweeping.evaluator import EvaluatedPoint, Evaluator
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Source
from simulator.sweeping.result import SweepResult
from simulator.sweeping.runner import Runner
from simulator.sweeping.runners import runner_on
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
    on: str | None = None,
    out: str | Path | None = None,
    watch: Callable[[PointOutcome], object] | None = None,
) -> SweepResult:
    """Simulate every combination of changes of ``workloads``: files, shipped names or mappings.

    ``grid``: dotted key -> values, all combined. ``zip``: keys whose values walk together. ``points``: mappings of
    dotted keys, one after another. ``set``: what all points change. ``jobs``: points at once [one per core]. ``on``:
    where they run [processes of this machine]; ray://HOST:PORT is a Ray cluster, local-ray one of this machine.

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
    runner, database = runner_on(jobs, on), None if out is None else database_path(out)
    space.check()

    def tell(one: EvaluatedPoint) -> None:
        if watch is not None:
            watch(one.outcome if one.is_new else PointOutcome(one.outcome.key, Status.KEPT))

    return sweep_space(space, runner, database, watch=tell)


def database_path(out: object) -> Path:
    """Return the path of a database. Raises `InputError` where ``out`` is none."""
    if not isinstance(out, str | Path):
        raise InputError("must be the path of a file", file="out", found=brief(out))
    return as_path(out, file="out")


#: The function whose name is a parameter of `sweep`.
_grid = grid


def sweep_space(
    space: Space,
    runner: Runner,
    out: Path | None = None,
    *,
    retry_failed: bool = False,
    watch: Callable[[EvaluatedPoint], object] = lambda one: None,
) -> SweepResult:
    """Simulate the points of a checked space that are not in the database at ``out`` yet; return what came of all.

    ``retry_failed``: points whose simulator or process broke down are tried again. ``watch`` is told of every point
    with its outcome as it comes.
    """
    outcomes: list[PointOutcome | None] = [None] * len(space)
    with Store.open(out) as store:
        evaluator = Evaluator(runner, store, retry_failed)
        with closing(evaluator.outcomes(space.points())) as stream:
            for one in stream:
                outcomes[one.point.number] = one.outcome
                watch(one)
    return SweepResult(space, tuple(one for one in outcomes if one is not None), evaluator.n_kept)
