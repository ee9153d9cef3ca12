"""How the devices of a node are joined, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.cli.terminal import console, show, table
from simulator.cluster.relations import LEGEND, DeviceRelations, device_names

if TYPE_CHECKING:
    from simulator.hardware.node import NodeSpec

#: A matrix of more devices is wider than a page.
MOST_COLUMNS = 24


def show_joined(node: NodeSpec, title: str) -> None:
    """Print the matrix of ``nvidia-smi topo -m``, or that there is no room for it."""
    names = device_names(node)
    if len(names) <= MOST_COLUMNS:
        joined = DeviceRelations(node)
        matrix = table([{"": a, **{b: "X" if a == b else joined[a, b] for b in names}} for a in names], title)
        if matrix.full_width <= console().width:
            show(matrix, LEGEND)
            return
    most = f"a wide terminal shows it of up to {MOST_COLUMNS}"
    show(f"No room for how {len(names)} devices are joined: {most}.")
