"""Figures by which jobs are compared: their names in tables and pictures, how they are written, what is better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from simulator.analysis.training.memory import NARROW, is_narrow
from simulator.errors import InputError
from simulator.input_files import closest
from simulator.units import GiB, ms, us

FigureUnit = Literal["time", "share", "bytes", "number", "count", "flag"]


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of `simulator.analysis.training.report.key_figures`.

    ``label``: in heads and on axes. ``unit``: kind of its unit. ``larger_is_better``: which of two is preferred.
    ``needs``: keys of a workload without which it has no such figure. ``judged``: from measured steps, so that jobs to
    which none is comparable have no such figure.
    """

    label: str
    unit: FigureUnit
    larger_is_better: bool = False
    needs: tuple[str, ...] = ()
    judged: bool = False

    @property
    def is_optional(self) -> bool:
        """True where some jobs have no such figure."""
        return self.judged or bool(self.needs)

    @property
    def kind(self) -> type:
        """Type of its values in files."""
        return {"count": int, "flag": bool}.get(self.unit, float)


_TOKENS = "training.total_tokens"

#: Name in the JSON output -> how it is shown, in the order of tables and files.
FIGURES: Mapping[str, ComparedFigure] = {
    "step_time_s": ComparedFigure("step time", "time"),
    "step_time_low_s": ComparedFigure("step time, low end", "time", judged=True),
    "step_time_high_s": ComparedFigure("step time, high end", "time", judged=True),
    "tokens_per_s": ComparedFigure("tokens/s", "number", True),
    "tokens_per_s_per_gpu": ComparedFigure("tokens/s per GPU", "number", True),
    "mfu": ComparedFigure("MFU", "share", True),
    "hfu": ComparedFigure("HFU", "share", True),
    "bubble_fraction": ComparedFigure("bubble", "share", needs=("parallelism.pp",)),
    "idle_in_passes_fraction": ComparedFigure("idle in passes", "share"),
    "exposed_communication_fraction": ComparedFigure("exposed communication", "share"),
    "host_bound_fraction": ComparedFigure("host-bound", "share"),
    "fits": ComparedFigure("fits", "flag", True),
    "peak_bytes": ComparedFigure("peak memory", "bytes"),
    "capacity_bytes": ComparedFigure("GPU memory", "bytes", True),
    "headroom_bytes": ComparedFigure("headroom", "bytes", True),
    "n_gpus": ComparedFigure("GPUs", "count"),
    "n_microbatches": ComparedFigure("micro-batches", "count"),
    "days": ComparedFigure("days", "number", needs=(_TOKENS,)),
    "gpu_hours": ComparedFigure("GPU-hours", "number", needs=(_TOKENS,)),
    "cost": ComparedFigure("cost", "number", needs=(_TOKENS, "cluster.price_per_gpu_hour")),
}


@dataclass(frozen=True)
class FigureScale:
    """One way to write all values of a figure, so that they compare at a glance.

    A value is divided by ``size``, and has so many ``decimals`` before its ``unit``.
    """

    size: float
    unit: str
    decimals: int

    @classmethod
    def fitting(cls, figure: ComparedFigure, values: Sequence[float], digits: int = 4) -> FigureScale:
        """Return the scale at which the smallest of ``values`` has about so many ``digits``.

        >>> scale = FigureScale.fitting(FIGURES["step_time_s"], [0.02083, 0.9])
        >>> scale.text(0.02083), scale.text(0.9)
        ('20.83 ms', '900.00 ms')
        """
        sizes = [abs(value) for value in values if value]
        largest, smallest = max(sizes, default=1.0), min(sizes, default=1.0)
        if figure.unit == "share":
            return cls(0.01, " %", 1)
        if figure.unit == "bytes":
            return cls(GiB, " GiB", 1)
        if figure.unit != "time":
            return cls(1.0, "", 0 if figure.unit == "count" else _decimals(smallest, digits))
        unit, size = (" s", 1.0) if largest >= 1 else (" ms", ms) if largest >= ms else (" us", us)
        return cls(size, unit, _decimals(smallest / size, digits))

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        return f"{value / self.size:,.{self.decimals}f}{self.unit}"


