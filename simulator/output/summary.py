"""Summaries: results as tables for a terminal.

Figures are read from the dictionary of results, so that a saved JSON prints the same. Text of users is a
`rich.text.Text`, so that brackets in a name are no markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simulator.input_files import as_options
from simulator.output.accuracy_text import beside_step_time, interval_lines, interval_of, nothing_comparable_lines
from simulator.output.change_table import change_parts
from simulator.output.efficiency_text import bubble_text, mfu_lines, tflops
from simulator.output.fitted_table import FittedTable
from simulator.output.job_text import batch_line, cluster_text, describe_layout, model_and_precision, run_work
from simulator.output.memory_summary import fit_verdict, memory_of
from simulator.output.tables import (
    HOST,
    WAITING,
    JsonReport,
    breakdown,
    busiest,
    communication,
    contention,
    critical_path,
    gpu_hours,
    percent,
    run_cost,
    run_length,
)
from simulator.units import counted, format_gib, format_time

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

WIDTH = 100
_COUNTED = (
    "Parameters are counted without padding of the vocabulary and without layers for multi-token prediction; "
    "FLOPs with both."
)


def summary(report: JsonReport) -> Group:
    """Return the ``run`` results as a rich renderable for 100 columns."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [*_verdict(report), _headline(report), _key_figures(report), "", breakdown(report)]
    parts += [memory_of(report["memory"], report["parallelism"]), ""]
    if any(kind["time_s"] for kind in report["communication"].values()):
        parts.append(communication(report))
    if report["links"]:
        parts.append(busiest(report["links"]))
    if report["contention"]:
        parts.append(contention(report, "Where transfers slowed each other"))
    parts.append(critical_path(report["critical_path"]))
    parts += what_to_change(report)
    parts += [Text(line) for line in (_COUNTED, *_trust(report))]
    return Group(*parts)


def what_to_change(report: JsonReport) -> list[RenderableType]:
    """Return the changes that help most, where they were asked for."""
    advice = report.get("what_to_change")
    return change_parts(advice, report["step_time_s"]) if advice else []


def compared(first: JsonReport, second: JsonReport) -> Group:
    """Return two ``run`` results side by side, and what to change in each where that was asked for."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [compare(first, second)]
    for report, name in ((first, first["name"]), (second, _other_name(first, second))):
        if changes := what_to_change(report):
            parts += [Text(str(name), style="bold"), *changes]
    return Group(*parts)


def opening(report: JsonReport) -> str:
    """Return the first lines of `summary` as text: whether memory lacks, the job and its key figures."""
    return _text(*_verdict(report), _headline(report), _key_figures(report))


def shared_opening(report: JsonReport) -> str:
    """Return the first table of `shared` as text."""
    return _text(_shares(report))


def _text(*parts: Any) -> str:
    from rich.console import Console

    console = Console(width=WIDTH, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def compare(first: JsonReport, second: JsonReport) -> FittedTable:
    """Return two ``run`` results side by side, and the second as a multiple of the first."""
    table = FittedTable(
        "",
        ("", "left"), (first["name"], "right"), (_other_name(first, second), "right"), ("ratio", "right"),
    )  # fmt: skip
    for row in compared_rows(first, second):
        table.add_row(*row)
    return table


def compared_rows(first: JsonReport, second: JsonReport) -> list[tuple[str, str, str, str]]:
    """Return rows of a figure's name, its value in both results, and the second as a multiple of the first."""
    rows = []
    pipelined = any(report["parallelism"]["pp"] > 1 for report in (first, second))
    for label, value, shown in _COMPARED:
        if label == _BUBBLE and not pipelined:
            continue
        a, b = value(first), value(second)
        nothing = shown(0.0) in (shown(a), shown(b))
        rows.append((label, shown(a), shown(b), "" if nothing else f"{b / a:.3f}"))
    return [
        *rows,
        ("90 % interval of the step", interval_of(first), interval_of(second), ""),
        ("layout", describe_layout(first["parallelism"]), describe_layout(second["parallelism"]), ""),
        ("memory", fit_verdict(first["memory"]), fit_verdict(second["memory"]), ""),
    ]


def shared(report: JsonReport) -> Group:
    """Return the summary of jobs that share a cluster: step times beside the others and alone, and contention."""
    from rich.console import Group

    runs = report["runs"]
    parts: list[Any] = [_shares(report)]
    printed: list[Any] = []
    for run in runs:
        if run["contention"] and run["contention"] not in printed:  # alike jobs contend on the same links
            printed.append(run["contention"])
            names = ", ".join(one["name"] for one in runs if one["contention"] == run["contention"])
            parts.append(contention(run, f"Where transfers slowed each other, in a step of {names}"))
    return Group(*parts)


