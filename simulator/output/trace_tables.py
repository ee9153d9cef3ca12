"""Tables of what is in a profiler's trace, of comparisons and of replays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simulator.output.fitted_table import FittedTable
from simulator.output.tables import bars, percent
from simulator.units import counted, format_time

Report = Mapping[str, Any]
_NAME_LENGTH = 70
#: The classes communication and hand-over together.
_EXCHANGES = "communication and hand-overs"


def shown(report: Report) -> Iterator[FittedTable]:
    """Yield the tables of ``trace show``, all of a mean step."""
    ranks, steps = report["ranks"], report["steps"]
    yield _ranks(ranks, "in a step" if steps == 1 else f"in a step (mean of {steps:,} marked steps)")
    classes = _mean_classes(ranks)
    step_s = sum(rank["step_s"] for rank in ranks) / len(ranks)
    yield _classes(classes, step_s)
    yield _streams(ranks)
    if report["stragglers"]:
        yield _stragglers(report["stragglers"])
    yield _kernels(report["kernels"], step_s)


def _mean_classes(ranks: Sequence[Report]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for rank in ranks:
        for name, seconds in rank["class_s"].items():
            sums[name] = sums.get(name, 0.0) + seconds / len(ranks)
    return dict(sorted(sums.items(), key=lambda entry: -entry[1]))


def _ranks(ranks: Sequence[Report], when: str) -> FittedTable:
    """Return how each rank's step is divided: four shares fill it, and a part of what is idle waits for launches."""
    table = FittedTable(
        f"Where the GPU's time goes, here and below {when}: shares of the step",
        ("rank", "right"), ("step", "right"), ("computes", "right"), ("other work alone", "right"), ("idle", "right"),
        ("before and behind all kernels", "right"), ("idle for launches", "right"), (_EXCHANGES, "right"),
        ("exposed", "right"), ("overlap", "right"),
    )  # fmt: skip
    for rank in ranks:
        step_s = rank["step_s"]
        parts = [rank["compute_s"], rank["other_busy_s"], rank["idle_s"], step_s - rank["gpu_s"]]
        table.add_row(
            str(rank["rank"]),
            format_time(step_s),
            *(_share(seconds, step_s) for seconds in parts),
            "-" if rank["launch_bound_s"] is None else _share(rank["launch_bound_s"], step_s),
            format_time(rank["communication_s"]),
            format_time(rank["exposed_s"]),
            "-" if rank["overlap"] is None else percent(rank["overlap"]),
        )
    return table


def _share(seconds: float, whole_s: float) -> str:
    """Return a part of a whole in percent; what rounding leaves below nothing is nothing."""
    return percent(max(seconds / whole_s, 0.0) if whole_s else 0.0)


def _classes(classes: Mapping[str, float], step_s: float) -> FittedTable:
    title = "Kernels by class (mean rank; streams run side by side; shares of the step)"
    return bars(title, list(classes.items()), step_s, format_time, head="class")


def _streams(ranks: Sequence[Report]) -> FittedTable:
    table = FittedTable(
        "Streams, and what the time between their kernels is",
        ("rank", "right"), ("stream", "left"), ("kernels", "right"), ("busy", "right"), ("waits for launches", "right"),
        ("back to back", "right"), ("other waits", "right"),
    )  # fmt: skip
    for rank in ranks:
        for stream in rank["streams"]:
            seconds = [stream[key] for key in ("busy_s", "host_s", "back_to_back_s", "other_s")]
            times = ["-" if one is None else format_time(one) for one in seconds]
            table.add_row(str(rank["rank"]), stream["stream"], f"{stream['ops']:,.6g}", *times)
    return table


def _stragglers(rows: Sequence[Report]) -> FittedTable:
    table = FittedTable(
        "Who waits for whom in communication (a rank that waits little is waited for)",
        ("rank", "right"), ("waits", "right"), ("comes last", "right"),
    )  # fmt: skip
    tied = not any(row["last"] for row in rows)
    for row in rows:
        last = "-" if tied else f"{row['last']:,.6g} of {row['meetings']:,.6g}"
        table.add_row(str(row["rank"]), format_time(row["waits_s"]), last)
    return table


def _kernels(kernels: Sequence[Report], step_s: float) -> FittedTable:
    table = FittedTable(
        "Kernels that take most time (mean rank)",
        ("kernel", "left"), ("class", "left"), ("launches", "right"), ("time", "right"), ("share of the step", "right"),
    )  # fmt: skip
    for kernel in kernels:
        name, seconds = kernel["name"][:_NAME_LENGTH], kernel["seconds"]
        cells = [f"{kernel['launches']:,.6g}", format_time(seconds), _share(seconds, step_s)]
        table.add_row(name, kernel["kernel_class"], *cells)
    return table


