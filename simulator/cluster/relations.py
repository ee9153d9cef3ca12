"""Relations of the devices of a node, in the words of ``nvidia-smi topo -m``."""

from __future__ import annotations

from simulator.cluster.wires import nvlinks_of, tree_of
from simulator.hardware.node import NodeSpec

LEGEND = (
    "NV#: # NVLinks (NV: a mesh or NVSwitches; XG#: xGMI); PIX: one PCIe switch; PXB: several PCIe switches; "
    "PHB: a CPU socket; SYS: two CPU sockets"
)


def device_names(node: NodeSpec) -> list[str]:
    """Return the names of GPUs, then of NICs."""
    return [f"gpu{i}" for i in range(node.gpus.count)] + [f"nic{i}" for i in range(node.nics.count)]


def relations(node: NodeSpec) -> dict[tuple[str, str], str]:
    """Return the relation of every two devices, both ways round.

    NVLink goes before PCIe. Devices without a switch in common are joined by a socket."""
    tree = tree_of(node)
    ways_up: dict[str, list[str]] = {}
    for name in device_names(node):
        way = [tree[name].at]
        while way[-1] in tree:
            way.append(tree[way[-1]].at)
        ways_up[name] = way
    by_nvlink = _by_nvlink(node)
    return {
        (a, b): by_nvlink.get((a, b)) or _by_pcie(ways_up[a], ways_up[b]) for a in ways_up for b in ways_up if a != b
    }


def _by_nvlink(node: NodeSpec) -> dict[tuple[str, str], str]:
    short = "XG" if node.nvlink.name == "xgmi" else "NV"
    joined: dict[tuple[str, str], str] = {}
    if node.nvlink.kind == "nvswitch":
        gpus = range(node.gpus.count)
        return {(f"gpu{a}", f"gpu{b}"): short for a in gpus for b in gpus if a != b}
    for bundle in nvlinks_of(node):
        a, b = (f"gpu{gpu}" for gpu in bundle.gpus)
        joined[a, b] = joined[b, a] = f"{short}{bundle.count}" if node.nvlink.kind == "links" else short
    return joined


def _by_pcie(a: list[str], b: list[str]) -> str:
    common = next((vertex for vertex in a if vertex in b), None)
    if common is None:
        return "SYS"
    if common.startswith("cpu"):
        return "PHB"
    return "PIX" if a[0] == b[0] else "PXB"
