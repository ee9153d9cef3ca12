"""Gantt charts of streams: a row per stream of a rank, coloured by class of kernel."""

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
#: Columns that a row is drawn with: shorter gaps and boxes cannot be seen.
_COLUMNS = 3000
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
    from matplotlib.collections import PolyCollection
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
    for at, row in enumerate(shown):
        axes.axhspan(at - 0.4, at + 0.4, color=IDLE_COLOUR, lw=0)
        for kind, (start, end) in row.boxes.items():
            x0, x1 = _visible(start - first, end - first, (last - first) / _COLUMNS)
            x0, x1, y = x0 / size, x1 / size, np.full(len(x0), float(at))
            corners = ((x0, y - 0.4), (x1, y - 0.4), (x1, y + 0.4), (x0, y + 0.4))
            polygons = np.stack([np.stack(corner, -1) for corner in corners], 1)
            axes.add_collection(PolyCollection(list(polygons), facecolors=CLASS_COLOUR[kind], lw=0), autolim=False)
    unseen = f" (gaps below {format_time((last - first) / _COLUMNS)} are not drawn)" if last > first else ""
    axes.set(xlim=(0, (last - first) / size or 1.0), ylim=(len(shown) - 0.5, -0.5), xlabel=f"time, {name}{unseen}")
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


def _visible(start: Floats, end: Floats, column_s: float) -> tuple[Floats, Floats]:
    """Return boxes with those joined that no column of the picture lies between, each a column wide at least."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    begins = np.concatenate(([True], start[1:] - end[:-1] > column_s))
    first = np.flatnonzero(begins)
    last = np.concatenate((first[1:] - 1, [len(start) - 1]))
    return start[first], np.maximum(end[last], start[first] + column_s)


def save_stream_gantt(rows: Sequence[StreamRow], title: str, path: Path) -> None:
    """Write the picture of `stream_gantt` to ``path``, whose ending says what kind of picture it is."""
    figure = stream_gantt(rows, title)
    kind = path.suffix.lower().removeprefix(".")
    assert f".{kind}" in PICTURES
    with writing(path) as file:
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
