"""The parts of a fabric: switches, trunks, and the kinds that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from simulator.errors import InputError
from simulator.fabrics.fabric import Fabric

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
    """The switches of a cluster: NIC k of node i is cabled to ``leaves[i][k]``; ``trunks`` join them.

    ``top``: the switch by which traffic leaves for other sites; empty where there is none that all NICs reach.
    ``dead``: trunks that were there and carry nothing."""

    leaves: tuple[tuple[str, ...], ...]
    trunks: tuple[Trunk, ...]
    tiers: int
    top: str = ""
    dead: tuple[Trunk, ...] = ()


def nothing_wrong(fabric: Fabric) -> Iterator[InputError]:
    """Check a fabric whose keys go with each other whatever they are."""
    yield from ()


@dataclass(frozen=True)
class FabricKind:
    """A kind of fabric. ``build``: its function; ``keys``: what it reads of the section ``fabric`` that not all kinds
    do; ``check``: what is wrong with these, before anything is built (keys with the section's name)."""

    build: Callable[[Fabric, Ports], Switches]
    keys: tuple[str, ...] = ()
    check: Callable[[Fabric], Iterator[InputError]] = nothing_wrong
