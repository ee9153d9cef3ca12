"""Results as tables for a terminal. Everything is read from the result dictionary, so a saved JSON prints the same.

Whatever comes from the user is a `rich.text.Text`, so that brackets in a name are no markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from simulator.output.fitted import Fitted
from simulator.output.memory_summary import memory_of
from simulator.output.tables import (
    HOST,
    WAITING,
    Result,
    breakdown,
    busiest,
    communication,
    contention,
    critical_path,
    percent,
)
from simulator.units import TFLOP, counted, format_gib, format_parameters, format_time

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

WIDTH = 100


def summary(result: Result) -> Group:
    """The ``run`` result as a rich renderable, made for 100 columns."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_headline(result), _key_figures(result), "", breakdown(result)]
    parts += [memory_of(result["memory"], result["parallelism"]["offload"]), ""]
    if any(kind["time_s"] for kind in result["communication"].values()):
        parts.append(communication(result))
    if result["links"]:
        parts.append(busiest(result["links"]))
    if result["contention"]:
        parts.append(contention(result, "Where transfers met"))
    parts.append(critical_path(result["critical_path"]))
    parts += [Text(line) for line in _trust(result)]
    return Group(*parts)


def opening(result: Result) -> str:
    """The first lines of `summary`, as text: what was run, and the key figures."""
    return _text(_headline(result), _key_figures(result))


def shared_opening(result: Result) -> str:
    """The first table of `shared`, as text."""
    return _text(_shares(result))


