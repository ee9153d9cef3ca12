"""The timeline on a page: a row per pipeline stage to zoom into, and below it the kernels of a chosen pass."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.output.gantt_panel import IDLE_COLOUR, SHARE_COLOUR
from simulator.output.page.style import bytes_text, plain_figure, seconds_text
from simulator.output.page.timeline_data import OP_COLOUR, TimelineData
from simulator.timeline import Timeline

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM
    from bokeh.plotting import figure

#: Points of a row's height, and of all rows together at most.
_ROW, _MOST = 46, 620
#: Most transfers of a lane that have a line around them: about one for each two pixels of a wide window.
_MOST_LINES = 800

#: What stands in a tooltip on the length of a box or bar, and on what a pass consists of.
_LENGTH = """
const seconds = (columns.data.right[special_vars.index] - columns.data.left[special_vars.index]) * unit_s
const [size, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"]
return `${(seconds / size).toFixed(2)} ${unit}`
"""
_INSIDE = """
const at = (column) => columns.data[column][special_vars.index]
const share = ([, top, bottom]) => 100 * (at(bottom) - at(top)) / (at("bottom") - value)
const parts = levels.filter((level) => share(level) >= 0.05)
return parts.map((level) => `${level[0]} ${share(level).toFixed(1)} %`).join(", ") || "computation"
"""


def timeline_chart(timeline: Timeline, name: str) -> tuple[LayoutDOM, str]:
    """Return the pictures of a timeline, and a sentence on what is left out. ``name``: prefix of the models' names."""
    from bokeh.layouts import column, row
    from bokeh.models import CustomJS, Div, TextInput

    data = TimelineData.arrange(timeline)
    whole, boxes, bars, marked = _whole(data, name)
    inside, source = _inside_figure(data, name)
    shown = data.inside
    boxes.selected.js_on_change(
        "indices",
        CustomJS(
            args={
                "boxes": boxes, "inside": shown, "source": source, "figure": inside, "unit_s": data.unit_s,
                "scale": data.unit_s * 1e3, "rows": list(data.rows),
                "op_colours": list(OP_COLOUR),
            },
            code=_script("inside.js"),
        ),
    )  # fmt: skip
    result = Div(text="", styles={"line-height": "32px"}, name=f"{name}-found")
    search = TextInput(placeholder="Search: 17, backward, all reduce, attn ...", width=300, name=f"{name}-search")
    search.js_on_change(
        "value_input",
        CustomJS(
            args={"boxes": boxes, "bars": bars, "inside": shown, "source": marked, "result": result},
            code=_script("search.js"),
        ),
    )
    boxes.selected.indices = _first_shown(data)
    return column(row(search, result), whole, inside, sizing_mode="stretch_width"), data.left_out


def _script(file: str) -> str:
    return files("simulator.output.page").joinpath(file).read_text(encoding="utf-8")


def _first_shown(data: TimelineData) -> list[int]:
    """Return the pass that is shown before one is chosen: the last row's first backward, or whatever there is."""
    names, rows = data.boxes["name"], data.boxes["row"]
    order = sorted(range(len(names)), key=lambda box: (-int(rows[box]), float(data.boxes["left"][box])))
    backward = [box for box in order if names[box].startswith(("B", "I"))]
    return (backward or order)[:1]


def _whole(data: TimelineData, name: str) -> tuple[figure, Any, Any, Any]:
    """Return the picture of all rows, and the sources of its boxes, bars and marks."""
    from bokeh.models import BoxAnnotation, ColumnDataSource, Label, Range1d, TapTool

    rows = len(data.rows)
    whole = plain_figure(
        name=f"{name}-timeline",
        height=min(max(rows * _ROW, 130), _MOST) + 60,
        x_range=Range1d(0, data.length, bounds=(-0.02 * data.length, 1.02 * data.length)),
        y_range=Range1d(rows, 0),
        x_axis_label=f"time ({data.unit})",
        tools="xpan,reset,save",
    )
    _zooms(whole)
    whole.yaxis.ticker = [row + 0.5 for row in range(rows)]
    whole.yaxis.major_label_overrides = {row + 0.5: label for row, label in enumerate(data.rows)}
    whole.ygrid.visible = False
    quads = {"left": "left", "right": "right", "top": "top", "bottom": "bottom", "line_color": None}
    whole.quad(**quads, source=ColumnDataSource(data.idle), fill_color=IDLE_COLOUR)
    whole.quad(**quads, source=ColumnDataSource(data.runs), fill_color="colour")
    boxes, bars = ColumnDataSource(data.boxes), ColumnDataSource(data.bars)
    passes = whole.quad(
        **{**quads, "line_color": "white"}, line_width="line", source=boxes, fill_color="colour", name=f"{name}-boxes"
    )
    passes.nonselection_glyph = None
    _part_wide_boxes(whole, boxes, 1)
    passes.selection_glyph = type(passes.glyph)(
        left="left", right="right", top="top", bottom="bottom", fill_color="colour", line_color="black", line_width=2
    )
    for kind, (top, bottom) in data.levels.items():
        part = whole.quad(**{**quads, "top": top, "bottom": bottom}, source=boxes, fill_color=SHARE_COLOUR[kind])
        part.nonselection_glyph = part.selection_glyph = None
    # A faint line keeps the shortest transfers visible. Lines of many would fill a lane: without, it is as pale as the
    # share of time that transfers fill.
    sparse = np.unique(data.bars["top"], return_counts=True)[1].max(initial=0) <= _MOST_LINES
    transfers = whole.quad(
        **{**quads, "line_color": "colour"}, line_width=0.8, line_alpha=0.3 if sparse else 0.0, source=bars,
        fill_color="colour",
    )  # fmt: skip
    transfers.nonselection_glyph = None
    marked = ColumnDataSource({side: np.zeros(0) for side in ("left", "right", "top", "bottom")})
    whole.quad(
        **{**quads, "line_color": "black"}, line_width=1.5, source=marked, fill_color="#FFE600", fill_alpha=0.45,
    )  # fmt: skip
    if data.left_out:
        begin, end = data.gap
        whole.add_layout(BoxAnnotation(left=begin, right=end, fill_color="white", fill_alpha=1.0, line_color=None))
        middle = {"text_align": "center", "text_baseline": "middle"}
        whole.add_layout(Label(x=(begin + end) / 2, y=rows / 2, text="not drawn", angle=np.pi / 2, **middle))
    whole.add_tools(*_hovers(data, passes, transfers), TapTool(renderers=[passes]))
    return whole, boxes, bars, marked


def _part_wide_boxes(picture: figure, source: Any, line_width: float) -> None:
    """Draw lines of ``line_width`` around the boxes of ``source`` that are wider than four pixels, however zoomed."""
    from bokeh.models import CustomJS

    change = CustomJS(args={"source": source, "figure": picture, "line_width": line_width}, code=_script("lines.js"))
    picture.js_on_change("inner_width", change)
    picture.x_range.js_on_change("start", change)
    picture.x_range.js_on_change("end", change)
    source.js_on_change("data", change)


def _zooms(picture: figure) -> None:
    """Zoom in time: a drag looks closer at what it covers, Ctrl and the wheel do so around the pointer."""
    from bokeh.models import BoxZoomTool, WheelZoomTool

    wheel, box = WheelZoomTool(dimensions="width", modifiers={"ctrl": True}), BoxZoomTool(dimensions="width")
    picture.add_tools(box, wheel)
    picture.toolbar.active_scroll, picture.toolbar.active_drag = wheel, box


def _hovers(data: TimelineData, passes: Any, transfers: Any) -> list[Any]:
    """Return what appears under the pointer on a pass, and on a transfer."""
    from bokeh.models import CustomJSHover, HoverTool

    def times(source: Any) -> tuple[list[tuple[str, str]], dict[str, Any]]:
        """Return the rows on where and when, and what writes them."""
        length = CustomJSHover(args={"columns": source, "unit_s": data.unit_s}, code=_LENGTH)
        where = CustomJSHover(args={"rows": list(data.rows)}, code="return rows[value]")
        rows = [
            ("where", "@row{custom}"), ("begins", f"@{{left}}{{0,0.0000}} {data.unit}"),
            ("ends", f"@right{{0,0.0000}} {data.unit}"), ("takes", "@bottom{custom}"),
        ]  # fmt: skip
        return rows, {"@bottom": length, "@row": where, "@moved": bytes_text()}

    boxes, bars = passes.data_source, transfers.data_source
    levels = [[kind, *edges] for kind, edges in data.levels.items()]
    consists = CustomJSHover(args={"columns": boxes, "levels": levels}, code=_INSIDE)
    (in_box, box_texts), (in_bar, bar_texts) = times(boxes), times(bars)
    moved = [("sent inside", "@moved{custom}")] if data.boxes["moved"].max(initial=0) > 0 else []
    return [
        HoverTool(
            renderers=[passes],
            tooltips=[("", "@name"), *in_box, ("of it", "@top{custom}"), *moved],
            formatters={**box_texts, "@top": consists},
        ),
        HoverTool(
            renderers=[transfers],
            tooltips=[("", "@name"), ("micro-batch", "@microbatch"), *in_bar, ("bytes", "@moved{custom}")],
            formatters=bar_texts,
        ),
    ]


def _inside_figure(data: TimelineData, name: str) -> tuple[figure, Any]:
    """Return the picture of one pass, which a browser fills, and its source."""
    from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Range1d
    from bokeh.transform import dodge

    columns = ("line", "left", "right", "lane", "colour", "name", "kind", "seconds", "moved", "flops")
    source = ColumnDataSource({column: [] for column in columns})
    inside = plain_figure(
        name=f"{name}-inside",
        height=205,
        title="Inside a pass\n",
        x_range=Range1d(0, 1),
        y_range=FactorRange(factors=["compute"]),
        x_axis_label="time since the pass began (ms)",
        tools="xpan,reset,save",
    )
    _zooms(inside)
    inside.ygrid.visible = False
    bars = {"height": 0.8, "left": "left", "right": "right", "source": source, "fill_color": "colour"}
    lane = dodge("lane", 0.0, range=inside.y_range)
    # Drawn twice: through the edges of a kernel as narrow as a pixel the background would shine.
    inside.hbar(y=lane, **bars, line_color=None)
    kernels = inside.hbar(y=lane, **bars, line_color="white", line_width="line")
    _part_wide_boxes(inside, source, 0.6)
    inside.add_tools(
        HoverTool(
            renderers=[kernels],
            tooltips=[
                ("", "@name"), ("kind", "@kind"), ("begins", "@left{0,0.0000} ms"), ("takes", "@seconds{custom}"),
                ("bytes", "@moved{custom}"), ("FLOPs", "@flops{0.000 a}"),
            ],
            formatters={"@seconds": seconds_text(), "@moved": bytes_text()},
        )
    )  # fmt: skip
    return inside, source
