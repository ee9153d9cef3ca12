"""How the devices of a node are joined, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.cli.terminal import table
from simulator.cluster.relations import LEGEND, device_names, relations

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.config.node import Node

#: A matrix of more devices is wider than a page.
MOST_COLUMNS = 24


def show_joined(out: Console, node: Node, title: str) -> None:
    """Print the matrix of ``nvidia-smi topo -m``, or where the terminal is too narrow that it is."""
    from rich.measure import Measurement

    joined, names = relations(node), device_names(node)
    if len(names) > MOST_COLUMNS:
        return
    matrix = table([{"": a, **{b: joined.get((a, b), "X") for b in names}} for a in names], title)
    if Measurement.get(out, out.options.update(width=1000), matrix).maximum > out.width:
        out.print(f"No room for how {len(names)} devices are joined: a wider terminal shows it.")
        return
    out.print(matrix)
    out.print(LEGEND)
