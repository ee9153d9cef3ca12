"""The inside of a node: its GPUs, NVLink, PCIe switches, host and NICs, and the routes between them.

Nodes of one type are alike, so that routes are worked out once per type, as positions in the node's block of links.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count, pairwise

from simulator.cluster.wires import Edge, duplex, inner_edges, socket_name, tree_of
from simulator.errors import InputError
from simulator.hardware.node import NodeSpec, count_types
from simulator.hardware.transport import TransportKind

Route = tuple[int, ...]
#: GPUs a and b, or a GPU and a NIC.
DevicePair = tuple[int, int]


class NoWayError(InputError):
    """Dead links leave no way between two parts of a node."""


class Routes(dict[tuple[str, str], Route]):
    """Routes between vertices of a node. Raises `NoWayError` where dead links leave none."""

    def __missing__(self, ends: tuple[str, str]) -> Route:
        raise NoWayError(f"dead links leave no way from {ends[0]} to {ends[1]}")


#: The vertex of a layout that stands for whatever switch a NIC is cabled to.
FABRIC = "fabric"
#: End points of a node beside its GPUs, numbered after them (see `NodeLayout.host`). These are the host's memory, which
#: DMA reads and writes, its drives, and its CPU, whose work is bytes of that memory.
HOST_ENDS = MEMORY, NVME, CPU = range(3)


@dataclass(frozen=True, eq=False)
class NodeLayout:
    """Links and routes of one type of node; routes are positions in ``edges``.

    ``gpus`` and ``nics`` are the numbers of those that are there, ``types`` the type of each of ``gpus``, ``host`` the
    number of the first of the `HOST_ENDS`.
    ``edges`` holds also the NIC ports: ``port_out[k]`` and ``port_in[k]`` are the two directions of NIC k.
    ``between[a, b]`` leads from GPU a to GPU b, over NVLink for the pairs in ``nvlink``; ``to_nic[g, k]`` and
    ``from_nic[g, k]`` join GPU g and NIC k; ``own_nics[g]`` are the NICs that serve GPU g. Where the bandwidth of the
    host's memory is known, ``between``, ``to_nic`` and ``from_nic`` hold the `HOST_ENDS` too, as further GPUs would be.
    """

    types: tuple[str, ...]
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    host: int
    edges: tuple[Edge, ...]
    port_out: Mapping[int, int]
    port_in: Mapping[int, int]
    between: dict[DevicePair, Route]
    nvlink: frozenset[DevicePair]
    to_nic: dict[DevicePair, Route]
    from_nic: dict[DevicePair, Route]
    own_nics: Mapping[int, Route]

    @property
    def gpu_text(self) -> str:
        """Text such as ``8 h100-sxm-80gb``."""
        return count_types(self.types)

    @cached_property
    def nic_of_port(self) -> dict[int, int]:
        """The NIC of each port, by its position in ``edges``."""
        return {port: nic for ports in (self.port_out, self.port_in) for nic, port in ports.items()}

    @cached_property
    def joins_all(self) -> bool:
        """NVLink joins every GPU to every other one."""
        return len(self.nvlink) == len(self.gpus) * (len(self.gpus) - 1)

    def out(self, gpu: int, nic: int) -> Route:
        """Return the route from a GPU through a NIC's port into the fabric."""
        return (*self.to_nic[gpu, nic], self.port_out[nic])

    def back(self, nic: int, gpu: int) -> Route:
        """Return the route from the fabric through a NIC's port to a GPU."""
        return (self.port_in[nic], *self.from_nic[gpu, nic])

    def direct_Bps(self, gpus: Iterable[int]) -> dict[DevicePair, float]:
        """Return the bandwidth between GPUs of a group that have a link of their own, both ways round."""
        group = tuple(gpus)
        ways = (((a, b), self.between[a, b]) for a in group for b in group if a != b)
        return {pair: self.edges[way[0]].bandwidth_Bps for pair, way in ways if len(way) == 1}

    def meshed(self, gpus: Iterable[int]) -> bool:
        """Return whether each of these GPUs has a link of its own to each other one, all alike."""
        group = tuple(gpus)
        direct_Bps = self.direct_Bps(group)
        return len(direct_Bps) == len(group) * (len(group) - 1) and len(set(direct_Bps.values())) <= 1


