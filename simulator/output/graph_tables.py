"""Tables of what is in execution traces, and of their replays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from simulator.output.fitted_table import FittedTable
from simulator.output.tables import percent, time_beside
from simulator.units import counted, format_time

GraphResult = Mapping[str, Any]
_NAME_LENGTH = 70
#: Ranks, or ranges of ranks that are alike, of which tables have rows.
_ROWS = 16
Cells = TypeVar("Cells")


def shown_graphs(report: GraphResult) -> Iterator[FittedTable]:
    """Yield the tables of ``trace show`` for execution traces."""
    ranks = report["ranks"]
    table = FittedTable(
        f"Operations of {counted(len(ranks), 'rank')}, as {report['origin']} has them",
        ("rank", "right"), ("kind", "left"), ("operations", "right"), ("time", "right"), ("without a time", "right"),
        ("GFLOP", "right"), ("MB", "right"),
    )  # fmt: skip
    alike = _alike((rank["rank"], (rank["kinds"], rank["path_s"])) for rank in ranks)
    for who, (kinds, path_s) in alike[:_ROWS]:
        for kind in kinds:
            table.add_row(
                who, kind["kind"], f"{kind['nodes']:,}", format_time(kind["seconds"]), f"{kind['untimed']:,}",
                _amount(kind["flops"], 1e9), _amount(kind["nbytes"], 1e6),
            )  # fmt: skip
        table.add_row(who, "longest chain", "", format_time(path_s), "", "", "")
    _tell_more(table, len(alike), 7)
    yield table
    if report["exchanges"]:
        yield _exchanges(report)
    names = FittedTable(
        "Operations that take most time (mean rank)",
        ("name", "left"), ("kind", "left"), ("operations", "right"), ("time", "right"),
    )  # fmt: skip
    longest = max((one["seconds"] for one in report["names"]), default=0.0)
    for one in report["names"]:
        seconds = time_beside(one["seconds"], longest)
        names.add_row(one["name"][:_NAME_LENGTH], one["kind"], f"{one['launches']:,.6g}", seconds)
    yield names


def _exchanges(report: GraphResult) -> FittedTable:
    table = FittedTable(
        "Communication of all ranks",
        ("kind", "left"), ("ranks", "right"), ("calls", "right"), ("MB that ranks put in", "right"),
        ("time", "right"),
    )  # fmt: skip
    for one in report["exchanges"]:
        size = str(one["group_size"] or "-")
        put_in = _amount(one["nbytes"], 1e6)
        table.add_row(one["operation"], size, f"{one['calls']:,}", put_in, format_time(one["seconds"]))
    return table


def replayed_graphs(report: GraphResult) -> Iterator[FittedTable]:
    """Yield the table of ``trace replay`` for execution traces."""
    ranks = report["ranks"]
    conditions = f"on {report['cluster']}" if report["cluster"] else "as recorded"
    table = FittedTable(
        f"The step takes {format_time(report['step_s'])}, played {conditions}",
        ("rank", "right"), ("ends at", "right"), ("computes", "right"), ("host", "right"), ("communication", "right"),
        ("exposed", "right"), ("overlap", "right"),
    )  # fmt: skip
    rows = []
    for rank in ranks:
        keys = ("end_s", "compute_s", "host_s", "communication_s", "exposed_s")
        times = [time_beside(rank[key], report["step_s"]) for key in keys]
        rows.append((rank["rank"], (*times, "-" if rank["overlap"] is None else percent(rank["overlap"]))))
    alike = _alike(rows)
    for who, cells in alike[:_ROWS]:
        table.add_row(who, *cells)
    _tell_more(table, len(alike), 7)
    yield table


def _tell_more(table: FittedTable, count: int, columns: int) -> None:
    """End a table by how many of ``count`` ranks or ranges of ranks it leaves out."""
    if count > _ROWS:
        table.add_row(f"{count - _ROWS:,} more", *[""] * (columns - 1))


def _alike(rows: Iterable[tuple[int, Cells]]) -> list[tuple[str, Cells]]:
    """Return equal rows of consecutive ranks once, with these ranks.

    >>> _alike([(0, "a"), (1, "a"), (2, "b")])
    [('0-1', 'a'), ('2', 'b')]
    """
    runs: list[tuple[int, int, Cells]] = []
    for rank, row in rows:
        if runs and runs[-1][2] == row and runs[-1][1] == rank - 1:
            runs[-1] = runs[-1][0], rank, row
        else:
            runs.append((rank, rank, row))
    return [(str(first) if first == last else f"{first}-{last}", row) for first, last, row in runs]


def _amount(value: float, unit: float) -> str:
    return f"{value / unit:,.4g}" if value else ""
