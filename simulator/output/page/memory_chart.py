"""Memory on a page: the fullest GPU's contents over the step, and the total of a GPU of each pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.analysis.time.pipeline_ranks import one_rank_per_stage
from simulator.analysis.training.memory import RankMemory, fullest
from simulator.arrays import Floats
from simulator.output.memory_plot import LAYER_COLOURS, memory_layers
from simulator.output.page.style import FONT, INK, plain_figure
from simulator.timeline import Timeline
from simulator.units import GiB, format_gib

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM
    from bokeh.plotting import figure

_CAPACITY = "#C00000"
#: Most stages whose memory is drawn, and most moments of each.
_MOST_STAGES, _MOST_MOMENTS = 16, 2000


def memory_chart(timeline: Timeline, memories: Sequence[RankMemory], name: str) -> LayoutDOM:
    """Draw the memory of a job; ``timeline``: all that was played."""
    from bokeh.layouts import column

    worst = fullest(tuple(memories))
    top = 1.12 * max(worst.total, worst.capacity) / GiB
    whole = _contents(timeline, worst, name, top)
    parts: list[Any] = [whole]
    by_rank = {one.rank: one for one in memories}
    shown = _spread([by_rank[rank] for rank in one_rank_per_stage(timeline)])
    if len(shown) > 1:
        parts.append(_stages(timeline, shown, whole, top, name))
    return column(*parts, sizing_mode="stretch_width")


def _spread(memories: list[RankMemory]) -> list[RankMemory]:
    """Return all stages, or of many an even choice with the first and the last."""
    if len(memories) <= _MOST_STAGES:
        return memories
    return [memories[round(place)] for place in np.linspace(0, len(memories) - 1, _MOST_STAGES)]


def _thinned(times: Floats, layers: dict[str, Floats]) -> tuple[Floats, dict[str, Floats]]:
    """Return what holds from each moment on, once a moment; of many moments the fullest of each stretch of time."""
    settled = np.append(times[1:] > times[:-1], True)
    times, layers = times[settled], {name: column[settled] for name, column in layers.items()}
    if len(times) <= _MOST_MOMENTS:
        return times, layers
    total = np.sum(list(layers.values()), axis=0)
    parts = np.array_split(np.arange(len(times)), _MOST_MOMENTS)
    kept = np.array([part[total[part].argmax()] for part in parts])
    return times[kept], {name: column[kept] for name, column in layers.items()}


def _contents(timeline: Timeline, shown: RankMemory, name: str, top: float) -> figure:
    """Draw what fills one GPU, in layers."""
    from bokeh.models import ColumnDataSource, HoverTool, Range1d

    picture = plain_figure(
        name=f"{name}-memory",
        height=330,
        title=f"What fills the fullest GPU: rank {shown.rank}, stage {shown.stage}",
        x_axis_label="time (s)",
        y_axis_label="GiB",
        x_range=Range1d(0, timeline.step_time_s),
        y_range=Range1d(0, top),
        tools="xpan,xbox_zoom,reset,save",
    )
    times, layers = _thinned(*memory_layers(timeline, shown))
    seen = [layer for layer in LAYER_COLOURS if layers[layer].max() > 1e-3 * shown.total]
    heights = np.cumsum([np.zeros(len(times)), *(layers[layer] / GiB for layer in seen)], axis=0)
    source = ColumnDataSource(
        {"time": times.astype(np.float32), "total": heights[-1].astype(np.float32)}
        | {layer: (layers[layer] / GiB).astype(np.float32) for layer in seen}
        | {f"above_{number}": height.astype(np.float32) for number, height in enumerate(heights)}
    )
    for number, layer in enumerate(seen):
        picture.varea_step(
            x="time", y1=f"above_{number}", y2=f"above_{number + 1}", source=source, color=LAYER_COLOURS[layer],
            legend_label=layer, step_mode="after",
        )  # fmt: skip
    line = picture.step(x="time", y="total", mode="after", source=source, line_color=INK, line_width=0.6)
    _limit(picture, shown.capacity)
    _legend(picture, reverse=True)
    picture.add_tools(
        HoverTool(
            renderers=[line],
            mode="vline",
            line_policy="prev",
            tooltips=[("from", "@time{0.0000} s on"), ("all", "@total{0.00} GiB")]
            + [(layer, f"@{layer}{{0.00}} GiB") for layer in reversed(seen)],
        )
    )
    return picture


def _stages(timeline: Timeline, shown: Sequence[RankMemory], beside: figure, top: float, name: str) -> figure:
    """Draw the total of a GPU of each stage, on the time axis of the picture ``beside``."""
    from bokeh.models import ColumnDataSource, HoverTool, Range1d
    from bokeh.palettes import viridis

    picture = plain_figure(
        name=f"{name}-stages",
        height=300,
        title="In use on a GPU of each stage",
        x_axis_label="time (s)",
        y_axis_label="GiB",
        x_range=beside.x_range,
        y_range=Range1d(0, top),
        tools="xpan,xbox_zoom,reset,save",
    )
    lines = []
    for memory, colour in zip(shown, viridis(len(shown) + 1), strict=False):
        times, layers = _thinned(*memory_layers(timeline, memory))
        total = np.sum(list(layers.values()), axis=0) / GiB
        label = f"stage {memory.stage} (rank {memory.rank})"
        source = ColumnDataSource({"time": times.astype(np.float32), "total": total.astype(np.float32)})
        lines.append(
            picture.step(
                x="time", y="total", mode="after", source=source, line_color=colour, line_width=1.4, name=label,
                legend_label=str(memory.stage),
            )
        )  # fmt: skip
    _limit(picture, shown[0].capacity)
    _legend(picture, reverse=False)
    picture.legend.title = "stage"
    picture.add_tools(
        HoverTool(
            renderers=lines,
            line_policy="prev",
            tooltips=[("", "$name"), ("from", "@time{0.0000} s on"), ("in use", "@total{0.00} GiB")],
        )
    )
    return picture


def _limit(picture: figure, capacity: float) -> None:
    """Draw the memory that a GPU has."""
    from bokeh.models import Label, Span

    picture.add_layout(Span(location=capacity / GiB, dimension="width", line_color=_CAPACITY, line_dash="dashed"))
    label = Label(
        x=8, y=capacity / GiB, x_units="screen", text=f"{format_gib(capacity)} on the GPU", text_color=_CAPACITY,
        text_font=FONT, text_font_size="12px", y_offset=2,
    )  # fmt: skip
    picture.add_layout(label)


def _legend(picture: figure, *, reverse: bool) -> None:
    legend = picture.legend[0]
    picture.add_layout(legend, "right")
    legend.border_line_color = None
    legend.label_text_font = legend.title_text_font = FONT
    legend.label_text_font_size = legend.title_text_font_size = "12px"
    legend.spacing, legend.padding, legend.label_height, legend.glyph_height = 0, 2, 12, 12
    legend.click_policy = "hide"
    if reverse:
        legend.items = list(reversed(legend.items))
