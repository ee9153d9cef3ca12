"""The links inside a node, from its section of the cluster file.

Short forms (so many GPUs per switch, NVLink by kind) are first written out, as a file may do itself: what hangs where
and which GPUs are joined. Links are made from that alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from simulator.hardware.node import NodeSpec, NvLinks, PcieSlot
from simulator.hardware.transport import TransportKind

#: Bytes/s per lane and direction, after line coding: 8, 16, 32 and 64 GT/s. Coding is 128b/130b up to generation 5, and
#: flits of 242 bytes in 256 for generation 6 (PCI Express Base Specification).
PCIE_LANE_Bps = {
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
}
#: Seconds for a PCIe link one way: half of a short DMA read's round trip, 0.5 to 0.6 us. The source is Neugebauer et
#: al., Understanding PCIe performance for end host networking, SIGCOMM 2018, section 6.
PCIE_LATENCY_s = 0.27e-6
#: Seconds until a flash drive answers: a typical read of 4 KiB of a data centre drive (Samsung PM1733 data sheet).
NVME_LATENCY_s = 100e-6


@dataclass(frozen=True, slots=True)
class Edge:
    """One directed link of a node; names are without the node's own."""

    name: str
    kind: TransportKind
    src: str
    dst: str
    bandwidth_Bps: float
    latency_s: float


def inner_edges(node: NodeSpec) -> list[Edge]:
    """Return all links but the ports of NICs: NVLink, PCIe, between sockets, then the host's memory and drives."""
    return [*_nvlink(node), *_pcie(node), *_between_sockets(node), *_host(node)]


def duplex(name: str, kind: TransportKind, a: str, b: str, bandwidth_Bps: float, latency_s: float) -> list[Edge]:
    """Return both directions of a full-duplex link: ``tx`` leaves ``a``, ``rx`` enters it."""
    return [
        Edge(f"{name}:tx", kind, a, b, bandwidth_Bps, latency_s),
        Edge(f"{name}:rx", kind, b, a, bandwidth_Bps, latency_s),
    ]


def socket_name(node: NodeSpec, name: str) -> str:
    """Return the vertex of ``cpu0``, ``cpu1`` ... of a cluster file: a single socket and its memory are the host."""
    return "host" if node.sockets.count == 1 and name.startswith("cpu") else name


def tree_of(node: NodeSpec) -> Mapping[str, PcieSlot]:
    """Return ``pcie.tree``, written out where the file does not.

    GPUs are under switches in groups of ``pcie.gpus_per_switch``. Switches are dealt evenly to the sockets, NICs to the
    switches or to the sockets."""
    if node.pcie.tree:
        return node.pcie.tree
    per_switch, sockets, nics = node.pcie.gpus_per_switch or 1, node.sockets.count, node.nics.count
    switches = -(-node.gpus.count // per_switch)
    tree = {f"pcie{s}": PcieSlot(at=f"cpu{s * sockets // switches}") for s in range(switches)}
    tree |= {f"gpu{g}": PcieSlot(at=f"pcie{g // per_switch}") for g in range(node.gpus.count)}
    above, count = ("cpu", sockets) if node.nics.attach == "cpu" else ("pcie", switches)
    return tree | {f"nic{k}": PcieSlot(at=f"{above}{k * count // nics}") for k in range(nics)}


def nvlinks_of(node: NodeSpec) -> tuple[NvLinks, ...]:
    """Return ``nvlink.links``, written out where the file names a kind of which every link joins two GPUs."""
    n = node.gpus.count
    match node.nvlink.kind:
        case "mesh":
            return tuple(NvLinks(gpus=(a, b)) for a in range(n) for b in range(a + 1, n))
        case "pairs":
            return tuple(NvLinks(gpus=(a, a + 1)) for a in range(0, n, 2))
    return node.nvlink.links


def _nvlink(node: NodeSpec) -> Iterator[Edge]:
    link = node.nvlink
    if link.kind == "nvswitch":
        # The NVSwitches of a node let any two GPUs talk at full speed: one vertex, with half the latency each way.
        for g in range(node.gpus.count):
            yield from duplex(
                f"gpu{g}.{link.name}", "nvlink", f"gpu{g}", "nvswitch", link.bandwidth_Bps, link.latency_s / 2
            )
    each_Bps = link.bandwidth_Bps / max(node.gpus.count - 1, 1) if link.kind == "mesh" else link.bandwidth_Bps
    for bundle in nvlinks_of(node):
        a, b = (f"gpu{gpu}" for gpu in sorted(bundle.gpus))
        yield from duplex(f"{a}-{b}.{link.name}", "nvlink", a, b, bundle.count * each_Bps, link.latency_s)


def _pcie(node: NodeSpec) -> Iterator[Edge]:
    """Yield PCIe links. One from a switch to a socket is called ``pcie0.host``, any other ``gpu0.pcie``."""
    pcie = node.pcie
    for name, place in tree_of(node).items():
        bandwidth_Bps = place.bandwidth_Bps or (
            PCIE_LANE_Bps[place.generation or pcie.generation] * (place.lanes or pcie.lanes)
        )
        root_port = name.startswith("pcie") and place.at.startswith("cpu")
        yield from duplex(
            f"{name}.{'host' if root_port else 'pcie'}",
            "pcie",
            name,
            socket_name(node, place.at),
            bandwidth_Bps,
            PCIE_LATENCY_s,
        )


def _between_sockets(node: NodeSpec) -> Iterator[Edge]:
    """Yield a link between each two sockets. It carries PCIe traffic, and is of that kind."""
    sockets = node.sockets
    for a in range(sockets.count):
        for b in range(a + 1, sockets.count):
            yield from duplex(f"cpu{a}-cpu{b}", "pcie", f"cpu{a}", f"cpu{b}", sockets.bandwidth_Bps, sockets.latency_s)


def _host(node: NodeSpec) -> Iterator[Edge]:
    """Yield the links of the host's memory, one because reads and writes share its channels, and the drives.

    Each of several sockets has an equal part of the channels, to which devices plugged into it copy.
    """
    if node.host_memory_bandwidth_Bps is None:
        return
    sockets = node.sockets.count
    if sockets > 1:
        each_Bps = node.host_memory_bandwidth_Bps / sockets
        for i in range(sockets):
            yield Edge(f"cpu{i}.memory", "memory", f"cpu{i}", "host", each_Bps, 0.0)
    yield Edge("memory", "memory", "host", "memory", node.host_memory_bandwidth_Bps, 0.0)
    if node.nvme.count:
        write_Bps, read_Bps = node.nvme.count * node.nvme.write_Bps, node.nvme.count * node.nvme.read_Bps
        yield Edge("nvme:tx", "nvme", "host", "nvme", write_Bps, NVME_LATENCY_s)
        yield Edge("nvme:rx", "nvme", "nvme", "host", read_Bps, NVME_LATENCY_s)
