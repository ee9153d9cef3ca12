"""Tables of a summary, and the form of their figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simulator.output.fitted_table import FittedTable
from simulator.units import format_bytes, format_time, ms, us

_BAR = 30
#: Name of the bubble in `time_breakdown_s`; the pipeline's bubble is another figure.
WAITING = "waiting for other ranks"
HOST = "waiting for the host"
_PATH_ROWS = 8
#: Links named per kind of communication.
_LINKS_OF_KIND = 2

JsonReport = Mapping[str, Any]


def breakdown(report: JsonReport) -> FittedTable:
    """Return the time breakdown as rows with a bar; parts without time are left out."""
    times = report["time_breakdown_s"]
    rows = [
        ("compute", times["compute"]),
        ("recompute", times["recompute"]),
        ("optimizer", times["optimizer"]),
        *((f"exposed {kind} communication", seconds) for kind, seconds in times["exposed"].items()),
        (HOST, times["host"]),
        (WAITING, times["bubble"]),
        ("waiting for the step's end", times["other"]),
    ]
    title = "Where a GPU's time goes (mean over GPUs)"
    return bars(title, [row for row in rows if row[1] >= 5e-4 * report["step_time_s"]], report["step_time_s"])


def critical_path(path: Sequence[Mapping[str, Any]]) -> FittedTable:
    step = sum(row["seconds"] for row in path)
    rows = [(row["class"], row["seconds"]) for row in path[:_PATH_ROWS]]
    rest = sum(row["seconds"] for row in path[_PATH_ROWS:])
    if rest > 0:
        rows.append(("the rest", rest))
    return bars("What the step's length is made of (critical path)", rows, step)


def communication(report: JsonReport) -> FittedTable:
    table = FittedTable(
        "Communication (per GPU)",
        ("kind", "left"), ("sent", "right"), ("in flight", "right"), ("exposed", "right"), ("algorithm", "left"),
        ("on links, the slowest first", "left"),
    )  # fmt: skip
    step = report["step_time_s"]
    for kind, row in report["communication"].items():
        if row["time_s"] or row["bytes_per_gpu"]:
            times = (time_beside(row[key], step) for key in ("time_s", "exposed_s"))
            links = ", ".join(link["links"] for link in row["links"][:_LINKS_OF_KIND])
            table.add_row(kind, format_bytes(row["bytes_per_gpu"]), *times, str(row["algorithm"]), links)
    return table


def busiest(links: Sequence[Mapping[str, Any]]) -> FittedTable:
    table = FittedTable(
        "Busiest links, by the share of the step's time in which they would be full",
        ("link", "left"), ("alike, each way counted", "right"), ("carried by each", "right"), ("in use", "right"),
    )  # fmt: skip
    for row in links[:5]:
        table.add_row(row["name"], alike_links(row), format_bytes(row["bytes"]), percent(row["utilisation"]))
    return table


def alike_links(row: Mapping[str, Any]) -> str:
    """Return how many links of a kind a row is of; both directions of a cable are links.

    >>> alike_links({"kind": "pcie", "count": 8})
    '8 pcie'
    """
    return f"{row['count']:,} {row['kind']}"


def contention(report: JsonReport, title: str) -> FittedTable:
    """Return the links on which transfers slowed each other, and the loss of each against an idle network."""
    table = FittedTable(
        title,
        ("full link", "left"), ("alike", "right"), ("transfers on it", "left"), ("of these at a time", "right"),
        ("beside others, in a step", "right"), ("lost by each, in a step", "right"),
    )  # fmt: skip
    several = len({flow["job"] for row in report["contention"] for flow in row["flows"] if flow["job"]}) > 1
    for row in report["contention"][:5]:
        name, alike = row["link"], alike_links(row)
        for flow in row["flows"]:
            job = f"{flow['job']}: " if several and flow["job"] else ""
            transfer = f"{job}{flow['axis']} {flow['op'].replace('_', ' ')}"
            times = (format_time(flow[key]) for key in ("seconds_together", "lost_s"))
            table.add_row(name, alike, transfer, f"at most {flow['at_once']:,}", *times)
            name = alike = ""
    return table


def bars(
    title: str,
    rows: Sequence[tuple[str, float]],
    whole: float,
    shown: Callable[[float], str] | None = None,
    head: str = "",
) -> FittedTable:
    """Return times with a bar each, their names under ``head``.

    ``shown`` writes them, in the unit of ``whole`` where nothing else is asked for.
    """
    table = FittedTable(title, (head, "left"), ("time", "right"), ("share", "right"), ("", "left", "cyan"))
    longest = max((seconds for _, seconds in rows), default=0.0)
    for name, seconds in rows:
        bar = "█" * max(round(_BAR * seconds / longest), 0) if longest else ""
        share = percent(seconds / whole) if whole else ""
        table.add_row(name, shown(seconds) if shown else time_beside(seconds, whole), share, bar)
    return table


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def run_length(days: float) -> str:
    """Write the length of a whole run. Below two days it is in hours, below two hours in minutes.

    >>> run_length(122.5), run_length(1.5), run_length(0.079), run_length(1 / 24)
    ('122.5 days', '36.0 hours', '113.8 minutes', '60.0 minutes')
    """
    hours = 24 * days
    if hours >= 48:
        return f"{days:,.1f} days"
    return f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.1f} minutes"


def gpu_hours(hours: float) -> str:
    """Write the GPU-hours of a whole run, below ten with a decimal.

    >>> gpu_hours(3.3), gpu_hours(23_523.4)
    ('3.3 GPU-hours', '23,523 GPU-hours')
    """
    return f"{hours:,.{0 if round(hours, 1) >= 10 else 1}f} GPU-hours"


def time_beside(seconds: float, whole: float) -> str:
    """Write a duration in the unit of ``whole``, so that the rows of a table compare at a glance."""
    unit, size = ("s", 1.0) if whole >= 1 else ("ms", ms) if whole >= ms else ("us", us)
    return f"{seconds / size:.2f} {unit}"


def run_cost(run: Mapping[str, Any]) -> str:
    """Return what a whole run costs and at which price, such as ``, cost 73,344 at 2.5 a GPU-hour``; empty without.

    >>> run_cost({"cost": 20.0, "gpu_hours": 8.0}), run_cost({"cost": None, "gpu_hours": 8.0})
    (', cost 20 at 2.5 a GPU-hour', '')
    """
    cost = run["cost"]
    return "" if cost is None else f", cost {cost:,.0f} at {cost / run['gpu_hours']:g} a GPU-hour"
