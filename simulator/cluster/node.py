"""The inside of a node: its GPUs, NVLink, PCIe switches, host and NICs, and the routes between them.

Nodes of one type are alike, so that routes are worked out once per type, as positions in the node's block of links.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from simulator.config.cluster import Node
from simulator.config.transport import TransportKind

Route = tuple[int, ...]
Pair = tuple[int, int]

#: Bytes/s per lane and direction, after line coding (PCI Express Base Specification: 8, 16, 32 and 64 GT/s with
#: 128b/130b coding up to generation 5, flits of 242 bytes in 256 for generation 6).
PCIE_LANE_Bps = {
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
}
#: Seconds for a PCIe link one way: half of a short DMA read's round trip, 0.5 to 0.6 us (Neugebauer et al.,
#: Understanding PCIe performance for end host networking, SIGCOMM 2018, section 6).
PCIE_LATENCY_s = 0.27e-6
#: Seconds until a flash drive answers: a typical read of 4 KiB of a data centre drive (Samsung PM1733 data sheet).
NVME_LATENCY_s = 100e-6
#: End points of a node beside its GPUs, numbered after them (see `NodeLayout.host`): the host's memory, which DMA reads
#: and writes, its drives, and its CPU, whose work is bytes of that memory.
HOST_ENDS = MEMORY, NVME, CPU = range(3)


@dataclass(frozen=True, slots=True)
class Edge:
    """One directed link of a node; names are without the node's own."""

    name: str
    kind: TransportKind
    src: str
    dst: str
    bandwidth_Bps: float
    latency_s: float


@dataclass(frozen=True, eq=False)
class NodeLayout:
    """Links and routes of one type of node; routes are positions in ``edges``.

    ``gpus`` and ``nics`` are the numbers of those that are there, ``host`` that of the first of the `HOST_ENDS`.
    ``edges`` holds also the NIC ports: ``port_out[k]`` and ``port_in[k]`` are the two directions of NIC k.
    ``between[a, b]`` leads from GPU a to GPU b, over NVLink for the pairs in ``nvlink``; ``to_nic[g, k]`` and
    ``from_nic[g, k]`` join GPU g and NIC k; ``own_nic[g]`` is the NIC that serves GPU g. Where the bandwidth of the
    host's memory is known, ``between``, ``to_nic`` and ``from_nic`` hold the `HOST_ENDS` too, as further GPUs would be.
    """

    gpu: str
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    host: int
    edges: tuple[Edge, ...]
    port_out: Mapping[int, int]
    port_in: Mapping[int, int]
    between: dict[Pair, Route]
    nvlink: frozenset[Pair]
    to_nic: dict[Pair, Route]
    from_nic: dict[Pair, Route]
    own_nic: Mapping[int, int]

    def out(self, gpu: int, nic: int) -> Route:
        """From a GPU through a NIC's port into the fabric."""
        return (*self.to_nic[gpu, nic], self.port_out[nic])

    def back(self, nic: int, gpu: int) -> Route:
        """From the fabric through a NIC's port to a GPU."""
        return (self.port_in[nic], *self.from_nic[gpu, nic])

    def meshed(self, gpus: Iterable[int]) -> bool:
        """Whether each of these GPUs has a link of its own to each other one."""
        group = tuple(gpus)
        return all(len(self.between[a, b]) == 1 for a in group for b in group if a != b)


