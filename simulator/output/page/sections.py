"""Sections of a page in words, tables and bars: the verdict, where time goes, links, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.output.accuracy_text import card_of_interval, interval_lines, nothing_comparable_lines
from simulator.output.change_table import change_lines, memory_verdict
from simulator.output.efficiency_text import BUBBLE_WINDOW, mfu_lines
from simulator.output.gantt_panel import IDLE_COLOUR, PHASE_COLOUR, SHARE_COLOUR
from simulator.output.job_text import batch_line, cluster_text, describe_layout, model_and_precision
from simulator.output.memory_summary import fit_verdict
from simulator.output.summary import calibration_text, framework_text, lacking_line, price_lines
from simulator.output.tables import (
    HOST,
    WAITING,
    JsonReport,
    alike_links,
    gpu_hours,
    percent,
    run_cost,
    run_length,
    time_beside,
)
from simulator.units import counted, format_bytes, format_gib, format_time

_BAR_ROWS, _LINK_ROWS = 10, 8
_GREY = "#9AA5B1"


@dataclass(frozen=True)
class Card:
    """Key figure under its ``label``, with a note ``beside`` it; ``alarming`` ones are red."""

    label: str
    figure: str
    beside: str = ""
    alarming: bool = False


@dataclass(frozen=True)
class Bar:
    """A row of a table with a bar: its name, its figure, and its share of the whole and of the longest bar."""

    name: str
    figure: str
    share: str
    width: float
    colour: str


def headline(report: JsonReport) -> str:
    """Say what runs on what."""
    return (
        f"{model_and_precision(report)} on {counted(report['n_gpus'], 'GPU')} "
        f"of {cluster_text(report)} with {framework_text(report['framework'])}: "
        f"{describe_layout(report['parallelism'])}, "
        f"{counted(report['n_microbatches'], 'micro-batch', 'es')}; {batch_line(report).rstrip()}"
    )


def cards(report: JsonReport) -> list[Card]:
    """Return the key figures: time and how far to trust it, memory, throughput, efficiency, the whole run."""
    memory = report["memory"]
    shown = [
        Card(
            "step time",
            format_time(report["step_time_s"]),
            card_of_interval(report),
            alarming=not report.get("accuracy"),
        ),
        Card(
            "memory",
            fit_verdict(memory),
            f"at most {format_gib(memory['peak_bytes'])} of {format_gib(memory['capacity_bytes'])}",
            alarming=fit_verdict(memory) != "fits",
        ),
        Card(
            f"{report['throughput_counts']}/s",
            f"{report['tokens_per_s']:,.0f}",
            f"{report['tokens_per_s_per_gpu']:,.0f} per GPU",
        ),
        Card("MFU", percent(report["mfu"]), "; ".join([*mfu_lines(report), f"HFU {percent(report['hfu'])}"])),
    ]
    if report["bubble_fraction"] is not None:
        shown.append(Card("bubble", percent(report["bubble_fraction"]), BUBBLE_WINDOW))
    if run := report.get("run"):
        shown.append(Card("whole run", run_length(run["days"]), f"{gpu_hours(run['gpu_hours'])}{run_cost(run)}"))
    return shown


def alarms(report: JsonReport) -> list[str]:
    """Return what a reader has to know before the figures: that memory lacks, that nothing was measured, warnings."""
    first = [lacking_line(report["memory"]), "\n".join(nothing_comparable_lines(report))]
    return [*filter(None, first), *report["warnings"]]


def time_bars(report: JsonReport) -> list[Bar]:
    """Return where a GPU's time goes, mean over GPUs."""
    times = report["time_breakdown_s"]
    parts = [
        ("compute", times["compute"], PHASE_COLOUR["F"]),
        ("recompute", times["recompute"], SHARE_COLOUR["recompute"]),
        ("optimizer", times["optimizer"], PHASE_COLOUR["O"]),
        *((f"exposed {kind} communication", s, SHARE_COLOUR[kind]) for kind, s in times["exposed"].items()),
        (HOST, times["host"], "#7B8794"),
        (WAITING, times["bubble"], IDLE_COLOUR),
        ("waiting for the step's end", times["other"], IDLE_COLOUR),
    ]
    step = report["step_time_s"]
    return _bars([part for part in parts if part[1] >= 5e-4 * step], step)


def path_bars(report: JsonReport) -> list[Bar]:
    """Return what the step's length is made of."""
    path = report["critical_path"]
    rows = [(row["class"], row["seconds"], _path_colour(row["class"])) for row in path[:_BAR_ROWS]]
    rest = sum(row["seconds"] for row in path[_BAR_ROWS:])
    return _bars([*rows, *([("the rest", rest, _GREY)] if rest > 0 else [])], sum(row["seconds"] for row in path))


def _path_colour(kind: str) -> str:
    first = kind.split(" ")[0]
    if first in SHARE_COLOUR:
        return SHARE_COLOUR[first]
    return {"optimizer": PHASE_COLOUR["O"], "waiting": IDLE_COLOUR, "host": "#7B8794"}.get(first, PHASE_COLOUR["F"])


def _bars(rows: list[tuple[str, float, str]], whole: float) -> list[Bar]:
    longest = max((seconds for _, seconds, _ in rows), default=0.0)
    return [
        Bar(name, time_beside(seconds, whole), percent(seconds / whole), 100 * seconds / longest, colour)
        for name, seconds, colour in rows
    ]


def link_bars(report: JsonReport) -> list[Bar]:
    """Return the busiest links, by the share of the step in which they would be full."""
    return [
        Bar(
            f"{row['name']} ({alike_links(row)} alike, each way counted)",
            format_bytes(row["bytes"]),
            percent(row["utilisation"]),
            min(100 * row["utilisation"], 100.0),
            PHASE_COLOUR["F"],
        )
        for row in report["links"][:_LINK_ROWS]
    ]


def traffic_rows(report: JsonReport) -> list[tuple[str, ...]]:
    """Return rows on each kind of communication: sent per GPU, in flight, exposed, algorithm, links."""
    step = report["step_time_s"]
    return [
        (
            kind,
            format_bytes(row["bytes_per_gpu"]),
            time_beside(row["time_s"], step),
            time_beside(row["exposed_s"], step),
            str(row["algorithm"]),
            ", ".join(link["links"] for link in row["links"][:2]),
        )
        for kind, row in report["communication"].items()
        if row["time_s"] or row["bytes_per_gpu"]
    ]


def change_rows(report: JsonReport) -> list[tuple[str, ...]]:
    """Return rows on the changes that help most: how to type one, its step, what it saves, memory."""
    step = report["step_time_s"]
    return [
        (
            row["options"],
            time_beside(row["step_time_s"], step),
            time_beside(row["saved_s"], step),
            percent(row["saved_s"] / step),
            memory_verdict(row),
        )
        for row in report["what_to_change"]["changes"]
    ]


def section_context(report: JsonReport) -> Mapping[str, Any]:
    """Return all that the template of a page writes about one job."""
    return {
        "name": report["name"],
        "headline": headline(report),
        "alarms": alarms(report),
        "memory_advice": report["memory"]["advice"],
        "cards": cards(report),
        "changes": change_rows(report),
        "change_lines": change_lines(report["what_to_change"]),
        "time_bars": time_bars(report),
        "path_bars": path_bars(report),
        "link_bars": link_bars(report),
        "traffic": traffic_rows(report),
        "trust": interval_lines(report["accuracy"]) if report.get("accuracy") else [],
        "calibration": calibration_text(report["calibration"]),
        "prices": price_lines(report["calibration"]),
    }