def _text(*parts: Any) -> str:
    from rich.console import Console

    console = Console(width=WIDTH, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def compare(first: Result, second: Result) -> Fitted:
    """Two ``run`` results side by side, and the second as a multiple of the first."""
    table = Fitted(
        "",
        ("", "left"), (first["name"], "right"), (_other_name(first, second), "right"), ("ratio", "right"),
    )  # fmt: skip
    for label, value, shown in _COMPARED:
        a, b = value(first), value(second)
        nothing = shown(0.0) in (shown(a), shown(b))
        table.add_row(label, shown(a), shown(b), "" if nothing else f"{b / a:.3f}")
    table.add_row("layout", describe_layout(first["parallelism"]), describe_layout(second["parallelism"]), "")
    table.add_row("memory", _fits(first["memory"]), _fits(second["memory"]), "")
    return table


def shared(result: Result) -> Group:
    """Several jobs that share a cluster: what each takes beside the others and alone, and where they met."""
    from rich.console import Group

    runs = result["runs"]
    parts: list[Any] = [_shares(result)]
    told: list[Any] = []
    for run in runs:
        if run["contention"] and run["contention"] not in told:  # alike jobs met at the same places
            told.append(run["contention"])
            names = ", ".join(one["name"] for one in runs if one["contention"] == run["contention"])
            parts.append(contention(run, f"Where transfers met, in a step of {names}"))
    return Group(*parts)


def _shares(result: Result) -> Fitted:
    """A row per job of several that share a cluster."""
    table = Fitted(
        f"On {counted(result['share_fabric']['nodes'], 'node')} of {result['share_fabric']['cluster']} at once",
        ("job", "left"), ("GPUs", "right"), ("nodes", "left"), ("step alone", "right"), ("step shared", "right"),
        ("lost", "right"), ("slowdown", "right"), ("tokens/s", "right"), ("MFU", "right"),
    )  # fmt: skip
    for run in result["runs"]:
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
    """Such as ``0-7,16``; ``0-14:2`` is every other one."""
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


def _other_name(first: Result, second: Result) -> str:
    return str(second["name"]) if second["name"] != first["name"] else f"{second['name']} (2)"


def _tflops(rate: float) -> str:
    return f"{rate / TFLOP:.1f} TFLOP/s"


def _exposed(result: Result) -> float:
    return float(sum(result["time_breakdown_s"]["exposed"].values()))


_COMPARED: tuple[tuple[str, Callable[[Result], float], Callable[[float], str]], ...] = (
    ("GPUs", lambda r: r["n_gpus"], "{:,}".format),
    ("step time", lambda r: r["step_time_s"], format_time),
    ("tokens/s", lambda r: r["tokens_per_s"], "{:,.0f}".format),
    ("tokens/s per GPU", lambda r: r["tokens_per_s_per_gpu"], "{:,.0f}".format),
    ("model FLOP/s per GPU", lambda r: r["model_flops_per_s_per_gpu"], _tflops),
    ("MFU", lambda r: r["mfu"], percent),
    ("HFU", lambda r: r["hfu"], percent),
    ("bubble", lambda r: r["bubble_fraction"], percent),
    ("compute", lambda r: r["time_breakdown_s"]["compute"], format_time),
    ("recompute", lambda r: r["time_breakdown_s"]["recompute"], format_time),
    ("optimizer", lambda r: r["time_breakdown_s"]["optimizer"], format_time),
    ("exposed communication", _exposed, format_time),
    (WAITING, lambda r: r["time_breakdown_s"]["bubble"], format_time),
    (HOST, lambda r: r["time_breakdown_s"]["host"], format_time),
    ("peak memory", lambda r: r["memory"]["peak_bytes"], format_gib),
)


def describe_layout(parallelism: Mapping[str, Any]) -> str:
    """Degrees above one, first those whose product the ranks are; the schedule of a pipeline, and whatever else is not
    as it mostly is: ``tp 8 x pp 12 x dp 16, 1f1b``."""
    degrees = [f"{axis} {parallelism[axis]}" for axis in ("tp", "cp", "pp", "dp") if parallelism[axis] > 1]
    extras = [f"{axis} {parallelism[axis]}" for axis in ("ep", "etp") if parallelism[axis] > 1]
    extras += [PurePath(parallelism["schedule"]).name] if parallelism["pp"] > 1 else []
    if parallelism["vpp"] > 1:
        extras.append(f"{parallelism['vpp']} chunks")
    if parallelism["zero"]:
        inside = f" in groups of {parallelism['hsdp']}" if parallelism["hsdp"] else ""
        extras.append(f"ZeRO-{parallelism['zero']}{inside}")
    if parallelism["sequence_parallel"] and parallelism["tp"] > 1:
        extras.append("sequence parallel")
    if parallelism["data_parallel"] != "allreduce":
        extras.append(str(parallelism["data_parallel"]).replace("_", " "))
    if parallelism["grad_compression"] != "none":
        extras.append(f"{parallelism['grad_compression']} gradients")
    extras += [f"{what} on {place}" for what, place in parallelism["offload"].items() if place != "none"]
    return ", ".join([" x ".join(degrees) or "one GPU", *extras])


def _fits(memory: Mapping[str, Any]) -> str:
    return "fits" if memory["fits"] else "does not fit"


def _headline(result: Result) -> Text:
    from rich.text import Text

    calibration = result["calibration"]
    dated = f", {calibration['date']}" if calibration.get("date") else ""
    stack = f"; collectives by stack {calibration['stack']}" if calibration.get("stack") else ""
    return Text.assemble(
        (str(result["name"]), "bold"),
        f" on {result['n_gpus']:,} GPUs of {result['cluster']} with {_stack(result['framework'])}\n"
        f"{format_parameters(result['params_total'], result['params_active'])}, "
        f"{describe_layout(result['parallelism'])}, {counted(result['n_microbatches'], 'micro-batch', 'es')}\n"
        f"calibration {calibration['name']}: {calibration['kind']} figures{dated}{stack}",
    )


def _stack(framework: Mapping[str, Any]) -> str:
    """Return a framework as in ``pytorch 2.8, compiled``."""
    version = f" {framework['version']}" if framework["version"] else ""
    return f"{framework['name']}{version}{', compiled' if framework['compile'] else ''}"


def _trust(result: Result) -> list[str]:
    """How far the figures go: what prices rest on, and how far steps like this one have been from measurement."""
    priced = dict(result["calibration"].get("kernel_time_priced_by", {}))
    outside = priced.pop("extrapolated", 0.0)
    lines = []
    if priced:
        shares = ", ".join(f"{percent(share)} {kind}" for kind, share in priced.items())
        lines.append(f"Prices of kernels: {shares}; {percent(outside)} outside the sizes that were measured.")
    accuracy = result.get("accuracy")
    if accuracy:
        suite = f"{accuracy['nearest_suite']}, {accuracy['rows']} rows"
        errors = f"mean error {percent(accuracy['mean_error'])}, largest {percent(accuracy['max_error'])}"
        outside = [f"  {note}" for note in accuracy["extrapolation"]]
        note = [accuracy["note"]] if accuracy["note"] else []
        if accuracy["close"]:
            lines += [f"Steps measured most like this one ({suite}): {errors}.", *note]
            lines += ["This job lies outside what they cover, so expect larger errors:", *outside] if outside else []
        else:
            lines += [f"No measured steps are close to this job. The nearest ({suite}) differ from it:", *outside]
            lines += [f"Their errors ({errors}) do not hold for it: expect larger ones.", *note]
    return lines


def _key_figures(result: Result) -> Table:
    from rich.table import Table
    from rich.text import Text

    peak = result["peak_flops_per_s_per_gpu"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("")
    name = "step time (steady)" if result["steady_period"] else "step time"
    grid.add_row(name, Text(format_time(result["step_time_s"]), style="bold"))
    if "staleness" in result:
        grid.add_row("staleness", f"{result['staleness']:.2f} updates of other workers between a pull and its push")
    rate = f"{result['tokens_per_s']:,.0f} tokens/s, {result['tokens_per_s_per_gpu']:,.0f} per GPU"
    grid.add_row("throughput", rate)
    grid.add_row("model FLOP/s", f"{_tflops(result['model_flops_per_s_per_gpu'])} per GPU")
    grid.add_row(
        "MFU",
        f"{percent(result['mfu'])} of the dense peak of {_tflops(peak)}; "
        f"{percent(result['mfu_causal'])} counting half of attention",
    )
    grid.add_row(
        "HFU",
        f"{percent(result['hfu'])}, {_tflops(result['hfu'] * peak)} per GPU: what the kernels compute"
        + ("; of attention they skip half" if result["hfu"] < result["mfu"] else ""),
    )
    if result["parallelism"]["pp"] > 1:
        grid.add_row(
            "bubble",
            f"pipelines idle {percent(result['bubble_fraction'])} of the time, "
            f"idle / busy {result['bubble_ratio']:.3f}; exposed pp and dp included",
        )
        stages = result["stages"]
        better = stages["layers_per_stage"]
        advice = f"; layers_per_stage: {better} is more even" if better else ""
        grid.add_row("stages", f"the slowest takes {stages['slowest_over_mean']:.2f} times the mean{advice}")
    run = result.get("run")
    if run is not None:
        cost = "" if run["cost"] is None else f", cost {run['cost']:,.0f} at the cluster's price"
        if run["server_gpus"]:
            cost += f"; {run['server_gpus']:,} GPUs of the servers' nodes included"
        grid.add_row("whole run", f"{run['days']:,.1f} days, {run['gpu_hours']:,.0f} GPU-hours{cost}")
    return grid
