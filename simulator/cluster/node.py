"""The inside of a node: its GPUs, NVLink, PCIe switches, host and NICs, and the routes between them.

Nodes of one type are alike, so that routes are worked out once per type, as positions in the node's block of links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

from simulator.cluster.device_routes import DevicePair, GpuRoutes, NicDeal, NicRoutes, Wiring
from simulator.cluster.inner_routes import Route
from simulator.cluster.wires import Edge, duplex, inner_edges
from simulator.hardware.node import NodeSpec, count_types
from simulator.hardware.transport import TransportKind

#: The vertex of a layout that stands for whatever switch a NIC is cabled to.
FABRIC = "fabric"


@dataclass(frozen=True, eq=False)
class NodeLayout:
    """Links and routes of one type of node; routes are positions in ``edges``.

    ``gpus`` and ``nics`` are the numbers of those that are there, ``types`` the type of each of ``gpus``, ``host`` the
    number of the first of the `HOST_ENDS`.
    ``edges`` holds also the NIC ports: ``port_out[k]`` and ``port_in[k]`` are the two directions of NIC k.
    ``between[a, b]`` leads from GPU a to GPU b, over NVLink where it `joins` them. ``to_nic[g, k]`` and
    ``from_nic[g, k]`` join GPU g and NIC k; ``own_nics[g]`` are the NICs that serve GPU g. Where the bandwidth of the
    host's memory is known, ``between``, ``to_nic`` and ``from_nic`` have the `HOST_ENDS` too, as further GPUs would be.
    A route is worked out when it is asked for: a node of 576 GPUs has 331,200 pairs of them.
    """

    types: tuple[str, ...]
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    host: int
    edges: tuple[Edge, ...]
    port_out: Mapping[int, int]
    port_in: Mapping[int, int]
    wiring: Wiring
    between: GpuRoutes
    to_nic: NicRoutes
    from_nic: NicRoutes
    own_nics: Mapping[int, Route]

    @property
    def gpu_text(self) -> str:
        """Text such as ``8 h100-sxm-80gb``."""
        return count_types(self.types)

    @cached_property
    def nic_of_port(self) -> dict[int, int]:
        """The NIC of each port, by its position in ``edges``."""
        return {port: nic for ports in (self.port_out, self.port_in) for nic, port in ports.items()}

    @property
    def joins_all(self) -> bool:
        """NVLink joins every GPU to every other one."""
        return self.wiring.joins_all

    def joins(self, a: int, b: int) -> bool:
        """Tell whether NVLink joins two GPUs."""
        return self.wiring.nvlink(a, b) is not None

    @property
    def links_between_gpus(self) -> list[int]:
        """The links of all routes between GPUs, in order; GPUs plugged in alike take one way to others."""
        alike: dict[object, list[int]] = {}
        for gpu in self.gpus:
            alike.setdefault(self.wiring.plug(gpu), []).append(gpu)
        pairs = [
            (a, b) for a in self.gpus for group in alike.values() for b in [gpu for gpu in group[:2] if gpu != a][:1]
        ]
        return sorted({link for a, b in pairs for link in self.between[a, b] + self.between[b, a]})

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

    wiring = Wiring(node, gpus, nics, edges)
    if dead:
        _require_ways(wiring)
    between, deal = GpuRoutes(wiring), NicDeal.in_node(wiring)
    return NodeLayout(
        types=tuple([node.gpus.by_number[g] for g in gpus]),
        gpus=gpus,
        nics=nics,
        host=node.gpus.count,
        edges=tuple(edges),
        port_out={k: wiring.position[f"nic{k}:tx"] for k in nics},
        port_in={k: wiring.position[f"nic{k}:rx"] for k in nics},
        wiring=wiring,
        between=between,
        to_nic=NicRoutes(wiring, deal, between, inward=False),
        from_nic=NicRoutes(wiring, deal, between, inward=True),
        own_nics=deal.own_nics,
    )


def _require_ways(wiring: Wiring) -> None:
    """Raise `NoWayError` where dead links leave no way between two devices, or between one and the host's memory."""
    for _ in _needed_routes(wiring):
        pass  # looking a route up raises where there is none


def _needed_routes(wiring: Wiring) -> Iterator[Route]:
    """Yield the routes that a node needs: between GPUs, between GPUs and NICs, to the host's memory and back."""
    between, pcie = GpuRoutes(wiring), wiring.over_pcie
    gpus, nics = [f"gpu{g}" for g in wiring.gpus], [f"nic{k}" for k in wiring.nics]
    yield from (between[a, b] for a, b in permutations(wiring.gpus, 2))
    yield from (pcie[gpu, nic] for gpu in gpus for nic in nics)
    yield from (pcie[nic, gpu] for gpu in gpus for nic in nics)
    if wiring.node.host_memory_bandwidth_Bps is not None:
        for device in (*gpus, *nics):
            yield wiring.to_host(device)
            yield wiring.from_host(device)
