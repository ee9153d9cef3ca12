"""Measured steps beside their simulation: the rows that prediction intervals rest on, as last recorded."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, get_type_hints

from simulator.validation.suites import DATA
from simulator.validation.traits import StepTraits

STEPS = DATA / "steps.csv"


@dataclass(frozen=True)
class MeasuredStep:
    """One measured step and its simulation. ``source``: who measured it, with which software."""

    id: str
    suite: str
    source: str
    measured_s: float
    simulated_s: float
    traits: StepTraits

    @property
    def log_ratio(self) -> float:
        """Logarithm of measured over simulated time: positive where the simulation is too fast."""
        return math.log(self.measured_s / self.simulated_s)

    @property
    def error(self) -> float:
        """Error of the simulation as a share of the measured time."""
        return self.simulated_s / self.measured_s - 1


@lru_cache
def measured_steps() -> tuple[MeasuredStep, ...]:
    """Return all rows, as last recorded."""
    return read_steps(STEPS.read_text(encoding="utf-8"))


def read_steps(text: str) -> tuple[MeasuredStep, ...]:
    """Return the rows of a table as `write_steps` writes it.

    A trait without a column has its default: the table was recorded before the trait was there.
    """
    types = get_type_hints(StepTraits)
    return tuple(
        MeasuredStep(
            row["id"],
            row["suite"],
            row["source"],
            float(row["measured_s"]),
            float(row["simulated_s"]),
            StepTraits(**{name: _parsed(row[name], kind) for name, kind in types.items() if name in row}),
        )
        for row in csv.DictReader(io.StringIO(text))
    )


def write_steps(steps: Iterable[MeasuredStep]) -> str:
    """Return rows as a CSV table, floats to six digits."""
    file = io.StringIO()
    columns = [one.name for one in fields(MeasuredStep) if one.name != "traits"]
    columns += [one.name for one in fields(StepTraits)]
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    for step in steps:
        flat = asdict(step)
        flat |= flat.pop("traits")
        writer.writerow({name: _printed(value) for name, value in flat.items()})
    return file.getvalue()


def _printed(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _parsed(text: str, kind: type) -> Any:
    return text == "True" if kind is bool else kind(text)


def by_source(steps: Sequence[MeasuredStep]) -> dict[str, list[int]]:
    """Return source -> places of its rows."""
    places: dict[str, list[int]] = {}
    for place, step in enumerate(steps):
        places.setdefault(step.source, []).append(place)
    return places
