"""How the devices of a node are joined, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.cli.terminal import table
from simulator.cluster.relations import device_names, relations

if TYPE_CHECKING:
    from rich.table import Table

    from simulator.config.node import Node

#: A matrix of more devices is wider than a page.
MOST_COLUMNS = 24


def joined_table(node: Node, title: str) -> Table:
    """The matrix of ``nvidia-smi topo -m``."""
    joined, names = relations(node), device_names(node)
    return table([{"": a, **{b: joined.get((a, b), "X") for b in names}} for a in names], title)
