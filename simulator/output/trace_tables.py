"""Tables of what is in a profiler's trace, of comparisons and of replays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simulator.output.fitted_table import FittedTable
from simulator.output.tables import bars, percent, time_beside
from simulator.units import counted, format_time

Report = Mapping[str, Any]
_NAME_LENGTH = 70


def shown(report: Report) -> Iterator[FittedTable]:
    """Yield the tables of ``trace show``, all of a mean step."""
    ranks, steps = report["ranks"], report["steps"]
    yield _ranks(ranks, "in a step" if steps == 1 else f"in a step (mean of {steps:,} marked steps)")
    classes = _mean_classes(ranks)
    gpu_s = sum(rank["gpu_s"] for rank in ranks) / len(ranks)
    yield bars("Kernels by class (mean rank; streams run side by side)", list(classes.items()), gpu_s)
    yield _streams(ranks)
    if report["stragglers"]:
        yield _stragglers(report["stragglers"])
    yield _kernels(report["kernels"], gpu_s)


def _mean_classes(ranks: Sequence[Report]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for rank in ranks:
        for name, seconds in rank["class_s"].items():
            sums[name] = sums.get(name, 0.0) + seconds / len(ranks)
    return dict(sorted(sums.items(), key=lambda entry: -entry[1]))


def _ranks(ranks: Sequence[Report], when: str) -> FittedTable:
    table = FittedTable(
        f"Where the GPU's time goes, here and below {when}",
        ("rank", "right"), ("step", "right"), ("first to last kernel", "right"), ("computes", "right"),
        ("other work alone", "right"), ("idle", "right"), ("idle for launches", "right"), ("communication", "right"),
        ("exposed", "right"), ("overlap", "right"),
    )  # fmt: skip
    for rank in ranks:
        gpu_s = rank["gpu_s"]
        late_s = rank["launch_bound_s"]
        shares = [percent(rank[key] / gpu_s if gpu_s else 0.0) for key in ("compute_s", "other_busy_s", "idle_s")]
        table.add_row(
            str(rank["rank"]),
            format_time(rank["step_s"]),
            format_time(gpu_s),
            *shares,
            "-" if late_s is None else percent(late_s / gpu_s if gpu_s else 0.0),
            time_beside(rank["communication_s"], gpu_s),
            time_beside(rank["exposed_s"], gpu_s),
            "-" if rank["overlap"] is None else percent(rank["overlap"]),
        )
    return table


def _streams(ranks: Sequence[Report]) -> FittedTable:
    table = FittedTable(
        "Streams, and what the time between their kernels is",
        ("rank", "right"), ("stream", "left"), ("kernels", "right"), ("busy", "right"), ("waits for launches", "right"),
        ("back to back", "right"), ("other waits", "right"),
    )  # fmt: skip
    for rank in ranks:
        for stream in rank["streams"]:
            times = [
                time_beside(stream[key], rank["gpu_s"]) for key in ("busy_s", "host_s", "back_to_back_s", "other_s")
            ]
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


def _kernels(kernels: Sequence[Report], gpu_s: float) -> FittedTable:
    table = FittedTable(
        "Kernels that take most time (mean rank)",
        ("kernel", "left"), ("class", "left"), ("launches", "right"), ("time", "right"), ("share", "right"),
    )  # fmt: skip
    for kernel in kernels:
        share = percent(kernel["seconds"] / gpu_s) if gpu_s else ""
        seconds = time_beside(kernel["seconds"], gpu_s)
        name = kernel["name"][:_NAME_LENGTH]
        table.add_row(name, kernel["kernel_class"], f"{kernel['launches']:,.6g}", seconds, share)
    return table


def compared(report: Report) -> Iterator[FittedTable]:
    """Yield the tables of ``trace compare``."""
    first, second = report["sides"]
    table = FittedTable(
        "Class by class, a mean rank in a step",
        ("", "left"), (first["name"], "right"), (second["name"], "right"), ("second / first", "right"),
        ("launches", "right"), ("launches", "right"),
    )  # fmt: skip
    whole = [("step", "step_s"), ("exposed communication", "exposed_s")]
    for name, key in whole:
        table.add_row(name, *_row_times([first[key], second[key]], "missing"), _ratio(first[key], second[key]), "", "")
    shares = ["-" if side["overlap"] is None else percent(side["overlap"]) for side in (first, second)]
    table.add_row("overlap of communication", *shares, "", "", "")
    for row in report["classes"]:
        times = _row_times(row["seconds"], "missing")
        launches = ["" if count is None else f"{count:,.6g}" for count in row["launches"]]
        table.add_row(row["name"], *times, _ratio(*row["seconds"]), *launches)
    yield table
    for side, alone in zip((first, second), report["kernels_alone"], strict=True):
        if alone:
            rows = FittedTable(f"Kernels that only {side['name']} has", ("kernel", "left"), ("time", "right"))
            for kernel in alone:
                rows.add_row(kernel["name"], time_beside(kernel["seconds"], alone[0]["seconds"]))
            yield rows


def _row_times(seconds: Sequence[float | None], absent: str) -> list[str]:
    """Return the times of a row in the unit of its longest; ``absent`` stands for None."""
    longest = max([one for one in seconds if one is not None], default=0.0)
    return [absent if one is None else time_beside(one, longest) for one in seconds]


def _against(ratio: float) -> str:
    """Return a ratio as a change in percent; what rounds to nothing has the sign +."""
    return f"{round(100 * (ratio - 1), 2) + 0.0:+.2f} %"


def _ratio(first: float | None, second: float | None) -> str:
    return f"{second / first:.3g}" if first and second is not None else ""


def replayed(report: Report) -> Iterator[FittedTable]:
    """Yield the table of ``trace replay``."""
    columns = [("recorded", report["recorded"]), ("played", report["played"])]
    if report["changed"] is not None:
        columns.append(("changed", report["changed"]))
    title = f"{report['step']} of {counted(len(report['ranks']), 'rank')}"
    table = FittedTable(title, ("", "left"), *((name, "right") for name, _ in columns))
    table.add_row("step", *_row_times([side["step_s"] for _, side in columns], ""))
    recorded_s = columns[0][1]["step_s"]
    table.add_row("against recorded", "", *[_against(side["step_s"] / recorded_s) for _, side in columns[1:]])
    table.add_row("exposed communication", *_row_times([side["exposed_s"] for _, side in columns], ""))
    shares = ["-" if side["overlap"] is None else percent(side["overlap"]) for _, side in columns]
    table.add_row("overlap of communication", *shares)
    for name in dict.fromkeys(name for _, side in columns for name in side["class_s"]):
        table.add_row(name, *_row_times([side["class_s"].get(name, 0.0) for _, side in columns], ""))
    blanks = [""] * (len(columns) - 1)
    table.add_row(
        "delays without a known cause", time_beside(report["unexplained_s"], report["unexplained_s"]), *blanks
    )
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
        table.add_row(name, time_beside(seconds, recorded_s), _against(seconds / recorded_s))
    yield table
    if report["by_part"]:
        parts = FittedTable("With one part's own times, the step is so many times as long", ("", "left"), ("", "right"))
        for name, ratio in report["by_part"].items():
            parts.add_row(name, f"{ratio:.3f}")
        yield parts
