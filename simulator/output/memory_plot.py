"""Pictures of memory over a step: contents of the job's fullest GPU, in layers, and its capacity.

They are drawn without pyplot, as in `simulator.output.gantt`, and written by its `save_gantt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.analysis.time.memory_curve import memory_curve
from simulator.analysis.training.memory import RankMemory, fullest
from simulator.analysis.training.memory_contents import activation_bytes, gradient_bytes
from simulator.arrays import Floats
from simulator.output.gantt import zoom_s
from simulator.output.gantt_boxes import Picture
from simulator.timeline import Timeline
from simulator.units import GiB, format_gib, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Layers from bottom to top: one hue for static memory, another for memory that comes and goes.
LAYER_COLOURS = {
    "weights": "#1f4e79",
    "gradients": "#2e75b6",
    "optimizer": "#9dc3e6",
    "buffers": "#7f7f7f",
    "gathered": "#548235",
    "activations": "#ed7d31",
    "workspace": "#f4b183",
}
_LIMIT = "#c00000"
#: Layers below this share of the peak are left out, and out of the legend.
_VISIBLE = 1e-6
_SIZE_IN = (11.0, 4.5)


def compare_memory(jobs: Mapping[str, tuple[Timeline, tuple[RankMemory, ...]]]) -> Figure:
    """Draw the memory of several jobs below each other, under their titles (see `memory_plot`)."""
    from matplotlib.figure import Figure

    width_in, height_in = _SIZE_IN
    figure = Figure(figsize=(width_in, height_in * len(jobs)), layout="constrained", dpi=120)
    for axes, (title, job) in zip(figure.subplots(len(jobs), squeeze=False)[:, 0], jobs.items(), strict=True):
        memory_plot(*job, axes, title=title)
    return figure


def memory_plot(timeline: Timeline, memories: tuple[RankMemory, ...], ax: Axes | None = None, *, title: str) -> Figure:
    """Draw the memory of the job's fullest rank over time, GiB; into ``ax`` where given.

    Without ``ax``, a second panel shows the peak of a step that is so long that `gantt` enlarges parts of it.
    ``buffers`` are the context, NCCL, placeholders, buckets and the most bytes that the allocator has cached.
    ``gathered`` are parameters that are whole for a while under ZeRO-3, or come from the host, and gradients between
    their pass and its reduction.
    """
    shown, step = fullest(memories), timeline.step_time_s
    times, layers = memory_layers(timeline, shown)
    zooms: list[Axes] = []
    window = 0.0
    if ax is None:
        from matplotlib.figure import Figure

        window = min(zoom_s(Picture.arrange(timeline, "")), step)
        panels = 2 if window else 1
        figure = Figure(figsize=(_SIZE_IN[0], _SIZE_IN[1] * panels), layout="constrained", dpi=120)
        ax, *zooms = figure.subplots(panels, squeeze=False)[:, 0]
    _draw(shown, times, layers, ax, (0.0, step), f"{title}: rank {shown.rank}, stage {shown.stage}")
    for zoom in zooms:
        begin = min(max(shown.peak_at_s - window / 2, 0.0), step - window)
        _draw(shown, times, layers, zoom, (begin, begin + window), "around the peak")
        ax.axvspan(begin, begin + window, facecolor="none", edgecolor="black", lw=1.0, zorder=5)
    whole = ax.get_figure(root=True)
    assert whole is not None
    return whole


def memory_layers(timeline: Timeline, shown: RankMemory) -> tuple[Floats, dict[str, Floats]]:
    """Return times (s), and the bytes of each layer from each of them on."""
    curve = memory_curve(timeline, shown.rank)
    times = np.concatenate(([0.0], curve.times, [timeline.step_time_s]))
    activations = activation_bytes(timeline, curve, shown.static)
    gradients = gradient_bytes(timeline, curve, shown.static)
    gradients, gathered, activations, workspace = (
        np.concatenate(([0.0], np.maximum(column, 0.0), np.maximum(column[-1:], 0.0)))
        for column in (gradients, curve.held_bytes - activations - gradients, activations, curve.workspace_bytes)
    )
    state = shown.static.state
    constant = {
        "weights": state.weights,
        "gradients": shown.static.gradients,
        "optimizer": state.optimizer,
        "buffers": shown.buffers - shown.gathered,
    }
    layers = {name: np.full(len(times), nbytes) for name, nbytes in constant.items()}
    layers["gradients"] += gradients
    return times, layers | {"gathered": gathered, "activations": activations, "workspace": workspace}


def _draw(
    shown: RankMemory,
    times: Floats,
    layers: Mapping[str, Floats],
    ax: Axes,
    window: tuple[float, float],
    title: str,
) -> None:
    """Draw one rank's memory in a ``window`` of time, s."""
    capacity_bytes, (begin, end) = shown.capacity, window
    below = np.zeros(len(times))
    for name, colour in LAYER_COLOURS.items():
        if layers[name].max() < _VISIBLE * shown.total:
            continue
        above = below + layers[name] / GiB
        ax.fill_between(times, below, above, step="post", color=colour, label=name, linewidth=0)
        below = above
    ax.axhline(capacity_bytes / GiB, color=_LIMIT, linestyle="--", linewidth=1.2)
    above_all: dict[str, Any] = {  # as the mark of the enlarged part may cross words
        "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        "zorder": 6,
        "textcoords": "offset points",
    }
    ax.annotate(
        f"{format_gib(capacity_bytes)} on the GPU",
        (end, capacity_bytes / GiB),
        xytext=(-4, 3),
        color=_LIMIT,
        ha="right",
        va="bottom",
        **above_all,
    )
    near = 0 < capacity_bytes - shown.total < 0.1 * capacity_bytes  # words above would meet the line
    ax.plot([shown.peak_at_s], [shown.total / GiB], marker="v", color="black", markersize=7, clip_on=False)
    ax.annotate(
        f"{format_gib(shown.total)} at {format_time(shown.peak_at_s)}",
        (shown.peak_at_s, shown.total / GiB),
        xytext=(8, -20) if near else (0, 8),
        ha="left" if shown.peak_at_s < (begin + end) / 2 else "right",
        **above_all,
    )
    ax.set_xlim(begin, end)
    ax.set_ylim(0.0, 1.15 * max(capacity_bytes, shown.total) / GiB)
    ax.set_xlabel("time (s)")
    ax.set_ylabel("memory (GiB)")
    ax.set_title(title, loc="left")
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
