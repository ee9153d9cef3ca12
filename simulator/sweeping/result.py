"""The result of a sweep: its points and their outcomes, as a table, a picture and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from simulator.output.sweep_figures import SweepRow, best_first, check_figure, check_present
from simulator.output.sweep_files import sweep_columns, write_csv, write_parquet
from simulator.output.sweep_table import count_line
from simulator.results import Result
from simulator.sweeping.outcome import PointOutcome
from simulator.sweeping.point import Point, source_name
from simulator.sweeping.space import Space
from simulator.units import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType

#: Warnings of points that are told one by one.
_MOST_WARNINGS = 5


def sweep_row(keys: Sequence[str], point: Point, outcome: PointOutcome) -> SweepRow:
    """Return the row of a point in tables; ``keys``: those in which points of the sweep differ."""
    return {
        "workload": source_name(point.workload),
        **{key: point.changes[key] for key in keys if key in point.changes},
        **outcome.figures,
        "status": str(outcome.status),
        "error": outcome.error or None,
        "key": outcome.key,
    }


@dataclass(frozen=True, repr=False)
class SweepResult(Result):
    """Result of a sweep.

    ``outcomes``: of each point of ``space``, in their order. ``kept``: how many were in the store before.
    """

    command: ClassVar[str] = "sweep"

    space: Space
    outcomes: tuple[PointOutcome, ...]
    kept: int = 0

    @cached_property
    def rows(self) -> tuple[SweepRow, ...]:
        """A flat mapping per point: workload, changed keys, figures, and what became of it; not to be changed."""
        points = zip(self.space.points(), self.outcomes, strict=True)
        return tuple(sweep_row(self.space.keys, point, outcome) for point, outcome in points)

    @cached_property
    def warnings(self) -> list[str]:
        """Warnings of points, each once with the number of points that have it, the most frequent first."""
        counts = Counter(warning for outcome in self.outcomes for warning in outcome.warnings)
        points = counted(len(self.outcomes), "point")
        warnings = [f"{warning} ({count:,} of {points})" for warning, count in counts.most_common()]
        rest = len(warnings) - _MOST_WARNINGS
        return warnings if rest <= 0 else [*warnings[:_MOST_WARNINGS], f"and {rest:,} other warnings; --json has all"]

    def content(self) -> dict[str, Any]:
        """Return the points under the names of the JSON output: what each changes, and its figures or its error."""
        return {
            "workloads": [source_name(workload) for workload in self.space.workloads],
            "keys": list(self.space.keys),
            "set": dict(self.space.changes),
            "points": [
                {
                    "workload": source_name(point.workload),
                    "set": dict(point.changes),
                    "key": outcome.key,
                    "status": str(outcome.status),
                    "figures": dict(outcome.figures) or None,
                    "error": outcome.error or None,
                    "warnings": list(outcome.warnings),
                    "wall_s": outcome.wall_s,
                }
                for point, outcome in zip(self.space.points(), self.outcomes, strict=True)
            ],
        }

    def table(self, sort: str = "step_time_s") -> pd.DataFrame:
        """Return a row per point, the best by ``sort`` first: those that fit, those that do not, those without figures.

        Columns are the workload, the keys that differ, the figures, ``status``, ``error`` and ``key``; the index is the
        number of the point. Raises `InputError` where no point has the figure.
        """
        import pandas as pd

        check_figure(sort, "sort")
        check_present(self.rows, sort, "sort")
        frame = pd.DataFrame(list(self.rows), columns=list(sweep_columns(self.space.keys)))
        places = {id(row): number for number, row in enumerate(self.rows)}
        return frame.loc[[places[id(row)] for row in best_first(self.rows, sort)]]

    def plot(self, figure: str = "step_time_s") -> Figure:
        """Draw a figure of all points: a line or bars of one key, a heat map of two, of more the best over the rest.

        Raises `InputError` where no point has the figure.
        """
        from simulator.output.sweep_plot import SweptKeys, SweptValues, sweep_plot

        check_figure(figure, "figure")
        check_present(self.rows, figure, "figure")
        dimensions = tuple(
            SweptKeys(one.keys, tuple(tuple(setting.get(key) for key in one.keys) for setting in one.settings))
            for one in self.space.dimensions
        )
        shape = (len(self.space.workloads), *(len(one.settings) for one in dimensions))
        values = np.array([outcome.figures.get(figure, np.nan) for outcome in self.outcomes], dtype=float)
        fits = np.array([outcome.figures.get("fits", False) for outcome in self.outcomes], dtype=bool)
        names = tuple(source_name(workload) for workload in self.space.workloads)
        simulated = [outcome.figures for outcome in self.outcomes if outcome.figures]
        complete = all(figure in figures for figures in simulated)
        values, fits = values.reshape(shape), fits.reshape(shape)
        return sweep_plot(SweptValues(names, dimensions, values, fits, figure, complete=complete))

    def summary(self, sort: str = "step_time_s", top: int | None = None) -> RenderableType:
        """Return the results as tables for a terminal, at most ``top`` points with figures.

        Raises `InputError` where no point has the figure ``sort``.
        """
        from simulator.output.sweep_table import sweep_summary

        check_present(self.rows, sort, "sort")

        return sweep_summary(self.rows, self.space.keys, sort=sort, top=top)

    def save_csv(self, path: str | Path) -> None:
        """Write a CSV file, a row per point in their order."""
        write_csv(self.rows, self.space.keys, Path(path))

    def save_parquet(self, path: str | Path) -> None:
        """Write a Parquet file, a row per point in their order. Raises `InputError` without pyarrow."""
        write_parquet(self.rows, self.space.keys, Path(path))

    def __repr__(self) -> str:
        """Return how many points there are, and the best of them."""
        best = best_first(self.rows, "step_time_s")[0]
        if not best.get("fits"):
            return count_line(self.rows)
        settings = ", ".join(f"{key}={best[key]}" for key in self.space.keys if key in best)
        shortest = f"shortest step: {best['step_time_s']:.4g} s, {best['workload']} {settings}"
        return f"{count_line(self.rows)}\n{shortest.rstrip()}"