def _decimals(smallest: float, digits: int) -> int:
    return min(max(digits - 1 - math.floor(math.log10(smallest)), 0), 4)


SweepRow = Mapping[str, Any]
#: Head of a column of prediction intervals, which stands behind the step time.
INTERVAL = "90 % interval"


def interval_cell(row: SweepRow, scale: FigureScale) -> str:
    """Return a point's prediction interval on the ``scale`` of step times; "-" where nothing is comparable.

    >>> interval_cell({"step_time_low_s": 18.9, "step_time_high_s": 21.8}, FigureScale(1.0, " s", 1))
    '18.9-21.8 s'
    """
    ends = [row.get(name) for name in ("step_time_low_s", "step_time_high_s")]
    if None in ends:
        return "-"
    low, high = (scale.text(end) for end in ends if end is not None)
    return f"{low.removesuffix(scale.unit)}-{high}"


def interval_note(rows: Sequence[SweepRow]) -> list[str]:
    """Return a line on what "-" in the column of intervals means, where any of ``rows`` has it there."""
    if all(interval_cell(row, FigureScale(1.0, "", 0)) != "-" for row in rows):
        return []
    return [f"- as {INTERVAL}: no measured step is comparable; llmsim run says in what they differ."]


def headroom_cell(row: SweepRow, scale: FigureScale) -> str:
    """Return the memory that a point leaves, behind a star where that is little.

    >>> headroom_cell({"headroom_bytes": 1 * GiB, "capacity_bytes": 80 * GiB}, FigureScale(GiB, " GiB", 1))
    '* 1.0 GiB'
    """
    return f"{'* ' if _barely_fits(row) else ''}{scale.text(row['headroom_bytes'])}"


def headroom_note(rows: Sequence[SweepRow]) -> list[str]:
    """Return a line on what the star means, where any of ``rows`` has it."""
    if not any(map(_barely_fits, rows)):
        return []
    left = f"less than {100 * NARROW:.0f} % of a GPU is left"
    return [f"* barely fits: {left}, and simulated memory is off by more than that on average."]


def _barely_fits(row: SweepRow) -> bool:
    return is_narrow(row["capacity_bytes"] - row["headroom_bytes"], row["capacity_bytes"])


def check_figure(name: str, option: str) -> None:
    """Raise `InputError`, naming ``option``, where points are not compared by a figure of this name."""
    names = [figure for figure in FIGURES if FIGURES[figure].unit != "flag"]
    if name not in names:
        near = closest(name, names)
        raise InputError("is no figure of a point", file=option, found=name, allowed=", ".join(names), fix=near)


def check_present(rows: Sequence[SweepRow], figure: str, option: str) -> None:
    """Raise `InputError`, naming ``option``, where points were simulated and none of them has the figure."""
    simulated = [row for row in rows if row["status"] == "simulated"]
    if simulated and all(row.get(figure) is None for row in simulated):
        needs = FIGURES[figure].needs
        needed = " and ".join(needs) or "measured steps like the job"
        fix = " and ".join(f"{key}=NUMBER" for key in needs) or None
        raise InputError(f"no point has this figure, which needs {needed}", file=option, found=figure, fix=fix)


def best_first(rows: Sequence[SweepRow], figure: str) -> list[SweepRow]:
    """Return rows by a figure, the best first: those that fit, those that do not, those without figures.

    Equal ones keep their order.
    """
    sign = -1 if FIGURES[figure].larger_is_better else 1

    def place(row: SweepRow) -> tuple[int, float]:
        if row["status"] != "simulated":
            return 3, 0.0
        value = row.get(figure)
        return (2, 0.0) if value is None else (0 if row["fits"] else 1, sign * value)

    return sorted(rows, key=place)