def _shares(report: JsonReport) -> FittedTable:
    """Return a row per job of several that share a cluster."""
    table = FittedTable(
        f"On {counted(report['share_fabric']['nodes'], 'node')} of {report['share_fabric']['cluster']} at once",
        ("job", "left"), ("GPUs", "right"), ("nodes", "left"), ("step alone", "right"), ("step shared", "right"),
        ("lost", "right"), ("slowdown", "right"), ("tokens/s", "right"), ("MFU", "right"),
    )  # fmt: skip
    for run in report["runs"]:
        sharing = run["sharing"]
        times = (
            format_time(s) for s in (sharing["alone_step_time_s"], run["step_time_s"], max(sharing["lost_s"], 0.0))
        )
        table.add_row(
            run["name"], f"{run['n_gpus']:,}", _ranges(sharing["nodes"]), *times, f"{sharing['slowdown']:.3f}",
            f"{run['tokens_per_s']:,.0f}", percent(run["mfu"]),
        )  # fmt: skip
    return table


def _ranges(numbers: Sequence[int], most: int = 4) -> str:
    """Write numbers as ranges such as ``0-7,16``; ``0-14:2`` is every other one."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        run = runs[-1] if runs else []
        gap = number - run[-1] if run else 0
        if run and (gap == run[1] - run[0] if len(run) > 1 else gap <= 2):
            run.append(number)
        else:
            runs.append([number])
    shown = [
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" + (":2" if run[1] - run[0] == 2 else "")
        for run in runs[:most]
    ]
    return ",".join(shown) + (",..." if len(runs) > most else "")


def _other_name(first: JsonReport, second: JsonReport) -> str:
    return str(second["name"]) if second["name"] != first["name"] else f"{second['name']} (2)"


def _exposed(report: JsonReport) -> float:
    return float(sum(report["time_breakdown_s"]["exposed"].values()))


_BUBBLE = "bubble"
#: Figures side by side. Without stages there is no bubble.
_COMPARED: tuple[tuple[str, Callable[[JsonReport], float], Callable[[float], str]], ...] = (
    ("GPUs", lambda r: r["n_gpus"], "{:,}".format),
    ("step time", lambda r: r["step_time_s"], format_time),
    ("tokens/s", lambda r: r["tokens_per_s"], "{:,.0f}".format),
    ("tokens/s per GPU", lambda r: r["tokens_per_s_per_gpu"], "{:,.0f}".format),
    ("model FLOP/s per GPU", lambda r: r["model_flops_per_s_per_gpu"], tflops),
    ("MFU", lambda r: r["mfu"], percent),
    ("HFU", lambda r: r["hfu"], percent),
    (_BUBBLE, lambda r: r["bubble_fraction"] or 0.0, percent),
    ("compute", lambda r: r["time_breakdown_s"]["compute"], format_time),
    ("recompute", lambda r: r["time_breakdown_s"]["recompute"], format_time),
    ("optimizer", lambda r: r["time_breakdown_s"]["optimizer"], format_time),
    ("exposed communication", _exposed, format_time),
    (WAITING, lambda r: r["time_breakdown_s"]["bubble"], format_time),
    (HOST, lambda r: r["time_breakdown_s"]["host"], format_time),
    ("peak memory", lambda r: r["memory"]["peak_bytes"], format_gib),
)


def _verdict(report: JsonReport) -> list[Text]:
    """Return what makes the times below worth little: too little memory, and that nothing comparable was measured."""
    from rich.text import Text

    lines = [lacking_line(report["memory"]), *nothing_comparable_lines(report)]
    return [Text(line, style="bold red") for line in lines if line]


def lacking_line(memory: Mapping[str, Any]) -> str:
    """Return a line where the job does not fit into memory, else nothing."""
    if memory["fits"]:
        return ""
    if memory["peak_bytes"] > memory["capacity_bytes"]:
        lack = f"a GPU needs {format_gib(memory['peak_bytes'])} and has {format_gib(memory['capacity_bytes'])}"
    else:
        lack = f"a host needs {format_gib(memory['host']['peak_bytes'])}"
    return f"DOES NOT FIT into memory: {lack}. Times are those of a job that would fit."


def _headline(report: JsonReport) -> Text:
    from rich.text import Text

    changed = f"{cluster_text(report)}\n" if report["cluster_changes"] else ""
    return Text.assemble(
        (str(report["name"]), "bold"),
        f" on {counted(report['n_gpus'], 'GPU')} of {report['cluster']} with {framework_text(report['framework'])}\n"
        f"{changed}"
        f"{model_and_precision(report)}, "
        f"{describe_layout(report['parallelism'])}, {counted(report['n_microbatches'], 'micro-batch', 'es')}\n"
        f"{batch_line(report)}"
        f"calibration {calibration_text(report['calibration'])}",
    )


def calibration_text(calibration: Mapping[str, Any]) -> str:
    """Return which profiles figures are of, and what they rest on."""
    dated = f", {calibration['date']}" if calibration.get("date") else ""
    stack = f"; collectives by stack {calibration['stack']}" if calibration.get("stack") else ""
    return f"{calibration['name']}: {calibration['kind']} figures{dated}{stack}"


def framework_text(framework: Mapping[str, Any]) -> str:
    """Return a framework as in ``pytorch 2.8, compiled``."""
    version = f" {framework['version']}" if framework["version"] else ""
    return f"{framework['name']}{version}{', compiled' if framework['compile'] else ''}"


def _trust(report: JsonReport) -> list[str]:
    """Say which prices the figures rest on, and how far steps like this one have been from measurement."""
    accuracy = report.get("accuracy")
    return [*price_lines(report["calibration"]), *(interval_lines(accuracy) if accuracy else [])]


def price_lines(calibration: Mapping[str, Any]) -> list[str]:
    """Return a line on what kinds of prices the kernels have, where that is known."""
    priced = dict(calibration.get("kernel_time_priced_by", {}))
    outside = priced.pop("extrapolated", 0.0)
    if not priced:
        return []
    shares = ", ".join(f"{percent(share)} {kind}" for kind, share in priced.items())
    rests_on_sizes = priced.get("measured", 0.0) + priced.get("published", 0.0) > 0  # else there are none to be outside
    beyond = f"; {percent(outside)} outside the sizes that were measured" if rests_on_sizes else ""
    return [f"Prices of kernels: {shares}{beyond}."]


def _key_figures(report: JsonReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    peak = report["peak_flops_per_s_per_gpu"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("")
    name = "step time (steady)" if report["steady_period"] else "step time"
    grid.add_row(name, Text.assemble((format_time(report["step_time_s"]), "bold"), beside_step_time(report)))
    if "staleness" in report:
        grid.add_row("staleness", f"{report['staleness']:.2f} updates of other workers between a pull and its push")
    per_gpu = f"{report['tokens_per_s_per_gpu']:,.0f} per GPU"
    rate = f"{report['tokens_per_s']:,.0f} {report['throughput_counts']}/s, {per_gpu}"
    grid.add_row("throughput", rate)
    grid.add_row("model FLOP/s", f"{tflops(report['model_flops_per_s_per_gpu'])} per GPU")
    grid.add_row("MFU", f"{percent(report['mfu'])} " + "\n".join(mfu_lines(report)))
    grid.add_row(
        "HFU",
        f"{percent(report['hfu'])}, {tflops(report['hfu'] * peak)} per GPU: what the kernels compute"
        + (
            "; of attention they skip half"
            if report["hfu"] < report["mfu"] and report["mfu_causal"] < report["mfu"]
            else ""
        ),
    )
    if slower_s := report.get("slower_host_step_time_s"):
        waits = percent(report["host_bound_fraction"])
        slower = f"{format_time(slower_s)}, {slower_s / report['step_time_s']:.2f} times as long"
        grid.add_row("host", f"GPUs wait {waits} for it; were it half as fast, a step would take {slower}")
    if report["bubble_fraction"] is not None:
        grid.add_row("bubble", bubble_text(report))
        stages = report["stages"]
        advice = ""
        if better := stages["layers_per_stage"]:
            even = [key for key in ("account_for_embedding", "account_for_loss") if report["parallelism"][key]]
            split = {"layers_per_stage": better} | dict.fromkeys(even, False)
            typed = as_options({f"parallelism.{key}": value for key, value in split.items()})
            setting = typed if even else f"layers_per_stage: {better}"
            advice = f"; with {setting} a step takes {format_time(stages['step_time_s'])}"
        several = f" of {len(stages['per_stage'])}" if report["parallelism"]["vpp"] > 1 else ""
        grid.add_row("stages", f"the slowest{several} takes {stages['slowest_over_mean']:.2f} times the mean{advice}")
    run = report.get("run")
    if run is not None:
        cost = run_cost(run)
        if run["server_gpus"]:
            cost += f"; {run['server_gpus']:,} GPUs of the servers' nodes included"
        grid.add_row("whole run", f"{run_length(run['days'])}{run_work(run)}, {gpu_hours(run['gpu_hours'])}{cost}")
    return grid
