"""Patterns: the loads of a collective on links, whatever its size.

An algorithm lists the hops of a group of ranks as `Moves`, one after another where it has real steps. Added up, each is
a `Shape`, the same for all groups whose members sit alike in their nodes. On the nodes of one group a shape is a
`Leg` of a `Pattern`. It holds the bytes on every link per byte of message, and the hops that the first byte
makes. `simulator.network.timing` makes it a `Phase` of a `Plan` for a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from simulator.arrays import Floats, Ints
from simulator.cluster.cluster import Cluster
from simulator.hardware.transport import TransportKind
from simulator.network.moves import KINDS, Moves
from simulator.network.plan import LinkLoads
from simulator.network.shape import Shape
from simulator.network.trunk_loads import CrossedTrunks, crossed_trunks


@dataclass(frozen=True, eq=False)
class Leg:
    """Moves on a group of ranks of a cluster, for messages of any size.

    Their reference flow is the one on the tightest link, of several on the first that is crossed. It carries
    ``flow_bytes`` per byte of message, and ``links[i]`` carries ``load[i]`` of that. ``line_s`` holds, per kind of
    link, the seconds per byte of message that its busiest link needs at line rate. ``kind`` is the transport that sets
    the pace, the last in `KINDS` that is crossed. ``hops`` and ``link_latency_s`` (of all links) are as in `Shape`.
    """

    moves: Moves
    kind: TransportKind
    links: Ints
    load: Floats
    flow_bytes: float
    line_s: tuple[tuple[TransportKind, float], ...]
    hops: tuple[tuple[TransportKind, float], ...]
    link_latency_s: float

    @property
    def loads(self) -> LinkLoads:
        """Links, and the load on each."""
        return LinkLoads(self.links, self.load)

    @cached_property
    def timing(self) -> tuple[object, ...]:
        """Everything that the time of a message on idle links depends on.

        Latencies are without their last digits, which depend on the order of a sum over hops."""
        latency = float(f"{self.link_latency_s:.12e}")
        return (self.kind, self.flow_bytes, self.line_s, self.hops, latency, self.moves.manner)


@dataclass(frozen=True, eq=False)
class Pattern:
    """An algorithm on a group of ranks of a cluster: its legs, one after another. ``sent`` is what all members
    together send, per byte of message; ``channels`` are those of the leg that has most."""

    algorithm: str
    legs: tuple[Leg, ...]
    sent: float
    channels: int

    @cached_property
    def timing(self) -> tuple[object, ...]:
        """Everything that the time of a message on idle links depends on, leg by leg."""
        return (self.algorithm, *[leg.timing for leg in self.legs])


def place_pattern(algorithm: str, shapes: Sequence[Shape], cluster: Cluster, nodes: Sequence[int]) -> Pattern:
    """Return the pattern of an algorithm from its shapes, with their node i on ``nodes[i]``."""
    return Pattern(
        algorithm=algorithm,
        legs=_placed_legs(shapes, cluster, np.array(nodes, dtype=np.int64)),
        sent=sum([shape.sent for shape in shapes]),
        channels=max([shape.moves.channels for shape in shapes]),
    )


def _placed_legs(shapes: Sequence[Shape], cluster: Cluster, nodes: Ints) -> tuple[Leg, ...]:
    """Return the legs of shapes. Each is worked out once for all nodes that are of the same kinds, one by one.

    They are alike in all that it depends on, and the trunks between them are the same. Only the links inside differ.
    """
    first_links, kinds = cluster.first_links[nodes], cluster.node_kind_column[nodes].tobytes()
    inside = [first_links[shape.inside.node] + shape.inside.position for shape in shapes]
    legs: dict[int, Leg] = {}
    for number, (shape, links) in enumerate(zip(shapes, inside, strict=True)):
        leg: Leg | None = cluster.memo.get((shape, kinds))
        if leg is not None:
            legs[number] = replace(leg, links=np.concatenate((links, leg.links[len(links) :])))
    new = [number for number in range(len(shapes)) if number not in legs]
    for number, crossed in zip(new, crossed_trunks([shapes[number] for number in new], cluster, nodes), strict=True):
        shape = shapes[number]
        cluster.memo[shape, kinds] = legs[number] = _leg(shape, cluster, inside[number], crossed)
    return tuple([legs[number] for number in range(len(shapes))])


def _leg(shape: Shape, cluster: Cluster, inside: Ints, crossed: CrossedTrunks) -> Leg:
    links = np.concatenate((inside, crossed.trunks))
    loads = np.concatenate((shape.inside.load, crossed.load))
    busy_s, longest_s = loads / cluster.bandwidths_Bps[links], np.zeros(len(KINDS))
    np.maximum.at(longest_s, cluster.kinds[links], busy_s)
    kinds = np.flatnonzero(longest_s).tolist()
    flow_bytes = float(loads[np.argmax(busy_s)])
    return Leg(
        moves=shape.moves,
        kind=KINDS[kinds[-1]],
        links=links,
        load=loads / flow_bytes,
        flow_bytes=flow_bytes,
        line_s=tuple([(KINDS[kind], float(longest_s[kind])) for kind in kinds]),
        hops=shape.hops,
        link_latency_s=crossed.latency_s,
    )
