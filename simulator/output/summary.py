"""Results as tables for a terminal. Everything is read from the result dictionary, so a saved JSON prints the same.

Whatever comes from the user is a `rich.text.Text`, so that brackets in a name are no markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simulator.units import TFLOP, format_bytes, format_gib, format_time, ms, us

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

WIDTH = 100
_BAR = 30
#: What `time_breakdown_s` calls bubble, told apart from that of the pipeline.
_WAITING = "waiting for other ranks"
_PATH_ROWS = 8
#: Of a kind of communication, the links that are named.
_LINKS_OF_KIND = 2

Result = Mapping[str, Any]


def summary(result: Result) -> Group:
    """The ``run`` result as a rich renderable, made for 100 columns."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_headline(result), _key_figures(result), "", _breakdown(result)]
    parts += [_memory(result["memory"]), ""]
    if any(kind["time_s"] for kind in result["communication"].values()):
        parts.append(_communication(result))
    if result["links"]:
        parts.append(_links(result["links"]))
    if result["contention"]:
        parts.append(_contention(result, "Where transfers met"))
    parts.append(_path(result["critical_path"]))
    parts += [Text(line) for line in _trust(result)]
    return Group(*parts)


def compare(first: Result, second: Result) -> Table:
    """Two ``run`` results side by side, and the second as a multiple of the first."""
    table = _table(
        "",
        ("", "left"), (first["name"], "right"), (_other_name(first, second), "right"), ("ratio", "right"),
        wrap=True,
    )  # fmt: skip
    for label, value, shown in _COMPARED:
        a, b = value(first), value(second)
        table.add_row(label, shown(a), shown(b), f"{b / a:.3f}" if min(a, b) > 0 and label in _RATIOS else "")
    table.add_row("layout", describe_layout(first["parallelism"]), describe_layout(second["parallelism"]), "")
    table.add_row("memory", _fits(first["memory"]), _fits(second["memory"]), "")
    return table


def shared(result: Result) -> Group:
    """Several jobs that share a cluster: what each takes beside the others and alone, and where they met."""
    from rich.console import Group
    from rich.text import Text

    runs = result["runs"]
    table = _table(
        f"On {result['share_fabric']['nodes']:,} nodes of {result['share_fabric']['cluster']} at once",
        ("job", "left"), ("GPUs", "right"), ("nodes", "left"), ("step alone", "right"), ("step shared", "right"),
        ("lost", "right"), ("slowdown", "right"), ("tokens/s", "right"), ("MFU", "right"),
    )  # fmt: skip
    for run in runs:
        sharing = run["sharing"]
        times = (
            format_time(s) for s in (sharing["alone_step_time_s"], run["step_time_s"], max(sharing["lost_s"], 0.0))
        )
        table.add_row(
            Text(run["name"]), f"{run['n_gpus']:,}", _ranges(sharing["nodes"]), *times, f"{sharing['slowdown']:.3f}",
            f"{run['tokens_per_s']:,.0f}", _percent(run["mfu"]),
        )  # fmt: skip
    parts: list[Any] = [table]
    for run in runs:
        if run["contention"]:
            parts.append(_contention(run, f"Where transfers met, in a step of {run['name']}"))
    return Group(*parts)


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


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _time_beside(seconds: float, whole: float) -> str:
    """A duration in the unit of ``whole``, so that the rows of a table compare at a glance."""
    unit, size = ("s", 1.0) if whole >= 1 else ("ms", ms) if whole >= ms else ("us", us)
    return f"{seconds / size:.2f} {unit}"


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
    ("MFU", lambda r: r["mfu"], _percent),
    ("HFU", lambda r: r["hfu"], _percent),
    ("bubble", lambda r: r["bubble_fraction"], _percent),
    ("compute", lambda r: r["time_breakdown_s"]["compute"], format_time),
    ("recompute", lambda r: r["time_breakdown_s"]["recompute"], format_time),
    ("optimizer", lambda r: r["time_breakdown_s"]["optimizer"], format_time),
    ("exposed communication", _exposed, format_time),
    (_WAITING, lambda r: r["time_breakdown_s"]["bubble"], format_time),
    ("waiting for the host", lambda r: r["time_breakdown_s"]["host"], format_time),
    ("peak memory", lambda r: r["memory"]["peak_bytes"], format_gib),
)

