"""The timeline on a page: a row per pipeline stage to zoom into, and below it the kernels of a chosen pass."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.output.gantt_panel import IDLE_COLOUR
from simulator.output.page.style import plain_figure, tooltip_units
from simulator.output.page.timeline_data import OP_COLOUR, TimelineData
from simulator.timeline import CATEGORIES, Timeline

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM
    from bokeh.plotting import figure

#: Points of a row's height, and of all rows together at most.
_ROW, _MOST = 46, 620


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
                "scale": data.unit_s * 1e3, "op_colours": list(OP_COLOUR),
            },
            code=_script("inside.js"),
        ),
    )  # fmt: skip
    found = Div(text="", styles={"line-height": "32px"}, name=f"{name}-found")
    search = TextInput(placeholder="Search: 17, backward, all reduce, attn ...", width=300, name=f"{name}-search")
    search.js_on_change(
        "value_input",
        CustomJS(
            args={"boxes": boxes, "bars": bars, "inside": shown, "source": marked, "result": found},
            code=_script("search.js"),
        ),
    )
    boxes.selected.indices = _first_shown(data)
    return column(row(search, found), whole, inside, sizing_mode="stretch_width"), data.left_out


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
    from bokeh.models import ColumnDataSource, HoverTool, Range1d, TapTool, WheelZoomTool

    rows = len(data.rows)
    whole = plain_figure(
        name=f"{name}-timeline",
        height=min(max(rows * _ROW, 130), _MOST) + 60,
        x_range=Range1d(0, data.length, bounds=(-0.02 * data.length, 1.02 * data.length)),
        y_range=Range1d(rows, 0),
        x_axis_label=f"time ({data.unit})",
        tools="xpan,xbox_zoom,reset,save",
    )
    wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    whole.add_tools(wheel)
    whole.toolbar.active_scroll = wheel
    whole.toolbar.active_drag = whole.select_one({"type": _tool("BoxZoomTool")})
    whole.yaxis.ticker = [row + 0.5 for row in range(rows)]
    whole.yaxis.major_label_overrides = {row + 0.5: label for row, label in enumerate(data.rows)}
    whole.ygrid.visible = False
    quads = {"left": "left", "right": "right", "top": "top", "bottom": "bottom", "line_color": None}
    whole.quad(**quads, source=ColumnDataSource(data.idle), fill_color=IDLE_COLOUR)
    boxes, bars = ColumnDataSource(data.boxes), ColumnDataSource(data.bars)
    passes = whole.quad(
        **{**quads, "line_color": "white"}, line_width=0.4, source=boxes, fill_color="colour", name=f"{name}-boxes"
    )
    passes.nonselection_glyph = None
    passes.selection_glyph = type(passes.glyph)(
        left="left", right="right", top="top", bottom="bottom", fill_color="colour", line_color="black", line_width=2
    )
    whole.quad(**quads, source=ColumnDataSource(data.shares), fill_color="colour")
    transfers = whole.quad(**quads, source=bars, fill_color="colour")
    transfers.nonselection_glyph = None
    marked = ColumnDataSource({side: np.zeros(0) for side in ("left", "right", "top", "bottom")})
    whole.quad(
        **{**quads, "line_color": "black"}, line_width=1.5, source=marked, fill_color="#FFE600", fill_alpha=0.45,
    )  # fmt: skip
    texts, units = tooltip_units("@seconds", "@moved")
    kinds = [kind for kind in CATEGORIES if data.boxes[f"share_{kind}"].max(initial=0) > 0]
    whole.add_tools(
        HoverTool(
            renderers=[passes],
            tooltips=[
                ("", "@name"), ("where", "@where"), ("begins", f"@left{{0,0.0000}} {data.unit}"),
                ("ends", f"@right{{0,0.0000}} {data.unit}"), ("takes", texts[0]),
                *((f"of it {kind}", f"@share_{kind}{{0.0 %}}") for kind in kinds),
                *([("sent inside", texts[1])] if data.boxes["moved"].max(initial=0) > 0 else []),
            ],
            formatters=units,
            name=f"{name}-hover",
        ),
        HoverTool(
            renderers=[transfers],
            tooltips=[
                ("", "@name"), ("micro-batch", "@microbatch"), ("where", "@where"),
                ("begins", f"@left{{0,0.0000}} {data.unit}"), ("ends", f"@right{{0,0.0000}} {data.unit}"),
                ("takes", texts[0]), ("bytes", texts[1]),
            ],
            formatters=units,
        ),
        TapTool(renderers=[passes]),
    )  # fmt: skip
    return whole, boxes, bars, marked


def _tool(name: str) -> Any:
    import bokeh.models

    return getattr(bokeh.models, name)


def _inside_figure(data: TimelineData, name: str) -> tuple[figure, Any]:
    """Return the picture of one pass, which a browser fills, and its source."""
    from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Range1d, WheelZoomTool
    from bokeh.transform import dodge

    columns = ("left", "right", "lane", "colour", "name", "kind", "seconds", "moved", "flops")
    source = ColumnDataSource({column: [] for column in columns})
    inside = plain_figure(
        name=f"{name}-inside",
        height=190,
        title="Choose a pass above to see its kernels",
        x_range=Range1d(0, 1),
        y_range=FactorRange(factors=["compute"]),
        x_axis_label="time since the pass began (ms)",
        tools="xpan,xbox_zoom,reset,save",
    )
    wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    inside.add_tools(wheel)
    inside.toolbar.active_scroll = wheel
    inside.toolbar.active_drag = inside.select_one({"type": _tool("BoxZoomTool")})
    inside.ygrid.visible = False
    kernels = inside.hbar(
        y=dodge("lane", 0.0, range=inside.y_range), height=0.8, left="left", right="right", source=source,
        fill_color="colour", line_color="white", line_width=0.3,
    )  # fmt: skip
    texts, units = tooltip_units("@seconds", "@moved")
    inside.add_tools(
        HoverTool(
            renderers=[kernels],
            tooltips=[
                ("", "@name"), ("kind", "@kind"), ("begins", "@left{0,0.0000} ms"), ("takes", texts[0]),
                ("bytes", texts[1]), ("FLOPs", "@flops{0.000 a}"),
            ],
            formatters=units,
        )
    )  # fmt: skip
    return inside, source
