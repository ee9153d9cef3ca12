"""Bar charts of a result, drawn into matplotlib's axes without pyplot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulator.output.page.sections import Bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def new_axes(width_in: float = 8.0, height_in: float = 3.2) -> Axes:
    """Return axes of a figure of their own."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=120, layout="constrained").subplots()


def bar_plot(bars: Sequence[Bar], title: str, ax: Axes | None = None) -> Axes:
    """Draw rows of bars with their figures, the first on top; into ``ax`` where given."""
    axes = new_axes(8.0, 0.8 + 0.3 * len(bars)) if ax is None else ax
    widths = [bar.width for bar in bars]
    axes.barh(range(len(bars)), widths, color=[bar.colour for bar in bars], edgecolor="#1f293330", height=0.7)
    for row, bar in enumerate(bars):
        axes.text(bar.width + 1.0, row, f"{bar.figure}  {bar.share}", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 130)
    axes.set_xticks([])
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return axes
