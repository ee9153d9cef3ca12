"""Relations of the devices of a node, in the words of ``nvidia-smi topo -m``."""

from __future__ import annotations

from functools import cache

from simulator.cluster.wires import nvlinks_of, tree_of
from simulator.hardware.node import NodeSpec

LEGEND = (
    "NV#: # NVLinks (NV: a mesh or NVSwitches; XG#: xGMI); PIX: one PCIe switch; PXB: several PCIe switches; "
    "PHB: a CPU socket; SYS: two CPU sockets"
)


def device_names(node: NodeSpec) -> list[str]:
    """Return the names of GPUs, then of NICs."""
    return [f"gpu{i}" for i in range(node.gpus.count)] + [f"nic{i}" for i in range(node.nics.count)]


class DeviceRelations:
    """The relation of every two devices of a node, the same both ways round, worked out when it is asked for.

    NVLink goes before PCIe. Devices without a switch in common are joined by a socket."""

    def __init__(self, node: NodeSpec) -> None:
        tree = tree_of(node)
        self._short = "XG" if node.nvlink.name == "xgmi" else "NV"
        self._has_nvswitch = node.nvlink.kind == "nvswitch"
        self._bundles: dict[tuple[str, str], str] = {}
        for bundle in nvlinks_of(node):
            a, b = (f"gpu{gpu}" for gpu in bundle.gpus)
            links = f"{self._short}{bundle.count}" if node.nvlink.kind == "links" else self._short
            self._bundles[a, b] = self._bundles[b, a] = links
        self._ways_up: dict[str, tuple[str, ...]] = {}
        for name in device_names(node):
            way = [tree[name].at]
            while way[-1] in tree:
                way.append(tree[way[-1]].at)
            self._ways_up[name] = tuple(way)
        self._by_pcie = cache(_by_pcie)

    def __getitem__(self, ends: tuple[str, str]) -> str:
        """Return the relation of two different devices, in the words of `LEGEND`."""
        a, b = ends
        if self._has_nvswitch and a.startswith("gpu") and b.startswith("gpu"):
            return self._short
        return self._bundles.get(ends) or self._by_pcie(self._ways_up[a], self._ways_up[b])


def _by_pcie(a: tuple[str, ...], b: tuple[str, ...]) -> str:
    common = next((vertex for vertex in a if vertex in b), None)
    if common is None:
        return "SYS"
    if common.startswith("cpu"):
        return "PHB"
    return "PIX" if a[0] == b[0] else "PXB"