#: Rows of which the second is told as a multiple of the first: of small shares and waits it would say nothing.
_RATIOS = (
    *("GPUs", "step time", "tokens/s", "tokens/s per GPU", "model FLOP/s per GPU", "MFU", "HFU"),
    *("compute", "peak memory"),
)


def describe_layout(parallelism: Mapping[str, Any]) -> str:
    """Degrees above one, first those whose product the ranks are; the schedule of a pipeline, and whatever else is not
    as it mostly is: ``tp 8 x pp 12 x dp 16, 1f1b``."""
    degrees = [f"{axis} {parallelism[axis]}" for axis in ("tp", "cp", "pp", "dp") if parallelism[axis] > 1]
    extras = [f"{axis} {parallelism[axis]}" for axis in ("ep", "etp") if parallelism[axis] > 1]
    extras += [str(parallelism["schedule"])] if parallelism["pp"] > 1 else []
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
        f" on {result['n_gpus']:,} GPUs of {result['cluster']}\n"
        f"{_parameters(result)} parameters, {describe_layout(result['parallelism'])}, "
        f"{result['n_microbatches']:,} micro-batch{'es' if result['n_microbatches'] > 1 else ''}\n"
        f"calibration {calibration['name']}: {calibration['kind']} figures{dated}{stack}",
    )


def _trust(result: Result) -> list[str]:
    """How far the figures go: what prices rest on, and how far steps like this one have been from measurement."""
    priced = dict(result["calibration"].get("kernel_time_priced_by", {}))
    outside = priced.pop("extrapolated", 0.0)
    lines = []
    if priced:
        shares = ", ".join(f"{_percent(share)} {kind}" for kind, share in priced.items())
        lines.append(f"Prices of kernels: {shares}; {_percent(outside)} outside the sizes that were measured.")
    accuracy = result.get("accuracy")
    if accuracy:
        lines.append(
            f"Steps measured most like this one ({accuracy['nearest_suite']}, {accuracy['rows']} rows): mean error "
            f"{_percent(accuracy['mean_error'])}, largest {_percent(accuracy['max_error'])}."
        )
        if accuracy["extrapolation"]:
            lines.append("This job lies outside what they cover, so expect larger errors:")
            lines += [f"  {note}" for note in accuracy["extrapolation"]]
    return lines


def _parameters(result: Result) -> str:
    total, active = result["params_total"], result["params_active"]
    shown = f"{total / 1e9:,.1f} billion"
    return shown if active == total else f"{shown} ({active / 1e9:,.1f} billion active)"


