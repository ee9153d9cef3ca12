"""``validate``: predicted against measured, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.cli.options import Json, Quiet, options_named
from simulator.cli.outputs import check_outputs, shows_summary, write_json
from simulator.cli.terminal import progress, show, table, warn
from simulator.units import format_time

if TYPE_CHECKING:
    pass


def command(
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="SUITE", help="Shipped suites; see `list suites`. [all]", show_default=False),
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
    """Print predicted beside measured, row by row.

    Simulates measured steps and collectives. Columns of --rows that are not read are labels, and are named; one that is
    nearly the name of a column that is read is refused.

    Exit status 1: a suite is past its bounds, or skips more than a tenth of its rows. --max-mean and --max-row replace
    a suite's own bounds. --rows without bounds always ends in 0.

    \b
    Examples:
      llmsim validate
      llmsim validate megatron-2022 --json errors.json
      llmsim validate --rows my_runs.csv --max-mean 10
      llmsim validate collectives --rows my_nccl_tests.csv
    """
    check_outputs({"--json": json}, inputs=[rows])

    from simulator.commands.validate import ValidationResult, check_ids, measured_tables, notes_on, suite_results

    with options_named("rows", suites="SUITE", only="--row"):
        tables = measured_tables(suites or [], rows)
        check_ids(row or [], [entry["id"] for table in tables for entry in table.rows])
    mean, most = (None if bound is None else bound / 100 for bound in (max_mean, max_row))
    results = []
    for measured in tables:
        with progress(f"simulating {measured.name}") as far:

            def tell(_: str, number: int, total: int, far: Callable[[str], None] = far) -> None:
                far(f"row {number:,} of {total:,}")

            suite = list(suite_results([measured], row or [], mean, most, tell))
        results += suite
        if shows_summary(json, quiet):
            for one in suite:
                _print(one)
    validation = ValidationResult(results, notes_on(tables, rows, results))
    write_json(json, validation.report)
    warn(validation.warnings)
    if not validation.passed:
        raise typer.Exit(1)


def _print(result: Mapping[str, Any]) -> None:
    what, how = zip(*map(_what, result["rows"]), strict=True)
    lines = [
        {
            "row": entry["id"],
            **operation,
            "measured": _figure(entry["measured"], entry["unit"]),
            "predicted": _figure(entry["predicted"], entry["unit"]),
            "error": "" if entry["error"] is None else f"{entry['error']:+.1%}",
            **algorithm,
        }
        for entry, operation, algorithm in zip(result["rows"], what, how, strict=True)
    ]
    quantity = result["rows"][0]["quantity"].replace("_", " ")
    skipped = [f"{entry['id']} skipped: {entry['skipped']}" for entry in result["rows"] if entry["skipped"]]
    note = [result["note"]] if result.get("note") else []
    show(f"{result['suite']}: {quantity}, simulated against measured", table(lines))
    show(*skipped, *_sets(result), verdict(result), *note, "")


def _what(entry: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return cells of a row of collectives: the operation, and the algorithm with its protocol."""
    if "part" not in entry:
        return {}, {}
    if "op" not in entry:
        return {"operation": "", "GPUs": "", "size": ""}, {"by": ""}
    operation = {"operation": entry["op"], "GPUs": str(entry["n_gpus"]), "size": f"{entry['size_bytes']:,.0f}"}
    return operation, {"by": f"{entry['algorithm']} {entry['protocol']}"}


def _sets(result: Mapping[str, Any]) -> list[str]:
    """Return a line per stack and part of the suite of collectives, and the floor of its errors."""
    if "stacks" not in result:
        return []
    lines = []
    for entry in result["stacks"]:
        sets = [
            f"{key} {entry[key]['geometric_mean']:.1%} ({entry[key]['n']})"
            for key in ("fitted", "others")
            if entry[key]["n"]
        ]
        lines.append(f"  {entry['stack']}: {', '.join(sets)}")
    lines += [
        f"  {part['part']}: {part['geometric_mean']:.1%} ({part['n']}), "
        f"max {part['max_abs']:.0%}, bias {part['bias']:+.1%}"
        for part in result["parts"]
        if part["n"]
    ]
    if result["floor"]["groups"]:
        spread = max(group["spread"] for group in result["floor"]["groups"])
        lines.append(
            f"  floor: {len(result['floor']['groups'])} operations measured more than once on equal hardware are "
            f"{result['floor']['geometric_mean']:.1%} from their mean, at most {spread:.0%} from each other"
        )
    return ["geometric-mean errors of times, of the GPUs that a stack was fitted on and of others (rows):", *lines]


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "s":
        return f"{value:.3f} s" if value >= 0.1 else format_time(value)
    return f"{value:.1f} {unit}"


def verdict(result: Mapping[str, Any]) -> str:
    """A suite's errors and whether it keeps its bounds, in a line."""
    if result["mean_abs"] is None:
        return f"no row could be compared ({result['n_skipped']} skipped)"
    bounds = [f"{what.replace('_', ' ')} {bound:.0%}" for what, bound in result["bounds"].items() if bound is not None]
    from simulator.validation.evaluate import MAX_SKIPPED

    bounds += [f"skipped {MAX_SKIPPED:.0%}"] if bounds and result["n_skipped"] else []
    verdict = {None: "", True: ": met", False: ": NOT MET"}[result["passed"]]
    return (
        f"{_rows(result['n_rows'] - result['n_skipped'])}, {result['n_skipped']} skipped; "
        f"absolute error{_scope(result)}: "
        f"mean {result['mean_abs']:.1%}, median {result['median_abs']:.1%}, max {result['max_abs']:.1%}; "
        f"bias {result['bias']:+.1%}" + _means(result) + (f"; limits: {', '.join(bounds)}{verdict}" if bounds else "")
    )


def _scope(result: Mapping[str, Any]) -> str:
    """Return the rows that the figures are of, where a suite scores its parts apart; else an empty text."""
    return f" of {result['parts'][0]['n']} {result['parts'][0]['part']}" if result.get("parts") else ""


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _means(result: Mapping[str, Any]) -> str:
    """Geometric means, of a suite that has them."""
    means = [("", result.get("geometric_mean")), (" above 64 MiB", result.get("geometric_mean_large"))]
    return "".join(f"; geometric mean{where} {mean:.1%}" for where, mean in means if mean is not None)