def compared(report: Report) -> Iterator[FittedTable]:
    """Yield the tables of ``trace compare``."""
    first, second = report["sides"]
    table = FittedTable(
        "Class by class, a mean rank in a step",
        ("", "left"), (first["name"], "right"), (second["name"], "right"), ("second / first", "right"),
        *((f"launches of {side['name']}", "right") for side in (first, second)),
    )  # fmt: skip
    whole = [("step", "step_s"), (f"exposed {_EXCHANGES}", "exposed_s")]
    for name, key in whole:
        table.add_row(name, *_row_times([first[key], second[key]]), _ratio(first[key], second[key]), "", "")
    shares = ["-" if side["overlap"] is None else percent(side["overlap"]) for side in (first, second)]
    table.add_row(f"overlap of {_EXCHANGES}", *shares, "", "", "")
    for row in report["classes"]:
        times = _row_times(row["seconds"], "missing")
        launches = ["" if count is None else f"{count:,.6g}" for count in row["launches"]]
        table.add_row(row["name"], *times, _ratio(*row["seconds"]), *launches)
    yield table
    for side, alone in zip((first, second), report["kernels_alone"], strict=True):
        if alone:
            rows = FittedTable(f"Kernels that only {side['name']} has", ("kernel", "left"), ("time", "right"))
            for kernel in alone:
                rows.add_row(kernel["name"], format_time(kernel["seconds"]))
            yield rows


def _row_times(seconds: Sequence[float | None], absent: str = "") -> list[str]:
    """Return the times of a row; ``absent`` stands for None."""
    return [absent if one is None else format_time(one) for one in seconds]


def _against(ratio: float) -> str:
    """Return a ratio as a change in percent; what rounds to nothing has the sign +."""
    return f"{round(100 * (ratio - 1), 2) + 0.0:+.2f} %"


def _ratio(first: float | None, second: float | None) -> str:
    return f"{second / first:.3f}" if first and second is not None else ""


def replayed(report: Report) -> Iterator[FittedTable]:
    """Yield the table of ``trace replay``."""
    columns = [("recorded", report["recorded"]), ("played", report["played"])]
    if report["changed"] is not None:
        columns.append(("changed", report["changed"]))
    title = f"{report['step']} of {counted(len(report['ranks']), 'rank')}"
    table = FittedTable(title, ("", "left"), *((name, "right") for name, _ in columns))
    table.add_row("step", *_row_times([side["step_s"] for _, side in columns]))
    recorded_s = columns[0][1]["step_s"]
    table.add_row("against recorded", "", *[_against(side["step_s"] / recorded_s) for _, side in columns[1:]])
    table.add_row(f"exposed {_EXCHANGES}", *_row_times([side["exposed_s"] for _, side in columns]))
    shares = ["-" if side["overlap"] is None else percent(side["overlap"]) for _, side in columns]
    table.add_row(f"overlap of {_EXCHANGES}", *shares)
    for name in dict.fromkeys(name for _, side in columns for name in side["class_s"]):
        table.add_row(name, *_row_times([side["class_s"].get(name, 0.0) for _, side in columns]))
    blanks = [""] * (len(columns) - 1)
    table.add_row("delays without a known cause", format_time(report["unexplained_s"]), *blanks)
    yield table


def job_stragglers(report: Report) -> Iterator[FittedTable]:
    """Yield the tables of ``trace stragglers``."""
    steps = len(report["steps"])
    title = f"Mean of {counted(steps, 'step')}: {report['stages']} stages, {counted(report['replicas'], 'replica')}"
    table = FittedTable(title, ("", "left"), ("step", "right"), ("against recorded", "right"))
    recorded_s = sum(report["recorded_s"]) / steps
    rows = [
        ("recorded", recorded_s),
        ("played", sum(report["played_s"]) / steps),
        ("without delays", sum(report["without_delays_s"]) / steps),
        ("without delays and stragglers", report["ideal_s"]),
    ]
    for name, seconds in rows:
        table.add_row(name, format_time(seconds), _against(seconds / recorded_s))
    yield table
    if report["by_part"]:
        parts = FittedTable("With one part's own times, the step is so many times as long", ("", "left"), ("", "right"))
        for name, ratio in report["by_part"].items():
            parts.add_row(name, f"{ratio:.3f}")
        yield parts
