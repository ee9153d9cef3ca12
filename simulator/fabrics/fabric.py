"""The section ``fabric`` of a cluster file: the network between nodes, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le, Len

from simulator.bounds import Bandwidth, Count, CountOrNone, Latency, Text

NetworkKind = Literal["infiniband", "roce", "tcp"]


@dataclass(frozen=True, kw_only=True)
class Sites:
    """Data centres that the nodes are spread over, in order, and the WAN link between each two of them."""

    count: Annotated[int, Ge(2), Le(1000)]
    """number of sites; it divides the number of nodes"""
    bandwidth_bps: Bandwidth
    """bits/s of a WAN link in each direction"""
    latency_s: Latency
    """seconds one way: light takes 5e-6 per km of fibre"""
    window_bytes: Annotated[float, Ge(1), Le(1e18)] | None = None
    """bytes that may be under way on a WAN link in each direction, so that it carries no more than window_bytes / (2 *
    latency_s) [null: as many as its bandwidth can use]"""


@dataclass(frozen=True, kw_only=True)
class FabricSwitch:
    """A switch of a `switch_tree`."""

    at: Text | None = None
    """the switch above it [null: none is]"""
    nodes: CountOrNone = 0
    """nodes that are cabled to it, with all their cards; they are numbered switch by switch"""
    bandwidth_Bps: Bandwidth | None = None
    """bytes/s of its link upwards, in each direction [what its links below carry, over oversubscription]"""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The network between nodes."""

    kind: str = "rail_fat_tree"
    """rail_fat_tree (card i of every node on the same leaf switches, leaves joined by spines), rail_only (rails meet in
    nodes alone), fat_tree (all cards of a node on one leaf switch), dragonfly, torus, or switch_tree (as listed)"""
    transport: NetworkKind = "infiniband"
    """what carries the bytes; the calibration profile says how well"""
    tiers: Annotated[int, Ge(1), Le(3)] = 2
    """levels of switches, 1 to 3"""
    radix: Annotated[int, Ge(2), Le(4096)] = 64
    """ports per switch"""
    oversubscription: Annotated[float, Ge(1)] = 1.0
    """bandwidth down over bandwidth up at a leaf, in whole ports: no less upwards than that; 1: none"""
    shape: Annotated[tuple[Count, ...], Len(2, 3)] | None = None
    """nodes along the axes of a torus, such as [4, 4] or [2, 4, 4]; nodes follows from it"""
    sites: Sites | None = None
    """several data centres, each with a fabric of this kind [null: one]"""
    sharp: bool = False
    """whether its switches sum up for all-reduces (InfiniBand SHARP) and NCCL is set up to use it (CollNet)"""
    switches: dict[str, FabricSwitch] = field(default_factory=dict)
    """of a switch_tree, by name"""
