"""The comparison as text and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from calibration.compare.comparison import (
    AS_TIMED,
    JUDGED,
    SHOWN,
    STEADY_SPREAD,
    ComparedRun,
    class_s,
    error,
    peak_bytes,
)
from calibration.compare.figures import Figures
from calibration.compare.kernels import PARTS
from simulator.cli.terminal import PIPE_WIDTH, table
from simulator.cli.validate import verdict
from simulator.traces.classes import CLASSES
from simulator.units import GiB

#: Of a run as a whole; column of the CSV -> the figure.
FIGURES: dict[str, Callable[[Figures], float | None]] = {
    "step_time_s": lambda figures: figures.step_time_s,
    "mfu": lambda figures: figures.mfu,
    "peak_allocated_bytes": lambda figures: max(figures.peak_allocated_bytes, default=None),
    "exposed_communication_s": lambda figures: figures.exposed_s,
    "bubble_fraction": lambda figures: figures.bubble,
}
#: Columns of the CSV, (measured, simulated) of a row; of classes of kernels those of the rank that is furthest off.
COLUMNS: dict[str, Callable[[ComparedRun], tuple[float | None, float | None]]] = {
    **{name: lambda row, name=name: (_figure(row.measured, name), _figure(row.simulated, name)) for name in FIGURES},  # type: ignore[misc]
    **{f"{name}_s": lambda row, name=name: class_s(row, name) for name in (*CLASSES, *chain(*PARTS.values()))},  # type: ignore[misc]
}


def as_csv(rows: Sequence[ComparedRun]) -> str:
    """A line per run, those that failed too; of each figure measured, simulated and error."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    sides = ("measured", "simulated", "error")
    writer.writerow(
        ["run", "gpus", "host_speed", "spread", "profiled", "reason", "step_time_s_predicted_before", "not_before"]
        + [f"{name}_{side}" for name in COLUMNS for side in sides]
    )
    for row in rows:
        cells: list[object] = []
        for sides_of in COLUMNS.values():
            measured, simulated = sides_of(row)
            cells += [_exact(value) for value in (measured, simulated, error(simulated, measured))]
        before = _exact(_figure(row.committed, "step_time_s"))
        speeds = [_exact(value) for value in (row.host_speed, row.spread, row.profiled)]
        writer.writerow([row.name, row.n_gpus, *speeds, row.reason, before, row.not_before, *cells])
    return text.getvalue()


def as_text(comparison: Mapping[str, Any]) -> str:
    """The comparison as it is printed, `PIPE_WIDTH` characters wide."""
    text = io.StringIO()
    console = Console(
        width=PIPE_WIDTH, file=text, color_system=None, highlight=False, markup=False, emoji=False, force_jupyter=False
    )
    for part in as_tables(comparison):
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def as_tables(comparison: Mapping[str, Any]) -> list[RenderableType]:
    """Two tables, why runs have no figures in the first, a line for each quantity's errors, the order of layouts, and
    what it all came from."""
    rows = [ComparedRun.from_dict(row) for row in comparison["rows"]]
    lines = [
        "Errors are (simulated - measured) / measured. host: its speed, measured beside the run, of the profile's. "
        f"spread: of the measured steps, p90 - p10 over the median; steady runs are below {STEADY_SPREAD:.0%}. "
        "GiB: allocated at most in the timed steps; first ones may take more (DDP's second step, its buckets twice). "
        "profiled: how much longer the profiled step took, in which hosts are slower; exposed communication and bubble "
        "are that step's.\n"
        "transfer: kernels of collectives from when all their ranks are there; waiting: until then. "
        "hand-over: the same of sends and receives of pipelines. ?: not told. The record says neither for which "
        "neighbour a stage in the middle sends and receives, nor what of a kernel is a send and what a receive, where "
        "torch's 1F1B makes one of both; the simulated receives of GPipe and 1F1B are posted as their bytes come, so "
        "that they do not wait."
    ]
    lines += [f"{suite['suite']}: {verdict(suite)}" for suite in comparison["suites"]]
    lines += [_share(quantity) for quantity in comparison["shares"] if quantity["all"]["n"]]
    lines += [_order(comparison["order"]), "", *_provenance(comparison)]
    classes = [row for row in rows if not row.reason]
    return [
        table([_line(row) for row in rows], title="Simulated against measured"),
        *_reasons("not compared", {row.name: row.reason for row in rows}),
        *_reasons("not predicted before", {row.name: row.not_before for row in classes}),
        *_reasons("memory not compared", {row.name: row.memory_reason for row in classes}),
        *(
            [table([_classes(row) for row in classes], title="Kernels, ms of the worst rank: measured > simulated")]
            if classes
            else []
        ),
        Text("\n".join(lines)),
    ]


