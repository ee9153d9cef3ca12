"""Sweeps of tiny jobs, and a runner in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from simulator.sweeping.entry import sweep_space
from simulator.sweeping.in_turn import InTurn
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point
from simulator.sweeping.result import SweepResult
from simulator.sweeping.space import Space, grid
from tests.support.jobs import job

#: The quickest job there is: a layer on one GPU.
SMALLEST = job(model={"layers": 1, "hidden": 128, "heads": 2, "vocab": 256}, training__global_batch=2)


@dataclass
class InProcess:
    """Runner without processes, as `InTurn`. ``simulated``: numbers of the points that were simulated or refused."""

    simulated: list[int] = field(default_factory=list)

    def outcomes(
        self, points: Iterable[Point], finished: frozenset[str], claim: Callable[[str], bool]
    ) -> Generator[tuple[Point, PointOutcome], None, None]:
        for point, outcome in InTurn().outcomes(points, finished, claim):
            if outcome.status != Status.KEPT:
                self.simulated.append(point.number)
            yield point, outcome


def space_of(values: dict[str, list[Any]], *workloads: Any) -> Space:
    """All combinations of values of keys, of `SMALLEST` or other workloads."""
    return Space(workloads or (SMALLEST,), grid(values))


def swept(values: dict[str, list[Any]], *workloads: Any, out: Path | None = None) -> SweepResult:
    return sweep_space(space_of(values, *workloads), InProcess(), out)


def write_job(folder: Path, name: str = "tiny", **changes: Any) -> Path:
    """A workload file of `SMALLEST` with other sections."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**SMALLEST, "name": name, **changes}))
    return path
