"""Gantt charts of streams: a row per stream of a rank, coloured by class of kernel.

A row has thousands of columns. Each class fills a column as high as its part of the column's time. So the area of a
class is its share of the row, however short its kernels are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from simulator.arrays import Floats
from simulator.output.files import PICTURES, writing
from simulator.units import format_time, ms, us

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Class of kernels -> colour, Okabe and Ito's as in the Gantt chart of steps.
CLASS_COLOUR = {
    "matmul": "#0072B2",
    "attention": "#56B4E9",
    "memory": "#009E73",
    "optimizer": "#4D4D4D",
    "copy": "#8B5A2B",
    "communication": "#CC79A7",
    "hand-over": "#D55E00",
}
IDLE_COLOUR = "#EDEDED"
_WIDTH_IN, _ROW_IN, _DPI = 14.0, 0.32, 120
#: Columns of a row, and its height; rows are 1 apart.
_COLUMNS, _HEIGHT = 3000, 0.8
#: Rows drawn; more would be too thin to read.
MOST_ROWS = 64


@dataclass(frozen=True)
class StreamRow:
    """A row: its label, and by class the starts and ends (s) of what runs in it."""

    label: str
    boxes: Mapping[str, tuple[Floats, Floats]]


def stream_gantt(rows: Sequence[StreamRow], title: str) -> Figure:
    """Draw rows one below the other on one time axis. Of more than `MOST_ROWS` the first are drawn, which the title
    says."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = rows[:MOST_ROWS]
    if len(rows) > len(shown):
        title += f" (the first {len(shown)} of {len(rows)} streams)"
    starts = [start for row in shown for start, _ in row.boxes.values()]
    ends = [end for row in shown for _, end in row.boxes.values()]
    first, last = min(float(start.min()) for start in starts), max(float(end.max()) for end in ends)
    name, size = ("s", 1.0) if last - first >= 10 else ("ms", ms) if last - first >= 10 * us else ("us", us)
    figure = Figure((_WIDTH_IN, 1.4 + _ROW_IN * max(len(shown), 3)), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    edges = np.linspace(first, last, _COLUMNS + 1)
    for at, row in enumerate(shown):
        axes.axhspan(at - _HEIGHT / 2, at + _HEIGHT / 2, color=IDLE_COLOUR, lw=0)
        base = np.full(_COLUMNS, at + _HEIGHT / 2)
        for kind, share in column_shares(row, edges).items():
            top = base - _HEIGHT * share
            low, high = (np.append(values, values[-1]) for values in (base, top))
            axes.fill_between((edges - first) / size, low, high, step="post", color=CLASS_COLOUR[kind], lw=0)
            base = top
    column = f" (heights: shares of each {format_time((last - first) / _COLUMNS)})" if last > first else ""
    axes.set(xlim=(0, (last - first) / size or 1.0), ylim=(len(shown) - 0.5, -0.5), xlabel=f"time, {name}{column}")
    axes.set_yticks(range(len(shown)), [row.label for row in shown], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    kinds = [kind for kind in CLASS_COLOUR if any(kind in row.boxes for row in shown)]
    handles = [Patch(facecolor=CLASS_COLOUR[kind], label=kind) for kind in kinds]
    handles.append(Patch(facecolor=IDLE_COLOUR, label="idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def column_shares(row: StreamRow, edges: Floats) -> dict[str, Floats]:
    """Return by class the part of each column's time that it fills, in the order of `CLASS_COLOUR`; the rest is idle.

    ``edges``: times (s) at which columns begin, and the last one ends. Where boxes overlap, parts are scaled to one.
    """
    width_s = np.maximum(np.diff(edges), np.finfo(float).tiny)
    shares = {kind: np.diff(_filled_s(*row.boxes[kind], edges)) / width_s for kind in CLASS_COLOUR if kind in row.boxes}
    total = np.maximum(sum(shares.values(), np.zeros(len(width_s))), 1.0)
    return {kind: share / total for kind, share in shares.items()}


def _filled_s(start: Floats, end: Floats, times: Floats) -> Floats:
    """Return the seconds of all boxes from ``start`` to ``end`` that are over at each of ``times``."""

    def since(moments: Floats) -> Floats:
        ordered = np.sort(moments)
        before = np.searchsorted(ordered, times, "right")
        return before * times - np.concatenate(([0.0], np.cumsum(ordered)))[before]

    filled: Floats = since(start) - since(end)
    return filled


def save_stream_gantt(rows: Sequence[StreamRow], title: str, path: Path) -> None:
    """Write the picture of `stream_gantt` to ``path``, whose ending says what kind of picture it is."""
    figure = stream_gantt(rows, title)
    kind = path.suffix.lower().removeprefix(".")
    assert f".{kind}" in PICTURES
    with writing(path) as file:
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
