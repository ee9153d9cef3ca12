"""Leaves, spines and core, the common parts of fat trees.

Leiserson, IEEE Trans. Comput. C-34, 1985; Al-Fares et al., SIGCOMM 2008.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simulator.errors import InputError
from simulator.fabrics.fabric import Fabric
from simulator.fabrics.switches import Trunk

#: Keys of the section ``fabric`` that fat trees read.
KEYS = ("tiers", "radix", "oversubscription")


def leaves_lead_up(fabric: Fabric) -> Iterator[InputError]:
    """Yield the error of leaves below others that keep no port upwards."""
    if fabric.tiers > 1 and fabric.oversubscription > max(fabric.radix - 1, 1):
        ratio, most = fabric.oversubscription, fabric.radix - 1
        allowed = f"<= {most}: at least one of {fabric.radix} ports leads up"
        yield InputError("leaves no port to lead up", key="fabric.oversubscription", found=ratio, allowed=allowed)


def ports_down(fabric: Fabric) -> int:
    """Return how many ports of a leaf lead to NICs.

    The others lead up: ``fabric.oversubscription`` times fewer, or as few more than that as make whole ports."""
    if fabric.tiers == 1:
        return fabric.radix
    share = fabric.oversubscription / (1 + fabric.oversubscription)
    return min(max(int(fabric.radix * share + 1e-9), 1), fabric.radix - 1)  # 7 of 12 at 1.4:1, not 6.999...


def join(
    rows: Sequence[Sequence[str]], fabric: Fabric, port_Bps: float, prefix: str = ""
) -> tuple[tuple[Trunk, ...], int, str] | None:
    """Return trunks over all leaves, in as few tiers as hold them, the number of tiers, and the switch at the top.

    The answer is None where ``fabric.tiers`` do not hold them.

    In two tiers spines join all leaves. In three a group of spines joins half a radix of leaves of one row, and the
    core joins the groups. Traffic within a row thus climbs as little as possible. The uplinks of a leaf are one link of
    their total bandwidth, and so are those of a spine group. Adaptive routing spreads the packets of each flow over
    them (InfiniBand; packet spraying on Ethernet), so that no two flows collide by chance. Spines do not block.
    """
    leaves = [leaf for row in rows for leaf in row]
    if len(leaves) == 1:
        return (), 1, leaves[0]
    radix, half = fabric.radix, fabric.radix // 2
    uplink_Bps = (radix - ports_down(fabric)) * port_Bps
    if fabric.tiers >= 2 and len(leaves) <= radix:
        spine = f"{prefix}spine0"
        return tuple(Trunk(f"{leaf}.up", leaf, spine, uplink_Bps) for leaf in leaves), 2, spine
    groups = [row[first : first + half] for row in rows for first in range(0, len(row), half)]
    if fabric.tiers < 3 or len(groups) > radix:
        return None
    spines = [f"{prefix}spine{g}" for g in range(len(groups))]
    pairs = list(zip(spines, groups, strict=True))
    over_leaves = [Trunk(f"{leaf}.up", leaf, spine, uplink_Bps) for spine, group in pairs for leaf in group]
    core = f"{prefix}core"
    over_spines = [Trunk(f"{spine}.up", spine, core, uplink_Bps * len(group)) for spine, group in pairs]
    return (*over_leaves, *over_spines), 3, core


def too_many(fabric: Fabric, nodes: int, noun: str, per_leaf: float, rows: int) -> InputError:
    """Return the error of so many nodes with ``noun``.

    ``per_leaf``: nodes that fit under a leaf of each of ``rows`` that the same spines join."""
    radix = fabric.radix
    leaves = {1: 1, 2: radix // rows, 3: radix // rows * (radix // 2)}[fabric.tiers]
    better = "a larger fabric.radix"
    return InputError(
        f"{fabric.tiers} tier(s) of {radix}-port switches do not hold {nodes} nodes with {noun}",
        key="fabric.tiers",
        found=fabric.tiers,
        allowed=f"at most {int(max(leaves, 1) * per_leaf)} nodes",
        fix=better if fabric.tiers == 3 else f"more tiers, or {better}",
    )