def lay_out(
    node: NodeSpec, transport: TransportKind, missing: frozenset[str] = frozenset(), dead: frozenset[str] = frozenset()
) -> NodeLayout:
    """Lay out a node whose NICs speak ``transport``, without the ``missing`` ones of its GPUs and NICs (``gpu4``).

    ``dead``: names of links that are not there. Raises `NoWayError` where they leave no way.

    Between GPUs, NVLink is used where it joins them, through one GPU in between at most, as NCCL does (NVB,
    src/graph/paths.cc). Else it is PCIe, from socket to socket where they hang under different ones, and through a
    socket in any case if ``pcie.p2p`` is off. A GPU reaches a NIC that other GPUs are closer to over NVLink and the GPU
    beside that NIC, as NCCL's PXN does (NCCL 2.12 release notes). Without NVLink between the two it takes PCIe.
    """
    gpus = tuple([g for g in range(node.gpus.count) if f"gpu{g}" not in missing])
    nics = tuple([k for k in range(node.nics.count) if f"nic{k}" not in missing])
    edges = inner_edges(node)
    for k in nics:
        edges += duplex(f"nic{k}", transport, f"nic{k}", FABRIC, node.nics.bandwidth_bps / 8, node.nics.latency_s / 2)
    edges = [edge for edge in edges if edge.src not in missing and edge.dst not in missing]
    edges = [edge for edge in edges if edge.name.partition(":")[0] not in dead]

    over_pcie = _routes(edges, "pcie")
    between, nvlink = _between_gpus(node, gpus, edges, over_pcie)
    to_nic = {(g, k): over_pcie[f"gpu{g}", f"nic{k}"] for g in gpus for k in nics}
    from_nic = {(g, k): over_pcie[f"nic{k}", f"gpu{g}"] for g in gpus for k in nics}
    far = {pair: _distance(edges, route) for pair, route in to_nic.items()}
    own_nics = _deal_nics(far, gpus, nics)
    for k in nics if gpus else ():
        nearest = min(far[g, k] for g in gpus)
        proxy = next((g for g in gpus if k in own_nics[g]), None)
        if proxy is None:
            proxy = min(gpus, key=lambda g: far[g, k])
        out, back = to_nic[proxy, k], from_nic[proxy, k]
        for g in gpus:
            if far[g, k] > nearest and (g, proxy) in nvlink:
                to_nic[g, k], from_nic[g, k] = between[g, proxy] + out, back + between[proxy, g]
    position = {edge.name: i for i, edge in enumerate(edges)}
    if node.host_memory_bandwidth_Bps is not None:
        _add_host(node, gpus, nics, edges, over_pcie, between, to_nic, from_nic)
    return NodeLayout(
        types=tuple([node.gpus.by_number[g] for g in gpus]),
        gpus=gpus,
        nics=nics,
        host=node.gpus.count,
        edges=tuple(edges),
        port_out={k: position[f"nic{k}:tx"] for k in nics},
        port_in={k: position[f"nic{k}:rx"] for k in nics},
        between=between,
        nvlink=frozenset(nvlink),
        to_nic=to_nic,
        from_nic=from_nic,
        own_nics=own_nics,
    )


def _between_gpus(
    node: NodeSpec, gpus: Sequence[int], edges: list[Edge], over_pcie: Routes
) -> tuple[dict[DevicePair, Route], set[DevicePair]]:
    """Return the routes between GPUs, and the pairs whose route is NVLink."""
    over_nvlink = _routes(edges, "nvlink")
    socket = {g: _socket_of(node, f"gpu{g}") for g in gpus}
    between: dict[DevicePair, Route] = {}
    nvlink: set[DevicePair] = set()
    for a, b in ((a, b) for a in socket for b in socket if a != b):
        ends = f"gpu{a}", f"gpu{b}"
        route = over_nvlink.get(ends)
        if route and sum(edges[i].dst.startswith("gpu") for i in route) <= 2:
            between[a, b] = route
            nvlink.add((a, b))
        elif node.pcie.p2p:
            between[a, b] = over_pcie[ends]
        else:
            between[a, b] = over_pcie[ends[0], socket[b]] + over_pcie[socket[b], ends[1]]
    return between, nvlink


