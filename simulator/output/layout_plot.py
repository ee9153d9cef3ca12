"""Picture of a search: simulated layouts by step time and memory left, drawn into axes without pyplot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulator.output.bar_plots import new_axes
from simulator.output.search_table import SearchRow, SearchView, changed_keys
from simulator.output.sweep_figures import FIGURES, FigureScale
from simulator.output.sweep_table import setting_text, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FRONT, _OTHER, _UNFIT = "#0072B2", "#9AA5B1", "#D55E00"
_GiB = 2**30
#: GiB by which a number stands above its layout.
_ABOVE = 2.0


def layout_plot(view: SearchView, simulated: Sequence[SearchRow], ax: Axes | None = None) -> Axes:
    """Draw ``simulated`` layouts of a search, and join those of which no other is faster and leaves as much memory.

    These are numbered, and told below by the keys in which they differ. Layouts that do not fit are crosses below the
    line of no memory left. Into ``ax`` where given.
    """
    axes = new_axes(8.0, 5.0) if ax is None else ax
    scale = FigureScale.fitting(FIGURES["step_time_s"], [row["step_time_s"] for row in simulated])
    for fits, marker, colour in ((True, "o", _OTHER), (False, "x", _UNFIT)):
        rows = [row for row in simulated if row["fits"] is fits]
        if rows:
            label = "other that fits" if fits else "does not fit"
            axes.scatter(_times(rows, scale), _left(rows), marker=marker, color=colour, label=label, zorder=2)
    axes.plot(_times(view.front, scale), _left(view.front), color=_FRONT, linewidth=1, zorder=3)
    keys = changed_keys([{key: row[key] for key in view.keys} for row in view.front])
    names = short_names(keys)
    for number, row in enumerate(view.front, 1):
        label = ", ".join(f"{names[key]} {setting_text(row[key], key)}" for key in keys)
        above, marker = [_left([row])[0] + _ABOVE], f"${number}$"
        axes.scatter(_times([row], scale), above, label=label, marker=marker, s=60, color=_FRONT, zorder=4)
        axes.scatter(_times([row], scale), _left([row]), color=_FRONT, zorder=3)
    axes.axhline(0.0, color="#1f2933", linewidth=0.8)
    axes.margins(x=0.08, y=0.15)
    axes.set_xlabel(f"step time ({scale.unit.strip()})")
    axes.set_ylabel("memory left on the fullest GPU (GiB)")
    axes.set_title(view.head, loc="left", fontsize=11)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.14), frameon=False)
    return axes


def _times(rows: Sequence[SearchRow], scale: FigureScale) -> list[float]:
    return [row["step_time_s"] / scale.size for row in rows]


def _left(rows: Sequence[SearchRow]) -> list[float]:
    return [row["headroom_bytes"] / _GiB for row in rows]
