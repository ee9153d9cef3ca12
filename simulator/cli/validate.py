"""``validate``: predicted against measured, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from simulator.analysis.envelope import envelope
from simulator.cli.options import Json, Quiet
from simulator.cli.outputs import STDOUT, check_outputs, write_json
from simulator.cli.terminal import console, progress, table
from simulator.errors import InputError


def command(
    suites: Annotated[
        list[str] | None, typer.Argument(metavar="[SUITE]...", help="Shipped suites. [all]", show_default=False)
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Your own measurements, in the columns of the shipped tables."),
    ] = None,
    row: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this row; repeatable.")] = None,
    max_mean: Annotated[
        float | None, typer.Option(metavar="PCT", min=0, help="Fail when the mean absolute error is above.")
    ] = None,
    max_row: Annotated[float | None, typer.Option(metavar="PCT", min=0, help="Fail when any error is above.")] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Simulate measured steps and print the error of every row.

    Exit status 1 where a suite is past its bounds (its own, or --max-mean and --max-row) or skips more than a tenth of
    its rows. --rows without bounds always ends in 0.

    \b
    Examples:
      llmsim validate
      llmsim validate megatron-2022 --json errors.json
      llmsim validate --rows my_runs.csv --max-mean 10
    """
    from simulator.config.files import closest
    from simulator.validation import STEP_TIME, SUITES, Bounds, evaluate, memory_suite, read_rows, summarise
    from simulator.validation.record import memory_gib, step_time_s

    check_outputs({"--json": json}, inputs=[rows])
    if rows is not None and suites:
        raise InputError("is not combined with shipped suites", file="--rows", found=" ".join(suites))
    known = [*SUITES, memory_suite.NAME]
    for name in suites or ():
        if name not in known:
            raise InputError(
                "unknown suite", key="SUITE", found=name, allowed=", ".join(known), fix=closest(name, known)
            )
    jobs: list[tuple[str, list[dict[str, str]], Any, Bounds]] = []
    if rows is not None:
        jobs.append((rows.stem, read_rows(rows), lambda _: {}, Bounds()))
    for name in dict.fromkeys(suites or known) if rows is None else ():
        if name == memory_suite.NAME:
            jobs.append((name, memory_suite.memory_rows(), memory_suite.settings_of, memory_suite.BOUNDS))
        else:
            suite = SUITES[name]
            jobs.append((name, read_rows(suite.table), suite.settings_of, suite.bounds))
    _check_ids(row, [entry["id"] for _, of_suite, _, _ in jobs for entry in of_suite])

    results = []
    for name, of_suite, settings_of, own in jobs:
        wanted = [entry for entry in of_suite if not row or entry["id"] in row]
        if not wanted:
            continue
        bounds = Bounds(own.mean if max_mean is None else max_mean / 100, own.row if max_row is None else max_row / 100)
        with progress(f"simulating {name}"):
            of_memory = rows is None and name == memory_suite.NAME
            predict, quantity = (memory_gib, memory_suite.MEMORY) if of_memory else (step_time_s, STEP_TIME)
            results.append(summarise(name, evaluate(wanted, settings_of, predict, quantity), bounds))
    write_json(json, envelope("validate", suites=results))
    if not quiet and json != STDOUT:
        _print(results)
    if any(result["passed"] is False for result in results):
        raise typer.Exit(1)


def _check_ids(wanted: list[str] | None, known: list[str]) -> None:
    from simulator.config.files import closest

    for name in wanted or ():
        if name not in known:
            raise InputError("no such row", file="--row", found=name, fix=closest(name, known))


def _print(results: list[dict[str, Any]]) -> None:
    for result in results:
        lines = [
            {
                "row": entry["id"],
                "measured": _figure(entry["measured"], entry["unit"]),
                "predicted": _figure(entry["predicted"], entry["unit"]),
                "error": "" if entry["error"] is None else f"{entry['error']:+.1%}",
                "": f"skipped: {entry['skipped']}" if entry["skipped"] else "",
            }
            for entry in result["rows"]
        ]
        what = result["rows"][0]["quantity"].replace("_", " ")
        console().print(table(lines, title=f"{result['suite']}: {what}, simulated against measured"))
        console().print(verdict(result), "")


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.3f} {unit}" if unit == "s" else f"{value:.1f} {unit}"


def verdict(result: Mapping[str, Any]) -> str:
    """A suite's errors and whether it keeps its bounds, in a line."""
    if result["mean_abs"] is None:
        return f"no row could be simulated ({result['n_skipped']} skipped)"
    bounds = [
        f"{what} {bound:.0%}"
        for what, bound in (("mean", result["bounds"]["mean"]), ("row", result["bounds"]["row"]))
        if bound is not None
    ]
    verdict = {None: "", True: " - kept", False: " - FAILED"}[result["passed"]]
    return (
        f"{_rows(result['n_rows'] - result['n_skipped'])}, {result['n_skipped']} skipped; absolute error: "
        f"mean {result['mean_abs']:.1%}, median {result['median_abs']:.1%}, max {result['max_abs']:.1%}; "
        f"bias {result['bias']:+.1%}" + (f"; bounds: {', '.join(bounds)}{verdict}" if bounds else "")
    )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
