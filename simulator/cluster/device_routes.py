"""Routes between the devices of a node: its GPUs, NICs, and host; each is worked out when somebody asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from simulator.cluster.inner_routes import InnerRoutes, Route
from simulator.cluster.wires import Edge, socket_name, tree_of
from simulator.hardware.node import NodeSpec

#: GPUs a and b, or a GPU and a NIC.
DevicePair = tuple[int, int]
#: Of a route over PCIe: sockets on the way, and links.
Distance = tuple[int, int]
#: End points of a node beside its GPUs, numbered after them (see `NodeLayout.host`). These are the host's memory, which
#: DMA reads and writes, its drives, and its CPU, whose work is bytes of that memory.
HOST_ENDS = MEMORY, NVME, CPU = range(3)


class KeptRoutes:
    """Routes by pair of devices, each kept once it was worked out."""

    def __init__(self) -> None:
        self._kept: dict[DevicePair, Route] = {}

    def __getitem__(self, ends: DevicePair) -> Route:
        """Return the route from the first device to the second."""
        route = self._kept.get(ends)
        if route is None:
            route = self._kept[ends] = self._route(*ends)
        return route

    def _route(self, a: int, b: int) -> Route:
        """Return the route from ``a`` to ``b``."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Wiring:
    """The ``edges`` of a node, and the numbers of its ``gpus`` and ``nics`` that are there."""

    node: NodeSpec
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    edges: Sequence[Edge]

    @cached_property
    def over_nvlink(self) -> InnerRoutes:
        """Routes over NVLink."""
        return InnerRoutes(self.edges, "nvlink")

    @cached_property
    def over_pcie(self) -> InnerRoutes:
        """Routes over PCIe, and from socket to socket."""
        return InnerRoutes(self.edges, "pcie")

    @cached_property
    def position(self) -> dict[str, int]:
        """The position of every edge by its name."""
        return {edge.name: i for i, edge in enumerate(self.edges)}

    @cached_property
    def socket_of(self) -> dict[str, str]:
        """The socket whose PCIe tree holds each GPU, NIC or switch."""
        tree = tree_of(self.node)
        sockets: dict[str, str] = {}
        for vertex in tree:
            way = [vertex]
            while way[-1] in tree and way[-1] not in sockets:
                way.append(tree[way[-1]].at)
            socket = sockets.get(way[-1]) or socket_name(self.node, way[-1])
            sockets |= dict.fromkeys(way[:-1], socket)
        return sockets

    def nvlink(self, a: int, b: int) -> Route | None:
        """Return the route between two GPUs over NVLink, with one GPU in between at most; None where there is none."""
        route = self.over_nvlink.between(f"gpu{a}", f"gpu{b}")
        return route if route and sum(self.edges[i].dst.startswith("gpu") for i in route) <= 2 else None

    def plug(self, gpu: int) -> tuple[str, str, str]:
        """Return what GPUs share whose routes differ in their first or last link alone: neighbours and socket."""
        name = f"gpu{gpu}"
        return self.over_nvlink.above(name), self.over_pcie.above(name), self.socket_of[name]

    @cached_property
    def joins_all(self) -> bool:
        """NVLink joins every GPU to every other one; GPUs with the same single neighbour are joined alike."""
        members: dict[str, list[int]] = {}
        for gpu in self.gpus:
            members.setdefault(self.over_nvlink.above(f"gpu{gpu}"), []).append(gpu)
        groups = list(members.values())
        inside = ((group[0], group[1]) for group in groups if len(group) > 1)
        across = ((a[0], b[0]) for a in groups for b in groups if a is not b)
        return all(self.nvlink(a, b) for pairs in (inside, across) for a, b in pairs)

    def to_host(self, device: str) -> Route:
        """Return the route from a GPU or NIC through its socket to the memory of the host."""
        socket = self.socket_of[device]
        return self.over_pcie[device, socket] + self._channels(socket) + (self.position["memory"],)

    def from_host(self, device: str) -> Route:
        """Return the route from the memory of the host to a GPU or NIC."""
        socket = self.socket_of[device]
        return (self.position["memory"],) + self._channels(socket) + self.over_pcie[socket, device]

    def _channels(self, socket: str) -> Route:
        """Return the link of a socket's channels of memory, where there are several sockets."""
        return (self.position[f"{socket}.memory"],) if self.node.sockets.count > 1 else ()


class GpuRoutes(KeptRoutes):
    """Routes between GPUs: NVLink where it joins them, else PCIe. The ends of the host are further GPUs."""

    def __init__(self, wiring: Wiring) -> None:
        super().__init__()
        self._wiring = wiring

    def _route(self, a: int, b: int) -> Route:
        wiring, node = self._wiring, self._wiring.node
        if max(a, b) >= node.gpus.count:
            return self._host_route(a, b)
        ends = f"gpu{a}", f"gpu{b}"
        if route := wiring.nvlink(a, b):
            return route
        if node.pcie.p2p:
            return wiring.over_pcie[ends]
        socket = wiring.socket_of[ends[1]]
        return wiring.over_pcie[ends[0], socket] + wiring.over_pcie[socket, ends[1]]

    def _host_route(self, a: int, b: int) -> Route:
        """Return the route between a GPU and the host's memory, or between two ends of the host."""
        wiring, first = self._wiring, self._wiring.node.gpus.count
        memory, nvme, cpu = (first + end for end in HOST_ENDS)
        if a < first and b == memory:
            return wiring.to_host(f"gpu{a}")
        if b < first and a == memory:
            return wiring.from_host(f"gpu{b}")
        names = {
            (memory, cpu): ("memory",),
            (memory, nvme): ("memory", "nvme:tx"),
            (nvme, memory): ("nvme:rx", "memory"),
        }
        return tuple([wiring.position[name] for name in names[a, b]])


