"""How the devices of a node are joined, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.cli.terminal import console, show, table
from simulator.cluster.relations import LEGEND, device_names, relations

if TYPE_CHECKING:
    from simulator.hardware.node import NodeSpec

#: A matrix of more devices is wider than a page.
MOST_COLUMNS = 24


def show_joined(node: NodeSpec, title: str) -> None:
    """Print the matrix of ``nvidia-smi topo -m``, or that there is no room for it."""
    names = device_names(node)
    if len(names) <= MOST_COLUMNS:
        joined = relations(node)
        matrix = table([{"": a, **{b: joined.get((a, b), "X") for b in names}} for a in names], title)
        if matrix.full_width <= console().width:
            show(matrix, LEGEND)
            return
    most = f"a wide terminal shows it of up to {MOST_COLUMNS}"
    show(f"No room for how {len(names)} devices are joined: {most}.")
