"""What a fabric is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Bytes/s of the NICs of every node.
Ports = Sequence[tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Trunk:
    """All cables from one switch (or group of spine switches) to another one, which is above it where there are tiers;
    ``bandwidth_Bps`` and ``latency_s`` (beside that of a switch) are of either direction."""

    name: str
    lower: str
    upper: str
    bandwidth_Bps: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Switches:
    """The switches of a cluster: NIC k of node i is cabled to ``leaves[i][k]``; ``trunks`` join them. ``top``: by which
    one traffic leaves for other sites; empty where there is none that all NICs reach."""

    leaves: tuple[tuple[str, ...], ...]
    trunks: tuple[Trunk, ...]
    tiers: int
    top: str = ""