@dataclass(frozen=True, eq=False)
class NicDeal:
    """The NICs that serve each GPU, and the GPU through which others reach a NIC.

    ``proxy[k]`` is that GPU of NIC k, and ``nearest[k]`` the distance of the GPUs that reach it over PCIe.
    """

    wiring: Wiring
    own_nics: Mapping[int, Route]
    proxy: Mapping[int, int]
    nearest: Mapping[int, Distance]

    @classmethod
    def in_node(cls, wiring: Wiring) -> NicDeal:
        """Deal out the NICs of a node.

        GPUs below one switch are as far from any NIC, and NICs below one switch from any GPU: one of each is looked at.
        """
        gpus, nics, above = wiring.gpus, wiring.nics, wiring.over_pcie.above
        first_gpu = {above(f"gpu{g}"): g for g in reversed(gpus)}
        own_nics = _deal_nics(wiring, first_gpu) if nics else {}
        owner = {nic: gpu for gpu in reversed(gpus) for nic in own_nics.get(gpu, ())}
        by_switch: dict[str, tuple[Distance, int]] = {}
        proxy, nearest = dict[int, int](), dict[int, Distance]()
        for nic in nics if gpus else ():
            switch = above(f"nic{nic}")
            if switch not in by_switch:
                by_switch[switch] = min((distance(wiring, gpu, nic), gpu) for gpu in first_gpu.values())
            nearest[nic], closest = by_switch[switch]
            proxy[nic] = owner.get(nic, closest)
        return cls(wiring, own_nics, proxy, nearest)

    def proxy_of(self, gpu: int, nic: int) -> int | None:
        """Return the GPU through which another reaches a NIC over NVLink; None where it takes PCIe."""
        proxy = self.proxy[nic]
        is_far = gpu != proxy and distance(self.wiring, gpu, nic) > self.nearest[nic]
        return proxy if is_far and self.wiring.nvlink(gpu, proxy) else None


class NicRoutes(KeptRoutes):
    """Routes from GPUs to NICs, or ``inward`` ones back, over another GPU where that is nearer to the NIC."""

    def __init__(self, wiring: Wiring, deal: NicDeal, between: GpuRoutes, *, inward: bool) -> None:
        super().__init__()
        self._wiring, self._deal, self._between, self._inward = wiring, deal, between, inward

    def _route(self, a: int, b: int) -> Route:
        wiring, pcie = self._wiring, self._wiring.over_pcie
        name = f"nic{b}"
        if a >= wiring.node.gpus.count:
            return wiring.to_host(name) if self._inward else wiring.from_host(name)
        proxy = self._deal.proxy_of(a, b)
        beside = f"gpu{a if proxy is None else proxy}"
        if self._inward:
            return pcie[name, beside] + (() if proxy is None else self._between[proxy, a])
        return (() if proxy is None else self._between[a, proxy]) + pcie[beside, name]


def distance(wiring: Wiring, gpu: int, nic: int) -> Distance:
    """Return how far apart a GPU and a NIC are over PCIe: the sockets on the way, then the links.

    That is NCCL's order PIX, PXB, PHB, SYS (src/graph/topo.h)."""
    route = wiring.over_pcie[f"gpu{gpu}", f"nic{nic}"]
    return sum(wiring.edges[i].dst.startswith(("cpu", "host")) for i in route), len(route)


def _deal_nics(wiring: Wiring, first_gpu: Mapping[str, int]) -> dict[int, Route]:
    """Return the nearest NICs of each GPU. ``first_gpu``: one GPU for all below a switch.

    GPUs equally near to the same NICs share them evenly, as NCCL spreads them. Each has several NICs where there are
    enough, else they take one in turn."""
    above = wiring.over_pcie.above
    below: dict[str, list[int]] = {}
    for nic in wiring.nics:
        below.setdefault(above(f"nic{nic}"), []).append(nic)
    choices_of: dict[str, Route] = {}
    for switch, gpu in first_gpu.items():
        far = [(distance(wiring, gpu, alike[0]), alike) for alike in below.values()]
        nearest = min(one for one, _ in far)
        choices_of[switch] = tuple(sorted(nic for one, alike in far if one == nearest for nic in alike))
    sharing: dict[Route, list[int]] = {}
    for gpu in wiring.gpus:
        sharing.setdefault(choices_of[above(f"gpu{gpu}")], []).append(gpu)
    nearest_nics: dict[int, Route] = {}
    for choices, group in sharing.items():
        for turn, gpu in enumerate(group):
            first, after = (len(choices) * i // len(group) for i in (turn, turn + 1))
            several = len(choices) > len(group)
            nearest_nics[gpu] = choices[first:after] if several else (choices[turn % len(choices)],)
    return nearest_nics
