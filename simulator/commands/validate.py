"""Python entry point of predicted against measured: `validate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from simulator.bounds import as_number
from simulator.errors import InputError
from simulator.input_files import closest
from simulator.results import Result
from simulator.validation import SUITES, Bounds, collectives, evaluate, memory_suite, read_rows, summarise
from simulator.validation.collective_scores import score
from simulator.validation.record import (
    ALL,
    outcomes_of_collectives,
    outcomes_of_memory,
    outcomes_of_steps,
    step_time_s,
)
from simulator.validation.rows import labels
from simulator.validation.tables import label_warnings


@dataclass(frozen=True, repr=False)
class ValidationResult(Result):
    """Predictions beside measurements: ``suites`` as in the JSON output, and ``notes`` on a user's own rows."""

    command: ClassVar[str] = "validate"

    suites: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()

    @property
    def warnings(self) -> list[str]:
        """Notes on a user's own rows."""
        return list(self.notes)

    @property
    def passed(self) -> bool:
        """True where no suite is past its bounds."""
        return all(suite["passed"] is not False for suite in self.suites)

    def content(self) -> dict[str, Any]:
        """Return the suites under the names of the JSON output."""
        return {"suites": [dict(suite) for suite in self.suites]}

    def __repr__(self) -> str:
        """Return a line per suite: its rows, its mean absolute error, and whether it keeps its bounds."""
        return "\n".join(map(_line, self.suites))


def _line(suite: Mapping[str, Any]) -> str:
    kept = {None: "", True: ", bounds met", False: ", bounds NOT MET"}[suite["passed"]]
    error = "nothing compared" if suite["mean_abs"] is None else f"mean absolute error {suite['mean_abs']:.1%}"
    return f"{suite['suite']}: {suite['n_rows'] - suite['n_skipped']} of {suite['n_rows']} rows, {error}{kept}"


def validate(
    *suites: str,
    rows: str | Path | None = None,
    only: Sequence[str] = (),
    max_mean: float | None = None,
    max_row: float | None = None,
    watch: Callable[[str, int, int], object] = lambda suite, row, total: None,
) -> ValidationResult:
    """Simulate what was measured: shipped ``suites`` [all], or the ``rows`` of a CSV file.

    ``only``: ids of rows. ``max_mean``, ``max_row``: bounds of the mean absolute error and of any error, as shares
    [those of the suites]. ``watch`` is told the suite, the row that is simulated, and how many there are. Raises
    `InputError` on what cannot be used.
    """
    for name, bound in (("max_mean", max_mean), ("max_row", max_row)):
        if bound is not None:
            as_number(bound, file=name, allowed="a share, >= 0")
    tables = measured_tables(list(suites), None if rows is None else Path(rows))
    check_ids(list(only), [entry["id"] for table in tables for entry in table.rows])
    results = list(suite_results(tables, only, max_mean, max_row, watch))
    return ValidationResult(results, notes_on(tables, rows, results))


def suite_results(
    tables: Sequence[MeasuredTable],
    only: Sequence[str],
    max_mean: float | None,
    max_row: float | None,
    watch: Callable[[str, int, int], object],
) -> Iterator[dict[str, Any]]:
    """Yield the result of each table that has rows to simulate, as soon as it is there (see `validate`)."""
    for table in tables:
        wanted = [entry for entry in table.rows if not only or entry["id"] in only]
        if not wanted:
            continue
        bounds = Bounds(
            table.bounds.mean if max_mean is None else max_mean, table.bounds.row if max_row is None else max_row
        )
        yield table.result(_one_by_one(table.name, wanted, watch), bounds)


def _one_by_one(
    suite: str, rows: Sequence[dict[str, str]], watch: Callable[[str, int, int], object]
) -> Iterator[dict[str, str]]:
    for number, row in enumerate(rows, 1):
        watch(suite, number, len(rows))
        yield row


def notes_on(tables: Sequence[MeasuredTable], rows: object, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what to tell of a user's rows: columns that are not read, and that nothing could be compared."""
    notes = [note for table in tables for note in table.notes]
    if rows is not None and all(result["mean_abs"] is None for result in results):
        notes.append(f"no row of {rows} could be simulated: nothing has been compared")
    return notes


@dataclass(frozen=True)
class MeasuredTable:
    """A table of measurements, and what makes its JSON of rows and bounds; ``notes``: what to tell of its columns."""

    name: str
    rows: list[dict[str, str]]
    bounds: Bounds
    result: Callable[[Iterable[dict[str, str]], Bounds], dict[str, Any]]
    notes: tuple[str, ...] = ()


def measured_tables(suites: list[str], rows: Path | None) -> list[MeasuredTable]:
    """Return the suites to validate, or the user's rows as one: steps, or collectives where that suite is named.

    Raises `InputError` on an unknown suite, and on suites beside a user's rows.
    """
    for name in suites:
        if name not in ALL:
            raise InputError("unknown suite", file="suites", found=name, allowed=", ".join(ALL), fix=closest(name, ALL))
    if rows is not None and suites not in ([], [collectives.NAME]):
        allowed = f"no suite, or {collectives.NAME} where the rows are of collectives"
        raise InputError("is not combined with shipped suites", file="rows", found=" ".join(suites), allowed=allowed)
    names = list(dict.fromkeys(suites or ALL)) if rows is None else []
    jobs = [_suite(name) for name in names]
    if rows is not None:
        jobs.append(_own_collectives(rows) if suites else _own_steps(rows))
    return jobs


def _suite(name: str) -> MeasuredTable:
    if name == collectives.NAME:
        return MeasuredTable(
            name, collectives.measurements(), Bounds(), lambda rows, to: score(outcomes_of_collectives(rows), to)
        )
    if name in memory_suite.MEMORY_SUITES:
        chosen = memory_suite.MEMORY_SUITES[name]
        return MeasuredTable(
            name, chosen.rows, chosen.bounds, lambda rows, to: summarise(name, outcomes_of_memory(rows), to)
        )
    suite = SUITES[name]
    return MeasuredTable(
        name,
        read_rows(suite.table),
        suite.bounds,
        lambda rows, to: summarise(name, outcomes_of_steps(rows, suite), to) | {"note": suite.note},
    )


def _own_steps(rows: Path) -> MeasuredTable:
    user_rows = read_rows(rows)
    return MeasuredTable(
        rows.stem,
        user_rows,
        Bounds(),
        lambda some, to: summarise(rows.stem, evaluate(some, lambda _: {}, step_time_s), to),
        label_warnings(labels(user_rows)),
    )


def _own_collectives(rows: Path) -> MeasuredTable:
    user_rows = collectives.measurements(rows)
    return MeasuredTable(
        rows.stem,
        user_rows,
        Bounds(),
        lambda some, to: score(outcomes_of_collectives(some), to, name=rows.stem),
        label_warnings(collectives.labels(user_rows)),
    )


def check_ids(asked_ids: list[str] | None, row_ids: list[str]) -> None:
    for name in asked_ids or ():
        if name not in row_ids:
            raise InputError("no such row", file="only", found=name, fix=closest(name, row_ids))
