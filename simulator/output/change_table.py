"""Table of the changes that help most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simulator.analysis.training.memory import is_narrow
from simulator.output.fitted_table import FittedTable
from simulator.output.tables import percent, time_beside
from simulator.units import counted, format_gib, format_time

if TYPE_CHECKING:
    from rich.console import RenderableType


def change_parts(advice: Mapping[str, Any], step_time_s: float) -> list[RenderableType]:
    """Return a table of the changes that help most, and lines on what else was tried.

    ``advice``: the JSON form of `simulator.advising.advise.SpeedAdvice`.
    """
    from rich.text import Text

    parts: list[RenderableType] = []
    if advice["changes"]:
        table = FittedTable(
            "What to change: the changes that help most, each simulated by itself",
            ("change", "left"), ("step", "right"), ("saved", "right"), ("", "right"), ("memory", "left"),
        )  # fmt: skip
        for row in advice["changes"]:
            table.add_row(
                row["options"],
                time_beside(row["step_time_s"], step_time_s),
                time_beside(row["saved_s"], step_time_s),
                percent(row["saved_s"] / step_time_s),
                memory_verdict(row),
            )
        parts.append(table)
    parts += [Text(line) for line in change_lines(advice)]
    return parts


def memory_verdict(row: Mapping[str, Any]) -> str:
    """Return how a change that fits into memory does, such as ``fits: 61.2 GiB of 79.1 GiB``."""
    verdict = "barely fits" if is_narrow(row["peak_bytes"], row["capacity_bytes"]) else "fits"
    return f"{verdict}: {format_gib(row['peak_bytes'])} of {format_gib(row['capacity_bytes'])}"


def change_lines(advice: Mapping[str, Any]) -> list[str]:
    """Return sentences on what was tried, and on the fastest change that does not fit."""
    lines = []
    larger = advice["too_large"]
    if larger is not None:
        needs = f"{format_gib(larger['peak_bytes'])} of {format_gib(larger['capacity_bytes'])}"
        if larger["peak_bytes"] <= larger["capacity_bytes"]:
            needs = "more memory of the host than a node has"
        step = format_time(larger["step_time_s"])
        lines.append(f"Faster, if it fitted: {larger['options']} takes {step} a step and needs {needs}.")
    tried = f"{counted(advice['simulated'], 'change')} simulated, each by itself"
    if advice["refused"]:
        tried += f", {advice['refused']} more not possible for this job"
    if advice["left"]:
        tried += f", {advice['left']} not tried for want of time (--budget-s)"
    unhelpful = not advice["changes"] and advice["simulated"]
    helps = "No change that was tried makes the step faster and fits: " if unhelpful else ""
    lines.append(f"{helps}{tried}.")
    return lines


def change_text(advice: Mapping[str, Any], step_time_s: float) -> str:
    """Return `change_parts` as text."""
    from rich.console import Console

    console = Console(width=110, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(*change_parts(advice, step_time_s), sep="\n")
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