def _reasons(what: str, reasons: Mapping[str, str]) -> list[RenderableType]:
    """Return the reasons by run, as a text below the table: inside it they would set its width."""
    lines = [f"  {name}: {reason}" for name, reason in reasons.items() if reason]
    return [Text("\n".join([f"{what}:", *lines, ""]))] if lines else []


def _line(row: ComparedRun) -> dict[str, str]:
    real, ours = row.measured, row.simulated
    peak, simulated_peak = peak_bytes(row)
    step, before = _figure(real, "step_time_s"), _figure(row.committed, "step_time_s")
    return {
        "run": row.name,
        "GPUs": str(row.n_gpus),
        "host": _percent(row.host_speed),
        "step ms": _ms(step),
        "spread": "" if row.spread is None else f"{row.spread:.0%}",
        "sim": _ms(_figure(ours, "step_time_s")),
        "error": _signed(error(_figure(ours, "step_time_s"), step)),
        "before": _signed(error(before, step)),
        "MFU": _percent(_figure(real, "mfu")),
        "sim ": _percent(_figure(ours, "mfu")),
        "GiB": _gib(peak),
        "sim  ": _gib(simulated_peak),
        "error ": _signed(error(simulated_peak, peak)),
        "profiled": "" if row.profiled is None else f"{row.profiled - 1:+.0%}",
        "exposed ms": _ms(_figure(real, "exposed_communication_s")),
        "sim   ": _ms(_figure(ours, "exposed_communication_s")),
        "bubble": _percent(_figure(real, "bubble_fraction")),
        "sim    ": _percent(_figure(ours, "bubble_fraction")),
    }


def _classes(row: ComparedRun) -> dict[str, str]:
    cells = {"run": row.name}
    for name in (*JUDGED[:-1], SHOWN[0], JUDGED[-1], SHOWN[1]):
        real, ours = class_s(row, name)
        off = error(ours, real)
        shown = f"{_ms(real) or '?'} > {_ms(ours) or '?'}"
        shown += "" if off is None or name not in JUDGED else f" {_signed(off)}"
        whole = next((group for group, parts in PARTS.items() if name in parts), name)
        cells[name] = shown if any(class_s(row, whole)) else ""
    return cells


def _share(quantity: Mapping[str, Any]) -> str:
    def spread(differences: Mapping[str, Any]) -> str:
        mean, largest, bias = (100 * differences[name] for name in ("mean_abs", "max_abs", "bias"))
        return f"mean {mean:.1f}, max {largest:.1f}; bias {bias:+.1f}"

    every, timed = quantity["all"], quantity["as_timed"]
    line = f"{quantity['quantity']}, points of the step: {every['n']} rows; absolute difference: {spread(every)}"
    if timed["n"]:
        line += f"; of {timed['n']} whose profiled step took up to {AS_TIMED - 1:.0%} longer: {spread(timed)}"
    return line


def _order(order: Mapping[str, Any]) -> str:
    right = f"{order['in_measured_order']} of {order['pairs']} pairs"
    lines = [f"order of layouts (same work, measured more than 3 % apart): {right} simulate in the measured order"]
    for pair in order["wrong"]:
        (a, b), real, ours = pair["runs"], pair["measured_s"], pair["simulated_s"]
        lines.append(
            f"  not: {a} {_ms(real[0])} ms, {b} {_ms(real[1])} ms; simulated {_ms(ours[0])} and {_ms(ours[1])} ms"
        )
    return "\n".join(lines)


def _provenance(comparison: Mapping[str, Any]) -> list[str]:
    commits = comparison["commits"]
    lines = [f"{name}: {commits[name] or 'not committed'}" for name in commits]
    lines.append(f"compared: {comparison['date']}; measured: {', '.join(comparison['measured_dates'])}")
    lines += [f"measured by: {command}" for command in comparison["measured_by"]]
    lines += [f"profile {one['name']}: sha256 {one['sha256'][:16]}" for one in comparison["profiles"]]
    lines += [f"hardware: {hardware}" for hardware in comparison["hardware"]]
    return [*lines, *(f"warning: {warning}" for warning in comparison["warnings"])]


def _figure(figures: Figures | None, column: str) -> float | None:
    return None if figures is None else FIGURES[column](figures)


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GiB:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _signed(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"
