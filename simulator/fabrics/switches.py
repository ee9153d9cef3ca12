"""What a fabric is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trunk:
    """All cables from one switch (or group of spine switches) to the tier above, in one direction each way."""

    lower: str
    upper: str
    bandwidth_Bps: float


@dataclass(frozen=True)
class Switches:
    """The switches of a cluster: NIC k of node i is cabled to ``leaves[i][k]``; ``trunks`` lead from there upwards."""

    leaves: tuple[tuple[str, ...], ...]
    trunks: tuple[Trunk, ...]
    tiers: int

    def leaf(self, node: int, nic: int) -> str:
        return self.leaves[node][nic]