def _table(title: str, *columns: tuple[str, str], wrap: bool = False) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in columns:
        table.add_column(Text(name), justify=justify, no_wrap=not wrap)  # type: ignore[arg-type]
    return table


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
        f"{_percent(result['mfu'])} of the dense peak of {_tflops(peak)}; "
        f"{_percent(result['mfu_causal'])} counting half of attention",
    )
    grid.add_row(
        "HFU",
        f"{_percent(result['hfu'])}, {_tflops(result['hfu'] * peak)} per GPU: what the kernels compute",
    )
    if result["parallelism"]["pp"] > 1:
        grid.add_row(
            "bubble",
            f"{_percent(result['bubble_fraction'])} of the pipeline's window, {result['bubble_ratio']:.3f} "
            f"of its work, exposed pp and dp communication in it",
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


def _breakdown(result: Result) -> Table:
    """Rows with a bar; parts that take no time are left out."""
    times = result["time_breakdown_s"]
    rows = [
        ("compute", times["compute"]),
        ("recompute", times["recompute"]),
        ("optimizer", times["optimizer"]),
        *((f"exposed {kind} communication", seconds) for kind, seconds in times["exposed"].items()),
        ("waiting for kernel launches", times["host"]),
        (_WAITING, times["bubble"]),
        ("other", times["other"]),
    ]
    title = "Where a GPU's time goes (mean over GPUs)"
    return _bars(title, [row for row in rows if row[1] >= 5e-4 * result["step_time_s"]], result["step_time_s"])


def _path(path: Sequence[Mapping[str, Any]]) -> Table:
    step = sum(row["seconds"] for row in path)
    rows = [(row["class"], row["seconds"]) for row in path[:_PATH_ROWS]]
    rest = sum(row["seconds"] for row in path[_PATH_ROWS:])
    if rest > 0:
        rows.append(("the rest", rest))
    return _bars("What the step's length is made of (critical path)", rows, step)


def _bars(title: str, rows: Sequence[tuple[str, float]], whole: float) -> Table:
    from rich.text import Text

    table = _table(title, ("", "left"), ("time", "right"), ("share", "right"), ("", "left"))
    longest = max((seconds for _, seconds in rows), default=0.0)
    for name, seconds in rows:
        bar = "█" * max(round(_BAR * seconds / longest), 0) if longest else ""
        share = _percent(seconds / whole) if whole else ""
        table.add_row(Text(name), _time_beside(seconds, whole), share, Text(bar, style="cyan"))
    return table


_MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")
_MEMORY_ROWS = 16
#: What is left of a GPU's memory after its largest parts have been named.
_MEMORY_REST = 0.05


def _memory(memory: Mapping[str, Any]) -> Any:
    from rich.console import Group
    from rich.text import Text

    capacity = memory["capacity_bytes"]
    table = _table(
        "Memory of the fullest GPU of each stage (GiB)",
        ("stage", "right"), *((part, "right") for part in _MEMORY_PARTS), ("peak", "right"), ("", "left"),
    )  # fmt: skip
    stages = memory["per_stage"]
    shown = _fullest(stages)
    for row in shown:
        over = row["peak"] > row["capacity"]
        style = "red" if over else ""
        verdict = f"{_gib(row['peak'] - row['capacity'])} GiB too much" if over else ""
        table.add_row(
            str(row["stage"]), *(_gib(row[part]) for part in _MEMORY_PARTS), _gib(row["peak"]), verdict, style=style
        )
    lines: list[Any] = [table]
    if host := memory.get("host"):
        lines.append(_host(host))
    if len(shown) < len(stages):
        lines.append(Text(f"{len(stages) - len(shown)} stages between them are no fuller.", style="dim"))
    peak = f"{format_gib(memory['peak_bytes'])} of {format_gib(capacity)}"
    allocated = f"{format_gib(memory['peak_allocated_bytes'])} by PyTorch's allocator"
    if memory["fits"]:
        lines.append(Text(f"Fits: at most {peak}, {allocated}.", style="green"))
    elif any(row["peak"] > row["capacity"] for row in stages):
        lines.append(Text(f"DOES NOT FIT: {peak}, {allocated}.", style="bold red"))
        lines += [Text(f"  {line}", style="red") for line in memory.get("advice", ())]
    if "second_step_bytes" in memory:
        most = format_gib(memory["second_step_bytes"])
        lines.append(
            Text(f"PyTorch's DDP may take {most} in the second step, when it makes its buckets anew.", style="dim")
        )
    lines.append(Text(_fullest_moment(max(stages, key=lambda row: float(row["peak"])))))
    return Group(*lines)


def _fullest_moment(row: Mapping[str, Any]) -> str:
    """When the fullest GPU is fullest, and what is in it: what makes up nearly all."""
    shown: list[str] = []
    rest = float(row["peak"])
    for name, nbytes in row["contents"].items():
        if rest <= _MEMORY_REST * row["peak"]:
            break
        shown.append(f"{name.removeprefix('activations: ')} {_gib(nbytes)}")
        rest -= nbytes
    when = f"Stage {row['stage']} is fullest at {format_time(row['peak_at_s'])}"
    during = f", in {row['during']}" if row["during"] else ""
    chunks = f"{row['in_flight']} micro-batch chunk{'s' if row['in_flight'] > 1 else ''}"
    return f"{when}{during}: {', '.join(shown)} GiB. It holds at most {chunks}."


def _host(host: Mapping[str, Any]) -> Text:
    """What the fullest node's host and drives hold."""
    from rich.text import Text

    capacity = host["capacity_bytes"]
    beside = "" if capacity is None else f" of {format_gib(capacity)}"
    drives = f", drives {format_gib(host['nvme_bytes'])}" if host["nvme_bytes"] else ""
    verdict = "Host: at most" if host["fits"] else "DOES NOT FIT ON THE HOST:"
    return Text(
        f"{verdict} {format_gib(host['peak_bytes'])}{beside}{drives}.", style="" if host["fits"] else "bold red"
    )


def _fullest(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All stages, or of many the first, the last and the fullest, in order."""
    if len(stages) <= _MEMORY_ROWS:
        return list(stages)
    by_peak = sorted(range(1, len(stages) - 1), key=lambda index: (-stages[index]["peak"], index))
    chosen = sorted({0, len(stages) - 1, *by_peak[: _MEMORY_ROWS - 2]})
    return [stages[index] for index in chosen]


def _gib(nbytes: float) -> str:
    return format_gib(nbytes).removesuffix(" GiB")


def _communication(result: Result) -> Table:
    table = _table(
        "Communication (per GPU)",
        ("kind", "left"), ("sent", "right"), ("in flight", "right"), ("exposed", "right"), ("algorithm", "left"),
        ("on links, the slowest first", "left"),
    )  # fmt: skip
    from rich.text import Text

    step = result["step_time_s"]
    for kind, row in result["communication"].items():
        if row["time_s"] or row["bytes_per_gpu"]:
            times = (_time_beside(row[key], step) for key in ("time_s", "exposed_s"))
            links = ", ".join(link["links"] for link in row["links"][:_LINKS_OF_KIND])
            table.add_row(kind, format_bytes(row["bytes_per_gpu"]), *times, Text(str(row["algorithm"])), Text(links))
    return table


def _links(links: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "Busiest links", ("link", "left"), ("alike", "right"), ("carried by each", "right"), ("in use", "right")
    )
    from rich.text import Text

    for row in links[:5]:
        table.add_row(
            Text(row["name"]), f"{row.get('count', 1):,}", format_bytes(row["bytes"]), _percent(row["utilisation"])
        )
    return table


def _contention(result: Result, title: str) -> Table:
    """Where transfers held each other up, and what each lost against an idle network; who lost nothing was there."""
    table = _table(
        title,
        ("link", "left"), ("alike", "right"), ("transfers", "left"), ("at once", "right"), ("together", "right"),
        ("lost", "right"),
    )  # fmt: skip
    from rich.text import Text

    several = len({flow["job"] for row in result["contention"] for flow in row["flows"] if flow["job"]}) > 1
    for row in result["contention"][:5]:
        name, alike = row["link"], f"{row['count']:,}"
        for flow in row["flows"]:
            whose = f"{flow['job']}: " if several and flow["job"] else ""
            what = f"{whose}{flow['axis']} {flow['op'].replace('_', ' ')}"
            times = (format_time(flow[key]) for key in ("seconds_together", "lost_s"))
            table.add_row(Text(name), alike, Text(what), f"{flow['at_once']:,}", *times)
            name = alike = ""
    return table
