"""The torus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from simulator.errors import InputError
from simulator.fabrics.fabric import Fabric
from simulator.fabrics.switches import FabricKind, Ports, Switches, Trunk

AXES = "xyz"


def torus(fabric: Fabric, ports: Ports) -> Switches:
    """Build a torus of nodes joined by their ports: a grid of ``fabric.shape`` nodes, the last number running fastest.

    Each node is joined to its neighbours in either direction of every axis, and the ends of an axis to each other.
    There are no other switches. Messages pass through a node without its NICs' way to its GPUs.

    The bandwidth of a node's NICs is divided evenly among its directions; two nodes that are neighbours on both sides
    have the cables of both. Messages go the shortest way; several such ways share them (adaptive minimal routing, as
    in Cray's Gemini and IBM's Blue Gene). Outside traffic enters at the first node.

    Raises `InputError` where the shape is not that of the nodes.
    """
    shape = fabric.shape or ()
    if math.prod(shape) != len(ports):
        raise InputError(
            f"a torus of {' x '.join(map(str, shape)) or 'no shape'} does not have {len(ports)} nodes",
            key="fabric.shape",
            found=list(shape),
            allowed=f"two or three numbers whose product is {len(ports)}",
        )
    places = list(product(*map(range, shape)))
    routers = {place: "torus" + ".".join(map(str, place)) for place in places}
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    each_Bps = {place: sum(nics) / (2 * max(len(axes), 1)) for place, nics in zip(places, ports, strict=True)}
    trunks = []
    for place in places:
        for axis in axes:
            size = shape[axis]
            beside = (*place[:axis], (place[axis] + 1) % size, *place[axis + 1 :])
            if size == 2 and place[axis] == 1:
                continue
            cables = 2 if size == 2 else 1
            bandwidth_Bps = cables * min(each_Bps[place], each_Bps[beside])
            trunks.append(Trunk(f"{routers[place]}.{AXES[axis]}", routers[place], routers[beside], bandwidth_Bps))
    leaves = tuple([(routers[place],) * len(nics) for place, nics in zip(places, ports, strict=True)])
    return Switches(leaves, tuple(trunks), 0, routers[places[0]])


def _has_shape(fabric: Fabric) -> Iterator[InputError]:
    if not fabric.shape:
        yield InputError("must be given for a torus", key="fabric.shape", allowed="such as [4, 4]")


KIND = FabricKind(torus, ("shape",), _has_shape)
