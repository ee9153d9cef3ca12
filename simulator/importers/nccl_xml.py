"""NCCL's topology XML (NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE), and RCCL's, which has ``xgmi`` in place of ``nvlink``.

``system`` holds a ``cpu`` per NUMA node, and a ``cpu`` the tree of ``pci`` devices with their links upwards. A device
may hold a ``gpu`` with its NVLinks, or a ``nic`` with its ports, each a ``net``. Defaults and tables are those of NCCL
(src/graph/xml.cc and topo.cc).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from simulator.importers import imported
from simulator.importers.imported import Device, Imported, line_rate_Bps, numbers
from simulator.importers.nccl_devices import (
    INFINIBAND_CLASS,
    Devices,
    GpuDevice,
    NicDevice,
    counted_texts,
    short_tree,
    usual_generation,
)
from simulator.importers.nccl_nvlink import nvlink_section
from simulator.importers.pci_ids import GPU_TYPES
from simulator.importers.xml_tree import Element, parse_xml
from simulator.input_files import brief

#: Gb/s of a NIC that a PCIe link of 16 lanes holds, by generation.
_NIC_Gbps = {1: 25, 2: 50, 3: 100, 4: 200, 5: 400, 6: 800}
#: GB/s between sockets: vendor and, of Intel's family 6 and AMD's families, from which model or family on (topo.h).
_BETWEEN_SOCKETS = {
    "GenuineIntel": ((0, 6.0), (85, 10.0), (143, 22.0), (207, 40.0)),
    "AuthenticAMD": ((0, 16.0), (25, 24.0), (26, 32.0)),
}
#: GB/s between sockets of any other CPU: topo.h, QPI_BW.
_OTHER_SOCKETS = 6.0


def read(text: str, path: Path) -> Imported:
    """Return the node of a file. Raises `InputError` with the line of what is not as NCCL writes it."""
    devices = Devices(path)
    cpus = _read_devices(devices, parse_xml(text, path))
    affinity = [_cpu_list(devices, cpu) for cpu in cpus]
    named: list[tuple[str, GpuDevice | NicDevice]] = [(f"gpu{i}", gpu) for i, gpu in enumerate(devices.gpus)]
    named += [(f"nic{i}", nic) for i, nic in enumerate(devices.nics)]
    names = {device.key: name for name, device in named}
    tree = {names.get(key, key): slot for key, slot in devices.tree.items()}
    node: dict[str, Any] = {"gpus": {"type": _gpu_type(devices), "count": len(devices.gpus)}}
    if len(cpus) > 1:
        node["sockets"] = _socket_section(devices, cpus)
    if nvlink := nvlink_section(devices):
        node["nvlink"] = nvlink
    node["pcie"] = {"generation": usual_generation(tree), "tree": short_tree(tree)}
    cluster: dict[str, Any] = {"name": path.stem, "nodes": 1, "node": node}
    if devices.nics:
        _add_network(devices, cluster)
    return Imported(
        f"NCCL topology XML, {len(cpus)} NUMA node(s)",
        cluster,
        tuple([Device(name, device.label, device.socket, affinity[device.socket]) for name, device in named]),
        tuple(counted_texts(devices.assumed)),
        tuple(counted_texts(devices.left_out)),
    )


def _read_devices(devices: Devices, root: Element) -> list[Element]:
    """Put everything below the root into ``devices``, and return the ``cpu`` elements in order."""
    if root.tag != "system":
        devices.fail(root, "is not the root of a topology", found=root.tag, allowed="system")
    cpus = sorted((cpu for cpu in root.children if cpu.tag == "cpu"), key=lambda cpu: devices.whole(cpu, "numaid"))
    if not cpus:
        devices.fail(root, "holds no cpu")
    for socket, cpu in enumerate(cpus):
        for element in cpu.children:
            devices.add(element, f"cpu{socket}", socket)
    if not devices.gpus:
        devices.fail(root, "holds no GPU", allowed="a pci whose class begins with 0x03, or that holds a gpu")
    devices.order()
    return cpus


def _gpu_type(devices: Devices) -> str:
    pci = devices.gpus[0].pci.attributes
    gpu_type = GPU_TYPES.get(f"{pci.get('vendor', '').lower()}:{pci.get('device', '').lower()}")
    if gpu_type is None:
        devices.assumed[f"node.gpus.type: {imported.NO_TYPE}, as the file does not say what GPU it is"] += 1
    return gpu_type or imported.NO_TYPE


def _socket_section(devices: Devices, cpus: list[Element]) -> dict[str, Any]:
    vendor = cpus[0].attributes.get("vendor", "")
    family = devices.whole(cpus[0], "familyid", default=0)
    # AMD's tables are by family, which some versions write as its two parts side by side: 0x8f is 0xf + 0x8.
    number = family % 16 + family // 16 if family > 100 else family
    number = devices.whole(cpus[0], "modelid", default=0) if vendor == "GenuineIntel" else number
    bandwidth_GBps = _OTHER_SOCKETS
    for first, figure in _BETWEEN_SOCKETS.get(vendor, ()):
        bandwidth_GBps = figure if number >= first else bandwidth_GBps
    line_Bps = line_rate_Bps(bandwidth_GBps)
    devices.assumed[
        f"node.sockets.bandwidth_Bps: {line_Bps / 1e9:.1f} GB/s, for the {bandwidth_GBps:g} GB/s that NCCL counts "
        f"between {vendor or 'unnamed'} CPUs of this kind (src/graph/topo.h)"
    ] += 1
    devices.assumed[f"node.sockets.latency_s: {imported.SOCKET_LATENCY_s:g} s, Intel MLC on a Xeon 8280"] += 1
    return {"count": len(cpus), "bandwidth_Bps": round(line_Bps, -8), "latency_s": imported.SOCKET_LATENCY_s}


def _add_network(devices: Devices, cluster: dict[str, Any]) -> None:
    """Add the sections of network cards and of the fabric, and what single cards differ in."""
    transport = _transport(devices)
    rates = _rates_Mbps(devices)
    usual = Counter(rates).most_common(1)[0][0]
    cluster["node"]["nics"] = _nic_section(devices, transport, usual)
    cluster["fabric"] = {"kind": "rail_fat_tree", "transport": transport}
    devices.assumed["fabric: a rail-optimised fat tree, as the file is of one node"] += 1
    unusual = [(k, rate / usual) for k, rate in enumerate(rates) if rate != usual]
    if unusual:
        cluster["overrides"] = [{"link": f"node*.nic{k}", "bandwidth_scale": scale} for k, scale in unusual]


def _transport(devices: Devices) -> str:
    """Return the kind of network that most NICs are of."""
    kinds: Counter[str] = Counter()
    for nic in devices.nics:
        rdma = nic.net is None or nic.net.attributes.get("gdr") != "0" or nic.label.startswith("mlx")
        infiniband = nic.pci.attributes.get("class", "").lower().startswith(INFINIBAND_CLASS)
        kinds["infiniband" if infiniband else "roce" if rdma and nic.pci.tag == "pci" else "tcp"] += 1
    return max(kinds, key=lambda kind: kinds[kind])


def _rates_Mbps(devices: Devices) -> list[int]:
    """Return the speed of every NIC, in Mb/s."""
    rates = []
    for nic in devices.nics:
        rate = devices.whole(nic.net, "speed", default=0) if nic.net else 0
        if rate <= 0:
            slot = devices.tree[nic.key]
            rate = int(1000 * _NIC_Gbps[slot["generation"]] * slot["lanes"] / 16)
            bandwidth = f"{rate / 1e3:g} Gb/s, as much as its PCIe link holds"
            devices.assumed[f"node.nics.bandwidth_bps: {bandwidth}, where the file gives no speed"] += 1
        rates.append(rate)
    return rates


def _nic_section(devices: Devices, transport: str, rate_Mbps: int) -> dict[str, Any]:
    devices.assumed[f"fabric.transport: {transport}, by the class of the NICs"] += 1
    texts = [nic.net.attributes.get("latency", "") for nic in devices.nics if nic.net]
    latency_us = max((float(text) for text in texts if re.fullmatch(r"\d{1,6}(\.\d+)?", text)), default=0.0)
    if latency_us:
        latency_s = latency_us * 1e-6
    else:
        latency_s = imported.NIC_LATENCY_s[transport]
        devices.assumed[f"node.nics.latency_s: {latency_s:g} s, usual of {transport} under one switch"] += 1
    return {"count": len(devices.nics), "bandwidth_bps": rate_Mbps * 1e6, "latency_s": latency_s}


def _cpu_list(devices: Devices, cpu: Element) -> str:
    """Return the mask ``affinity``, words of 32 bits in hexadecimal, as a list of CPUs."""
    words = cpu.attributes.get("affinity", "").split(",")
    if words == [""]:
        return ""
    if not all(re.fullmatch(r"[0-9a-fA-F]{1,8}", word) for word in words):
        devices.fail(cpu, "has no mask of CPUs", found=brief(",".join(words)), allowed="such as 00ffffff,0000ffff")
    mask = int("".join(word.zfill(8) for word in words), 16)
    return numbers(bit for bit in range(mask.bit_length()) if mask >> bit & 1)
