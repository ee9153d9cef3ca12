"""Style of the pictures on a page, and how figures are written in what appears under the pointer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bokeh.models import CustomJSHover
    from bokeh.plotting import figure

INK, FAINT = "#1F2933", "#D5DAE0"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

_SECONDS = """
const [size, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"]
return `${(value / size).toFixed(2)} ${unit}`
"""
_BYTES = """
if (!(value > 0)) return "none"
const [size, unit] = value >= 1e9 ? [1e9, "GB"] : value >= 1e6 ? [1e6, "MB"] : value >= 1e3 ? [1e3, "kB"] : [1, "B"]
return `${(value / size).toFixed(2)} ${unit}`
"""


def plain_figure(**options: Any) -> figure:
    """Return a figure as wide as the page, without a frame, its tools above it."""
    from bokeh.plotting import figure

    picture = figure(sizing_mode="stretch_width", toolbar_location="above", min_width=280, **options)
    picture.toolbar.logo = None
    picture.outline_line_color = None
    picture.background_fill_color = picture.border_fill_color = "white"
    picture.title.text_color = INK
    picture.title.text_font = FONT
    picture.title.text_font_size = "14px"
    for axis in (*picture.xaxis, *picture.yaxis):
        axis.axis_line_color = axis.major_tick_line_color = FAINT
        axis.minor_tick_line_color = None
        axis.major_label_text_color = axis.axis_label_text_color = INK
        axis.major_label_text_font = axis.axis_label_text_font = FONT
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
    picture.grid.grid_line_color = FAINT
    picture.grid.grid_line_alpha = 0.6
    return picture


def seconds_text() -> CustomJSHover:
    """Return what writes seconds in a tooltip in a fitting unit."""
    from bokeh.models import CustomJSHover

    return CustomJSHover(code=_SECONDS)


def bytes_text() -> CustomJSHover:
    """Return what writes bytes in a tooltip in a fitting unit."""
    from bokeh.models import CustomJSHover

    return CustomJSHover(code=_BYTES)
