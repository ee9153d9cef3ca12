"""``python -m simulator.validation.coverage [--write]``: how many measured steps lie in the intervals that the other
sources give, source by source; written into docs/accuracy.md.

A row is left out together with all others of its source, so that what is tested is a source that nobody has seen.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from simulator.validation.likeness import Evidence, evidence
from simulator.validation.prediction_interval import LEVEL, MULTIPLE, prediction_interval, scatter
from simulator.validation.traits import SOFTWARE_YEAR

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"
#: Spreads that are added to each distance before its logarithm is taken: a step in the very middle is no miracle. The
#: number is chosen, from no measurement: a tenth of the spread itself.
NEAR = 0.1
#: What surrounds the table in `PAGE`.
BEGIN, END = "<!-- coverage: python -m simulator.validation.coverage --write -->\n", "<!-- end of coverage -->\n"


@dataclass(frozen=True)
class LeftOutRow:
    """A measured step beside the interval that the other sources give.

    ``spreads``: distance from the middle of the interval, as a multiple of its spread. ``half_width``: half of the
    interval, as a share of the simulated time. ``unwidened``: the distance as a multiple of the spread before `scatter`
    widens it. ``age``: years of the software. ``sharded``: parameters are gathered for each pass.
    """

    source: str
    error: float
    spreads: float
    half_width: float
    unwidened: float = 0.0
    age: float = 0.0
    sharded: bool = False

    @property
    def is_inside(self) -> bool:
        return self.spreads <= MULTIPLE


@dataclass(frozen=True)
class SourceCoverage:
    """Coverage of one source's rows, or of all: ``n_rows``, of which ``compared`` have an interval.

    ``error``: median error of the simulation. Without compared rows ``inside`` and ``half_width`` are NaN.
    """

    source: str
    n_rows: int
    error: float
    compared: int
    inside: float
    half_width: float


def left_out_rows(measured: Evidence) -> list[LeftOutRow | None]:
    """Return each row beside the interval of the other sources; None where nothing of theirs is comparable."""
    rows: list[LeftOutRow | None] = []
    for step, number in zip(measured.steps, measured.sources, strict=True):
        interval = prediction_interval(measured, step.traits, without=int(number))
        if interval is None:
            rows.append(None)
            continue
        middle, half = (interval.low + interval.high) / 2, (interval.high - interval.low) / 2
        spreads = MULTIPLE * abs(step.log_ratio - middle) / half
        width = (math.exp(interval.high) - math.exp(interval.low)) / 2
        age, sharded = float(SOFTWARE_YEAR - step.traits.year), step.traits.sharded
        unwidened = spreads * scatter(step.traits)
        rows.append(LeftOutRow(step.source, step.error, spreads, width, unwidened, age, sharded))
    return rows


def coverage(measured: Evidence) -> list[SourceCoverage]:
    """Return the coverage by source, and last that of all rows."""
    rows = left_out_rows(measured)
    result = []
    for name in (*measured.names, ""):
        places = [place for place, step in enumerate(measured.steps) if name in ("", step.source)]
        compared = [row for place in places if (row := rows[place]) is not None]
        result.append(
            SourceCoverage(
                name or "all",
                len(places),
                median(measured.steps[place].error for place in places),
                len(compared),
                fmean(row.is_inside for row in compared) if compared else math.nan,
                median(row.half_width for row in compared) if compared else math.nan,
            )
        )
    return result


def fitting_multiple(rows: Sequence[LeftOutRow]) -> float:
    """Return the multiple of the spread at which `LEVEL` of the rows lie inside."""
    spreads = sorted(row.spreads for row in rows)
    return spreads[math.ceil(LEVEL * len(spreads)) - 1]


def fitted_scatter(rows: Sequence[LeftOutRow]) -> tuple[float, float]:
    """Return `PER_YEAR` and `SHARDED` by least squares of the logarithms of distances, every source counted once."""
    counts = Counter(row.source for row in rows)
    weights = np.sqrt([1 / counts[row.source] for row in rows])
    traits = np.array([(1.0, row.age, float(row.sharded)) for row in rows])
    distances = np.log(np.array([row.unwidened for row in rows]) + NEAR)
    fitted = np.linalg.lstsq(traits * weights[:, None], distances * weights, rcond=None)[0]
    return float(fitted[1]), float(fitted[2])


def unfitted_share(rows: Sequence[LeftOutRow]) -> float:
    """Return the share of rows inside where scatter and multiple, too, are those of the other sources alone."""
    inside: list[bool] = []
    for name in dict.fromkeys(row.source for row in rows):
        per_year, sharded = fitted_scatter([row for row in rows if row.source != name])
        again = [
            replace(row, spreads=row.unwidened / math.exp(per_year * row.age + sharded * row.sharded)) for row in rows
        ]
        multiple = fitting_multiple([row for row in again if row.source != name])
        inside += [row.spreads <= multiple for row in again if row.source == name]
    return fmean(inside)


def content(measured: Evidence) -> str:
    """Return what the page shows in Markdown: the table, and the share without any fit."""
    compared = [row for row in left_out_rows(measured) if row is not None]
    fitted, unfitted = fitting_multiple(compared), unfitted_share(compared)
    per_year, sharded = fitted_scatter(compared)
    return (
        f"{table(coverage(measured))}\n"
        f"The multiple that fits is {fitted:.2f}; scatter grows by {math.exp(per_year) - 1:.0%} a year, "
        f"and by {math.exp(sharded) - 1:.0%} with sharded parameters. "
        f"All three fitted without the source that is left out, {unfitted:.0%} of the steps lie inside.\n"
    )


def table(rows: Sequence[SourceCoverage]) -> str:
    """Return a table of coverages in Markdown."""
    lines = [
        "| source | steps | simulated, middle | with an interval | inside it | half-width, middle |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        shares = f"{row.inside:.0%} | {row.half_width:.0%}" if row.compared else "- | -"
        lines.append(f"| {row.source} | {row.n_rows} | {row.error:+.1%} | {row.compared} | {shares} |")
    return "\n".join(lines) + "\n"


def page_with(text: str, shown: str) -> str:
    """Return the page ``text`` with ``shown`` in place of its table."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{shown}\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m simulator.validation.coverage", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/accuracy.md")
    shown = content(evidence())
    print(shown)
    if parser.parse_args().write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), shown), encoding="utf-8")
