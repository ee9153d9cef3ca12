"""The measured and the simulated step one above the other, on one time axis and in the same colours.

A step has more kernels than a picture has columns. So each column shows the share of its time that each class of
kernels runs: a full column is a busy GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calibration.compare.kernels import KernelColumns, binned
from calibration.compare.pictures import new_figure
from simulator.arrays import Floats
from simulator.output.stream_gantt import CLASS_COLOUR, IDLE_COLOUR
from simulator.traces.classes import CLASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COMPUTE = ("matmul", "attention", "memory", "optimizer", "copy")
_MOVES = ("communication", "hand-over")
_BINS = 800
#: Of a rank's row: where computation and communication are drawn.
_SPLIT, _TOP = 0.3, 0.92
#: Ranks drawn; more are alike.
_RANKS = 8


def draw(name: str, measured: KernelColumns, simulated: KernelColumns) -> Figure:
    """The picture of run ``name``: of both a row per rank, of computation, and below it communication."""
    from matplotlib.patches import Patch

    ranks = np.unique(measured.rank)[:_RANKS].tolist()
    ends = [float(kernels.end_s.max(initial=0.0)) for kernels in (measured, simulated)]
    edges = np.linspace(0.0, max(ends), _BINS + 1)
    figure = new_figure(13.0, 1.3 + 2 * (0.35 + 0.42 * max(len(ranks), 2)))
    panels = figure.subplots(2, 1, sharex=True)
    for axes, side, kernels, end in zip(panels, ("measured", "simulated"), (measured, simulated), ends, strict=True):
        _panel(axes, kernels, ranks, edges, end)
        axes.set_title(f"{name}: {side}, {end * 1e3:.1f} ms on the GPU", loc="left", fontsize=10)
    panels[1].set_xlabel("time, ms", fontsize=9)
    drawn = [c for c in CLASS_COLOUR if CLASSES.index(c) in np.concatenate((measured.code, simulated.code))]
    handles = [Patch(facecolor=CLASS_COLOUR[c], label=c) for c in drawn] + [Patch(facecolor=IDLE_COLOUR, label="idle")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def _panel(axes: Axes, kernels: KernelColumns, ranks: list[int], edges: Floats, end: float) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle

    milliseconds = edges * 1e3
    boxes: list[Floats] = []
    colours: list[str] = []
    for place, rank in enumerate(ranks):
        bottom = len(ranks) - 1 - place
        axes.add_patch(Rectangle((0, bottom + _SPLIT), end * 1e3, _TOP - _SPLIT, color=IDLE_COLOUR, lw=0))
        for group, low, high in ((_COMPUTE, _SPLIT, _TOP), (_MOVES, 0.0, _SPLIT - 0.04)):
            shares = binned(kernels, rank, [CLASSES.index(c) for c in group], edges)
            shares /= np.maximum(shares.sum(axis=0), 1.0)
            tops = bottom + low + (high - low) * np.cumsum(shares, axis=0)
            for top, share, c in zip(tops, shares, group, strict=True):
                some = share > 0
                y1 = top[some]
                y0 = y1 - (high - low) * share[some]
                x0, x1 = milliseconds[:-1][some], milliseconds[1:][some]
                corners = ((x0, y0), (x1, y0), (x1, y1), (x0, y1))
                boxes.append(np.stack([np.stack(corner, -1) for corner in corners], 1))
                colours += [CLASS_COLOUR[c]] * len(y1)
    drawn = PolyCollection(list(np.concatenate(boxes)), facecolors=colours, edgecolors="none", antialiaseds=False)
    axes.add_collection(drawn, autolim=False)
    axes.set(xlim=(0, milliseconds[-1]), ylim=(-0.05, len(ranks)))
    axes.set_yticks([len(ranks) - 0.5 - place for place in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
