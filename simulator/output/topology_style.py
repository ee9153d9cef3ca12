"""Style of cluster pictures: colours, widths, figures as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from simulator.units import GB, TB, Gbit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Okabe and Ito's colours (jfly.uni-koeln.de/color), told apart with any kind of colour vision, then shades of them.
_RAILS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8B5A2B", "#956AFF")
#: Boxes of GPUs: of one type, and of further types in a node.
GPUS = ("#E3E3E3", "#CFE3F5", "#F5DDCF", "#DDF0DD")
NVLINK, PCIE, SOCKETS, MEMORY, NETWORK, RED = "#3A9E3A", "#8A8A8A", "#4D4D4D", "#B8860B", "#3C6E9F", "#E0261B"
#: Kinds of links, their colour, and their name in the legend.
KINDS = (
    (("nvlink",), NVLINK, "GPU to GPU (NVLink, xGMI)"),
    (("pcie",), PCIE, "PCIe and sockets"),
    (("memory", "nvme"), MEMORY, "host memory, drives"),
    (("infiniband", "roce", "tcp"), NETWORK, "network, coloured by rail"),
)
#: Most kinds of node in a picture.
MOST_KINDS = 3


def rail_colour(rail: int | None) -> str:
    """Return the colour of a rail; None stands for several."""
    return NETWORK if rail is None else _RAILS[rail % len(_RAILS)]


def line_width(bandwidth_Bps: float) -> float:
    """Return a width in points; it grows with the square root, so that 10 GB/s and 1 TB/s fit into one picture.

    >>> line_width(100e9), line_width(400e9)
    (2.5, 5.0)
    """
    return min(max(0.25 * math.sqrt(bandwidth_Bps / GB), 0.5), 9.0)


def bandwidth(Bps: float) -> str:
    """Write a bandwidth with its unit.

    >>> bandwidth(31.508e9), bandwidth(6.4e12), bandwidth(450e9)
    ('31.5 GB/s', '6.4 TB/s', '450 GB/s')
    """
    if Bps >= TB:
        return f"{Bps / TB:,.3g} TB/s"
    return f"{Bps / GB:.3g} GB/s"


def port_rate(Bps: float) -> str:
    """Write the rate of a NIC as data sheets do.

    >>> port_rate(50e9)
    '400 Gb/s'
    """
    return f"{Bps / Gbit:.4g} Gb/s"


def curve(
    axes: Axes,
    a: tuple[float, float],
    b: tuple[float, float],
    bandwidth_Bps: float,
    colour: str,
    *,
    bend: float = 0.0,
    marked: bool = False,
    thin: int = 1,
) -> None:
    """Draw a line, or a curve that leaves it by ``bend`` of its length, upwards where positive.

    ``thin``: number of such lines; very many are drawn thinner.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    (x0, y0), (x1, y1) = a, b
    rise = bend * abs(x1 - x0)
    path = Path(
        [(x0, y0), (x0, y0 + rise), (x1, y1 + rise), (x1, y1)], [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    )
    if not bend:
        path = Path([(x0, y0), (x1, y1)], [Path.MOVETO, Path.LINETO])
    share = min(1.0, 40 / thin)
    width = line_width(bandwidth_Bps) * share
    if marked:
        wider = width + 7 * share
        axes.add_patch(PathPatch(path, fill=False, edgecolor=RED, linewidth=wider, alpha=0.35, capstyle="round"))
    axes.add_patch(PathPatch(path, fill=False, edgecolor=colour, linewidth=width, capstyle="round"))
