"""Predicted beside measured: every row, and never a mean alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.config import Workload
from simulator.errors import InputError, in_one_line
from simulator.validation.rows import Row, UnsupportedError, loaded, measured_step_s
from simulator.validation.suite import Bounds

#: A suite that skips more than this share of its rows has not been validated.
MAX_SKIPPED = 0.1


@dataclass(frozen=True)
class Quantity:
    """A figure that a suite compares. ``measured`` returns a row's figure, in ``unit``."""

    name: str
    unit: str
    measured: Callable[[Row], float]
    memory_only: bool = False


STEP_TIME = Quantity("step_time", "s", measured_step_s)


@dataclass(frozen=True)
class Outcome:
    """One row: ``error`` is (predicted - measured) / measured; or ``skipped`` says why there is none.

    ``fitted_on``: whether the calibration saw this row (never, for steps).
    """

    id: str
    quantity: str
    unit: str
    measured: float | None
    predicted: float | None
    skipped: str = ""
    fitted_on: bool = False

    @property
    def error(self) -> float | None:
        if self.measured is None or self.predicted is None:
            return None
        return (self.predicted - self.measured) / self.measured

    def to_dict(self) -> dict[str, Any]:
        """The row under the names of the JSON output."""
        return {
            "id": self.id,
            "quantity": self.quantity,
            "unit": self.unit,
            "measured": self.measured,
            "predicted": self.predicted,
            "error": self.error,
            "fitted_on": self.fitted_on,
            "skipped": self.skipped or None,
        }


def evaluate(
    rows: Iterable[Row],
    settings_of: Callable[[Row], Mapping[str, Any]],
    predict: Callable[[Row, Workload], float],
    quantity: Quantity = STEP_TIME,
) -> list[Outcome]:
    """Simulate every row. ``settings_of``: dotted workload keys for what the row leaves open (see `Suite`);
    ``predict`` turns a row and its workload into the ``quantity``."""
    outcomes = []
    for row in rows:
        measured = None
        try:
            measured = quantity.measured(row)
            workload = loaded(row, settings_of(row), memory_only=quantity.memory_only)
            outcome = Outcome(row["id"], quantity.name, quantity.unit, measured, predict(row, workload))
        except (UnsupportedError, InputError) as reason:
            outcome = Outcome(row["id"], quantity.name, quantity.unit, measured, None, skipped=in_one_line(reason))
        outcomes.append(outcome)
    return outcomes


def summarise(suite: str, outcomes: Sequence[Outcome], bounds: Bounds) -> dict[str, Any]:
    """A suite's JSON: its rows, mean, median and largest absolute error, signed bias, and whether bounds are kept."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    sizes = [abs(error) for error in errors]
    mean, largest = (statistics.fmean(sizes), max(sizes)) if sizes else (None, None)
    skipped = len(outcomes) - len(errors)
    bounded = bounds.mean is not None or bounds.row is not None
    passed = (
        mean is not None
        and largest is not None
        and skipped <= MAX_SKIPPED * len(outcomes)
        and (bounds.mean is None or mean <= bounds.mean)
        and (bounds.row is None or largest <= bounds.row)
    )
    return {
        "suite": suite,
        "rows": [outcome.to_dict() for outcome in outcomes],
        "n_rows": len(outcomes),
        "n_skipped": skipped,
        "mean_abs": mean,
        "median_abs": statistics.median(sizes) if sizes else None,
        "max_abs": largest,
        "bias": statistics.fmean(errors) if errors else None,
        "bounds": {"mean": bounds.mean, "row": bounds.row},
        "passed": passed if bounded else None,
    }