def _add_host(
    node: NodeSpec,
    gpus: Sequence[int],
    nics: Sequence[int],
    edges: list[Edge],
    over_pcie: Routes,
    between: dict[DevicePair, Route],
    to_nic: dict[DevicePair, Route],
    from_nic: dict[DevicePair, Route],
) -> None:
    """Add the routes from and to the host's memory: that of the socket which a GPU or NIC is plugged into."""
    memory, nvme, cpu = (node.gpus.count + end for end in HOST_ENDS)
    position = {edge.name: i for i, edge in enumerate(edges)}
    bus = (position["memory"],)

    def into(vertex: str) -> tuple[Route, Route]:
        socket = _socket_of(node, vertex)
        channels = (position[f"{socket}.memory"],) if node.sockets.count > 1 else ()
        return over_pcie[vertex, socket] + channels + bus, bus + channels + over_pcie[socket, vertex]

    for g in gpus:
        between[g, memory], between[memory, g] = into(f"gpu{g}")
    for k in nics:
        from_nic[memory, k], to_nic[memory, k] = into(f"nic{k}")
    between[memory, cpu] = bus
    if node.nvme.count:
        between[memory, nvme] = (*bus, position["nvme:tx"])
        between[nvme, memory] = (position["nvme:rx"], *bus)


def _socket_of(node: NodeSpec, vertex: str) -> str:
    """Return the socket whose PCIe tree holds a GPU, NIC or switch."""
    tree = tree_of(node)
    while vertex in tree:
        vertex = tree[vertex].at
    return socket_name(node, vertex)


def _routes(edges: list[Edge], kind: str) -> Routes:
    """Return routes of fewest links over edges of one kind, for every pair of vertices that they join.

    Of several such routes it is the one with the least time per byte."""
    position = {(edge.src, edge.dst): i for i, edge in enumerate(edges) if edge.kind == kind}
    slowest_Bps = min((edges[i].bandwidth_Bps for i in position.values()), default=1.0)
    leaving: dict[str, dict[str, float]] = {}
    for (a, b), i in position.items():
        leaving.setdefault(a, {})[b] = 1 + slowest_Bps / edges[i].bandwidth_Bps / (len(position) + 1)
        leaving.setdefault(b, {})
    return Routes(
        ((a, b), tuple(position[hop] for hop in pairwise(path)))
        for a in leaving
        for b, path in _cheapest_paths(leaving, a).items()
    )


def _cheapest_paths(leaving: Mapping[str, Mapping[str, float]], start: str) -> dict[str, tuple[str, ...]]:
    """Return the cheapest path from ``start`` to each vertex that can be reached (Dijkstra 1959), nearest ones first.

    ``leaving``: vertex -> next vertex -> cost of the edge. Of equally cheap paths it is the one that was seen first.

    >>> _cheapest_paths({"a": {"b": 1.0, "c": 5.0}, "b": {"c": 1.0}, "c": {}, "d": {"a": 1.0}}, "a")
    {'a': ('a',), 'b': ('a', 'b'), 'c': ('a', 'b', 'c')}
    """
    cheapest = {start: 0.0}
    reached: dict[str, tuple[str, ...]] = {start: (start,)}
    paths: dict[str, tuple[str, ...]] = {}
    order = count()  # equally near vertices come in the order in which they were reached
    waiting = [(0.0, next(order), start)]
    while waiting:
        total, _, vertex = heappop(waiting)
        if vertex in paths:
            continue
        paths[vertex] = reached[vertex]
        for following, cost in leaving[vertex].items():
            if following not in cheapest or total + cost < cheapest[following]:
                cheapest[following] = total + cost
                reached[following] = (*paths[vertex], following)
                heappush(waiting, (total + cost, next(order), following))
    return paths


def _distance(edges: Sequence[Edge], route: Route) -> DevicePair:
    """Return how far apart the ends of a PCIe route are: the sockets on the way, then its links.

    That is NCCL's order PIX, PXB, PHB, SYS (src/graph/topo.h)."""
    return sum(edges[i].dst.startswith(("cpu", "host")) for i in route), len(route)


def _deal_nics(far: Mapping[DevicePair, DevicePair], gpus: Sequence[int], nics: Sequence[int]) -> dict[int, Route]:
    """Return the nearest NICs of each GPU.

    GPUs equally near to the same NICs share them evenly, as NCCL spreads them. Each has several NICs where there are
    enough, else they take one in turn."""
    if not nics:
        return {}
    sharing: dict[Route, list[int]] = {}
    for g in gpus:
        nearest = min(far[g, k] for k in nics)
        sharing.setdefault(tuple([k for k in nics if far[g, k] == nearest]), []).append(g)
    nearest_nics: dict[int, Route] = {}
    for choices, group in sharing.items():
        for turn, g in enumerate(group):
            first, after = (len(choices) * i // len(group) for i in (turn, turn + 1))
            several = len(choices) > len(group)
            nearest_nics[g] = choices[first:after] if several else (choices[turn % len(choices)],)
    return nearest_nics