def lay_out(node: Node, transport: TransportKind, missing: frozenset[str] = frozenset()) -> NodeLayout:
    """Lay out a node whose NICs speak ``transport``, without the ``missing`` ones of its GPUs and NICs (``gpu4``).

    GPUs hang in groups of ``pcie.gpus_per_switch`` under PCIe switches, whose uplinks meet at the host (sockets, their
    interconnect and memory as one vertex); NICs are dealt out evenly over the switches, or sit at the host.
    Between GPUs, NVLink is used where it joins them, else PCIe (through the host if ``pcie.p2p`` is off).
    A GPU reaches a NIC that other GPUs are closer to over NVLink and the GPU beside that NIC, as NCCL's PXN does
    (NCCL 2.12 release notes), or over PCIe where the two have no NVLink.
    """
    gpus = tuple(g for g in range(node.gpus.count) if f"gpu{g}" not in missing)
    nics = tuple(k for k in range(node.nics.count) if f"nic{k}" not in missing)
    edges = _nvlink_edges(node)
    switches = -(-node.gpus.count // node.pcie.gpus_per_switch)
    pcie_Bps = PCIE_LANE_Bps[node.pcie.generation] * node.pcie.lanes
    pcie = [(f"pcie{s}.host", f"pcie{s}", "host") for s in range(switches)]
    pcie += [(f"gpu{g}.pcie", f"gpu{g}", f"pcie{g // node.pcie.gpus_per_switch}") for g in range(node.gpus.count)]
    at_switch = node.nics.attach == "pcie_switch"
    pcie += [
        (f"nic{k}.pcie", f"nic{k}", f"pcie{k * switches // node.nics.count}" if at_switch else "host")
        for k in range(node.nics.count)
    ]
    for name, lower, upper in pcie:
        edges += _duplex(name, "pcie", lower, upper, pcie_Bps, PCIE_LATENCY_s)
    edges += _host_edges(node)
    for k in range(node.nics.count):
        edges += _duplex(
            f"nic{k}", transport, f"nic{k}", "fabric", node.nics.bandwidth_bps / 8, node.nics.latency_s / 2
        )
    edges = [edge for edge in edges if edge.src not in missing and edge.dst not in missing]

    over_nvlink = _routes(edges, "nvlink")
    over_pcie = _routes(edges, "pcie")
    between: dict[Pair, Route] = {}
    nvlink: set[Pair] = set()
    for a, b in ((a, b) for a in gpus for b in gpus if a != b):
        ends = f"gpu{a}", f"gpu{b}"
        if ends in over_nvlink:
            between[a, b] = over_nvlink[ends]
            nvlink.add((a, b))
        elif node.pcie.p2p:
            between[a, b] = over_pcie[ends]
        else:
            between[a, b] = over_pcie[ends[0], "host"] + over_pcie["host", ends[1]]

    to_nic = {(g, k): over_pcie[f"gpu{g}", f"nic{k}"] for g in gpus for k in nics}
    from_nic = {(g, k): over_pcie[f"nic{k}", f"gpu{g}"] for g in gpus for k in nics}
    own_nic = _deal_nics(to_nic, gpus, nics)
    for k in nics if gpus else ():
        nearest = min(len(to_nic[g, k]) for g in gpus)
        served = [g for g in gpus if own_nic[g] == k]
        proxy = served[0] if served else min(gpus, key=lambda g: len(to_nic[g, k]))
        out, back = to_nic[proxy, k], from_nic[proxy, k]
        for g in gpus:
            if len(to_nic[g, k]) > nearest and (g, proxy) in nvlink:
                to_nic[g, k], from_nic[g, k] = between[g, proxy] + out, back + between[proxy, g]
    position = {edge.name: i for i, edge in enumerate(edges)}
    if node.host_memory_bandwidth_Bps is not None:
        memory, nvme, cpu = (node.gpus.count + end for end in HOST_ENDS)
        bus = (position["memory"],)
        for g in gpus:
            between[g, memory] = over_pcie[f"gpu{g}", "host"] + bus
            between[memory, g] = bus + over_pcie["host", f"gpu{g}"]
        for k in nics:
            to_nic[memory, k] = bus + over_pcie["host", f"nic{k}"]
            from_nic[memory, k] = over_pcie[f"nic{k}", "host"] + bus
        between[memory, cpu] = bus
        if node.nvme.count:
            between[memory, nvme] = (*bus, position["nvme:tx"])
            between[nvme, memory] = (position["nvme:rx"], *bus)
    return NodeLayout(
        gpu=node.gpus.type,
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
        own_nic=own_nic,
    )


def _duplex(name: str, kind: TransportKind, a: str, b: str, bandwidth_Bps: float, latency_s: float) -> list[Edge]:
    """Both directions of a full-duplex link: ``tx`` leaves ``a``, ``rx`` enters it."""
    return [
        Edge(f"{name}:tx", kind, a, b, bandwidth_Bps, latency_s),
        Edge(f"{name}:rx", kind, b, a, bandwidth_Bps, latency_s),
    ]


def _host_edges(node: Node) -> list[Edge]:
    """The host's memory, one link because reads and writes share its channels, and the drives."""
    if node.host_memory_bandwidth_Bps is None:
        return []
    edges = [Edge("memory", "memory", "host", "memory", node.host_memory_bandwidth_Bps, 0.0)]
    if node.nvme.count:
        write_Bps, read_Bps = node.nvme.count * node.nvme.write_Bps, node.nvme.count * node.nvme.read_Bps
        edges.append(Edge("nvme:tx", "nvme", "host", "nvme", write_Bps, NVME_LATENCY_s))
        edges.append(Edge("nvme:rx", "nvme", "nvme", "host", read_Bps, NVME_LATENCY_s))
    return edges


def _nvlink_edges(node: Node) -> list[Edge]:
    n, link = node.gpus.count, node.nvlink
    edges: list[Edge] = []
    match link.kind:
        case "nvswitch":
            # The NVSwitches of a node let any two GPUs talk at full speed: one vertex, with half the latency each way.
            for g in range(n):
                edges += _duplex(
                    f"gpu{g}.nvlink", "nvlink", f"gpu{g}", "nvswitch", link.bandwidth_Bps, link.latency_s / 2
                )
        case "mesh":
            for a in range(n):
                for b in range(a + 1, n):
                    each_Bps = link.bandwidth_Bps / (n - 1)
                    edges += _duplex(f"gpu{a}-gpu{b}.nvlink", "nvlink", f"gpu{a}", f"gpu{b}", each_Bps, link.latency_s)
        case "pairs":
            for a in range(0, n, 2):
                b = a + 1
                edges += _duplex(
                    f"gpu{a}-gpu{b}.nvlink", "nvlink", f"gpu{a}", f"gpu{b}", link.bandwidth_Bps, link.latency_s
                )
    return edges


def _routes(edges: list[Edge], kind: str) -> dict[tuple[str, str], Route]:
    """Routes of fewest links over edges of one kind, for every pair of vertices that they join."""
    position = {(edge.src, edge.dst): i for i, edge in enumerate(edges) if edge.kind == kind}
    graph = nx.DiGraph()
    graph.add_edges_from(position)
    return {
        (a, b): tuple(position[hop] for hop in pairwise(path))
        for a, paths in nx.all_pairs_shortest_path(graph)
        for b, path in paths.items()
    }


def _deal_nics(to_nic: dict[Pair, Route], gpus: tuple[int, ...], nics: tuple[int, ...]) -> dict[int, int]:
    """The nearest NIC of each GPU; GPUs equally near to the same NICs take them in turn, as NCCL spreads them."""
    if not nics:
        return {}
    taken: dict[tuple[int, ...], int] = {}
    own = {}
    for g in gpus:
        shortest = min(len(to_nic[g, k]) for k in nics)
        choices = tuple(k for k in nics if len(to_nic[g, k]) == shortest)
        turn = taken.get(choices, 0)
        taken[choices] = turn + 1
        own[g] = choices[turn % len(choices)]
    return own
