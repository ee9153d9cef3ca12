"""Memory in a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simulator.analysis.training.memory import is_narrow
from simulator.output.fitted_table import FittedTable, Justify
from simulator.units import GiB, counted, format_gib, format_time

if TYPE_CHECKING:
    from rich.text import Text

#: Columns of the table, and those that have several contents.
_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")
_DIVIDED = ("activations", "buffers")
#: ``offload.parameters`` -> the weights of a job whose GPUs hold none of their own.
_WEIGHTS = {
    "none": "those in fp32 that the optimizer updates, in its column", "cpu": "on the host",
    "nvme": "on the host's drives",
}  # fmt: skip
_ROWS = 16
#: Share of a GPU's used memory that goes without names, after its largest contents.
_REST = 0.05


def memory_of(memory: Mapping[str, Any], parallelism: Mapping[str, Any]) -> Any:
    """Return the table of memory by pipeline rank, the verdict, and when the fullest GPU is fullest.

    ``memory``, ``parallelism``: as in the result of a step. Ranks with several stages are told apart from these.
    """
    from rich.console import Group
    from rich.text import Text

    one_of = "pipeline rank" if parallelism["vpp"] > 1 else "stage"
    capacity = memory["capacity_bytes"]
    stages = memory["per_stage"]
    shown = _fullest(stages)
    too_full = any(row["peak"] > row["capacity"] for row in shown)
    heads = [one_of, "peak", *_PARTS, *["over"] * too_full]
    right: Justify = "right"
    table = FittedTable(f"Memory of the fullest GPU of each {one_of} (GiB)", *((head, right) for head in heads))
    for row in shown:
        cells = [str(row["stage"]), _gib(row["peak"]), *(_part(row, part) for part in _PARTS)]
        over = (row["peak"] - row["capacity"]) / GiB
        if too_full:
            cells.append("" if over <= 0 else f"{over:.1f}" if over < 100 else f"{over:.0f}")  # all in 80 columns
        table.add_row(*cells, style="red" if over > 0 else "")
    lines: list[Any] = [table]
    if not any(row["weights"] for row in shown):
        weights = _WEIGHTS[parallelism["offload"]["parameters"]]
        lines.append(
            Text(
                f"Weights (-) are {weights}; what is gathered of them is among buffers, "
                "what is cast among activations.",
                style="dim",
            )
        )
    if host := memory.get("host"):
        lines.append(_host(host))
    if len(shown) < len(stages):
        lines.append(Text(f"{len(stages) - len(shown)} {one_of}s between them are no fuller.", style="dim"))
    peak = f"{format_gib(memory['peak_bytes'])} of {format_gib(capacity)}"
    allocated, reserved = (format_gib(memory[f"peak_{what}_bytes"]) for what in ("allocated", "reserved"))
    allocated = f"{allocated} allocated by PyTorch, {reserved} reserved with its cache"
    if memory["fits"]:
        verdict = fit_verdict(memory)
        colour = "green" if verdict == "fits" else "yellow"
        lines.append(Text(f"{verdict.capitalize()}: at most {peak}, {allocated}.", style=colour))
    elif any(row["peak"] > row["capacity"] for row in stages):
        lines.append(Text(f"DOES NOT FIT: {peak}, {allocated}.", style="bold red"))
        lines += [Text(f"  {line}", style="red") for line in memory.get("advice", ())]
    if memory.get("second_step_bytes", 0.0) > memory["peak_bytes"]:
        most = format_gib(memory["second_step_bytes"])
        lines.append(
            Text(f"PyTorch's DDP may take {most} in the second step, when it makes its buckets anew.", style="dim")
        )
    fullest = max(stages, key=lambda row: float(row["peak"] - row["capacity"]))
    lines.append(Text(f"{one_of.capitalize()} {_fullest_moment(fullest)}"))
    return Group(*lines)


def fit_verdict(memory: Mapping[str, Any]) -> str:
    """Return whether a job fits, or barely fits: less is left than simulated peaks are off by."""
    if not memory["fits"]:
        return "does not fit"
    stages = memory["per_stage"]
    return "barely fits" if any(is_narrow(row["peak"], row["capacity"]) for row in stages) else "fits"


def _fullest_moment(row: Mapping[str, Any]) -> str:
    """Return the fullest GPU's stage, when it is fullest, and nearly all that the table's columns consist of then."""
    named: dict[str, list[str]] = {}
    rest = float(row["peak"])
    for name, nbytes in row["contents"].items():
        if rest <= _REST * row["peak"]:
            break
        named.setdefault(_column(name), []).append(f"{name.removeprefix('activations: ')} {_gib(nbytes)}")
        rest -= nbytes
    shown = [
        f"{part} {_gib(row[part])}" + (f" ({', '.join(named[part])})" if part in _DIVIDED else "")
        for part in sorted(named, key=lambda part: -row[part])
    ]
    when = f"{row['stage']} is fullest at {format_time(row['peak_at_s'])}"
    during = f", in {row['during']}" if row["during"] else ""
    return f"{when}{during}: {', '.join(shown)} GiB. It holds at most {counted(row['in_flight'], 'micro-batch chunk')}."


def _part(row: Mapping[str, Any], part: str) -> str:
    """Write a column of a stage; weights that a GPU holds none of are a dash."""
    return "-" if part == "weights" and not row[part] else _gib(row[part])


def _column(content: str) -> str:
    """Return the column of the table in which a content counts.

    >>> _column("weights"), _column("activations: mlp"), _column("workspace"), _column("optimizer workspace")
    ('weights', 'activations', 'activations', 'buffers')
    """
    if content in _PARTS:
        return content
    return "activations" if content == "workspace" or content.startswith("activations: ") else "buffers"


def _host(host: Mapping[str, Any]) -> Text:
    """Say how full the fullest node's host and drives are."""
    from rich.text import Text

    capacity = host["capacity_bytes"]
    beside = "" if capacity is None else f" of {format_gib(capacity)}"
    drives = f", drives {format_gib(host['nvme_bytes'])}" if host["nvme_bytes"] else ""
    verdict = "Host: at most" if host["fits"] else "DOES NOT FIT ON THE HOST:"
    return Text(
        f"{verdict} {format_gib(host['peak_bytes'])}{beside}{drives}.", style="" if host["fits"] else "bold red"
    )


def _fullest(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return all stages in order, or of many the first, the last and the fullest."""
    if len(stages) <= _ROWS:
        return list(stages)
    by_peak = sorted(range(1, len(stages) - 1), key=lambda index: (-stages[index]["peak"], index))
    chosen = sorted({0, len(stages) - 1, *by_peak[: _ROWS - 2]})
    return [stages[index] for index in chosen]


def _gib(nbytes: float) -> str:
    return f"{nbytes / GiB:.1f}"
