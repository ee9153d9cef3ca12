"""NCCL's topology XML (NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE), and RCCL's, which has ``xgmi`` in place of ``nvlink``.

``system`` holds a ``cpu`` per NUMA node, those the tree of ``pci`` devices with their links upwards, of which some hold
a ``gpu`` with its NVLinks, or a ``nic`` with its ports, each a ``net`` (NCCL src/graph/xml.cc and topo.cc, whose
defaults and tables are cited below).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from simulator.errors import InputError
from simulator.importers import imported
from simulator.importers.imported import Device, Imported, line_rate_Bps, numbers
from simulator.importers.xml_tree import Element, parse_xml
from simulator.input_files import brief

#: PCI classes by their first digits (topo.cc, kvDictPciClass).
_GPU, _NIC, _NVSWITCH, _BRIDGE = "0x03", "0x02", "0x068000", "0x0604"
_INFINIBAND = "0x0207"
#: Vendor and device -> GPU (pci.ids).
_TYPES = {
    "0x10de:0x1db1": "v100-sxm-16gb",
    "0x10de:0x1db5": "v100-sxm-32gb",
    "0x10de:0x20b0": "a100-sxm-40gb",
    "0x10de:0x20b2": "a100-sxm-80gb",
    "0x10de:0x20b5": "a100-pcie-80gb",
    "0x10de:0x20f1": "a100-pcie-40gb",
    "0x10de:0x2330": "h100-sxm-80gb",
    "0x10de:0x2331": "h100-pcie-80gb",
    "0x10de:0x2335": "h200-sxm-141gb",
    "0x10de:0x26b9": "l40s-48gb",
    "0x10de:0x2901": "b200-sxm-180gb",
    "0x1002:0x738c": "mi100-32gb",
    "0x1002:0x740f": "mi210-64gb",
    "0x1002:0x74a1": "mi300x-192gb",
}
#: Bytes/s of one link per direction, by the GPU's generation: NVLink by compute capability, xGMI by gfx number (data
#: sheets of P100, V100, A100, A40, H100, B200; MI50, MI100, MI210, MI300X).
_NVLINK_Bps = {60: 20e9, 70: 25e9, 80: 25e9, 86: 14.0625e9, 90: 25e9, 100: 50e9}
_XGMI_Bps = {906: 46e9, 908: 46e9, 910: 50e9, 942: 64e9}
#: PCIe transfer rate of a lane -> generation, and bytes/s of a lane before generation 3, whose coding is 8b/10b.
_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_OLD_LANE_Bps = {1: 0.25e9, 2: 0.5e9}
#: Gb/s of a NIC that a PCIe link of 16 lanes holds, by generation.
_NIC_Gbps = {1: 25, 2: 50, 3: 100, 4: 200, 5: 400, 6: 800}
#: GB/s between sockets: vendor and, of Intel's family 6 and AMD's families, from which model or family on (topo.h).
_BETWEEN_SOCKETS = {
    "GenuineIntel": ((0, 6.0), (85, 10.0), (143, 22.0), (207, 40.0)),
    "AuthenticAMD": ((0, 16.0), (25, 24.0), (26, 32.0)),
}
#: Of CPUs that are in none of those: topo.h, QPI_BW.
_OTHER_SOCKETS = 6.0


@dataclass
class _Found:
    """What has been met on the way down."""

    path: Path
    tree: dict[str, Any] = field(default_factory=dict)
    gpus: list[tuple[Element, str, int]] = field(default_factory=list)
    nics: list[tuple[Element, Element | None, str, int]] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    assumed: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    switches: int = 0

    def fail(self, element: Element, message: str, **parts: Any) -> NoReturn:
        raise InputError(f"line {element.line}: <{element.tag}> {message}", file=self.path, **parts)


def read(text: str, path: Path) -> Imported:
    """Raises `InputError` with the line of what is not as NCCL writes it."""
    root = parse_xml(text, path)
    found = _Found(path)
    if root.tag != "system":
        found.fail(root, "is not the root of a topology", found=root.tag, allowed="system")
    cpus = sorted(
        (child for child in root.children if child.tag == "cpu"), key=lambda cpu: _whole(found, cpu, "numaid")
    )
    if not cpus:
        found.fail(root, "holds no cpu")
    for socket, cpu in enumerate(cpus):
        for child in cpu.children:
            _device(found, child, f"cpu{socket}", socket)
    if not found.gpus:
        found.fail(root, "holds no GPU", allowed="a pci whose class begins with 0x03, or that holds a gpu")
    gpus = sorted(found.gpus, key=lambda gpu: _order(found, gpu[0], _child(gpu[0], "gpu")))
    nics = sorted(found.nics, key=lambda nic: _order(found, nic[0], nic[1]))
    affinity = [_cpu_list(found, cpu) for cpu in cpus]
    devices = [
        Device(f"gpu{i}", pci.attributes["busid"], socket, affinity[socket]) for i, (pci, _, socket) in enumerate(gpus)
    ]
    devices += [
        Device(f"nic{i}", _net_name(pci, net), socket, affinity[socket]) for i, (pci, net, _, socket) in enumerate(nics)
    ]
    names = {key: device.name for (*_, key, _), device in zip([*gpus, *nics], devices, strict=True)}
    tree = {names.get(name, name): place for name, place in found.tree.items()}
    node: dict[str, Any] = {"gpus": {"type": _type(found, gpus), "count": len(gpus)}}
    if len(cpus) > 1:
        node["sockets"] = _sockets(found, cpus)
    nvlink = _nvlink(found, [pci for pci, _, _ in gpus])
    if nvlink:
        node["nvlink"] = nvlink
    node["pcie"] = {"generation": _usual(tree), "tree": _short(tree)}
    cluster: dict[str, Any] = {"name": path.stem, "nodes": 1, "node": node}
    if nics:
        transport = _transport(nics)
        rates = _rates_Mbps(found, nics)
        usual = Counter(rates).most_common(1)[0][0]
        node["nics"] = _nic_section(found, nics, transport, usual)
        cluster["fabric"] = {"kind": "rail_fat_tree", "transport": transport}
        found.assumed["fabric: a rail-optimised fat tree, as the file is of one node"] += 1
        others = [(k, Mbps / usual) for k, Mbps in enumerate(rates) if Mbps != usual]
        if others:
            cluster["overrides"] = [{"link": f"node*.nic{k}", "bandwidth_scale": scale} for k, scale in others]
    return Imported(
        f"NCCL topology XML, {len(cpus)} NUMA node(s)",
        cluster,
        tuple(devices),
        tuple(_counted(found.assumed)),
        tuple(_counted(found.left_out)),
    )


def _device(found: _Found, element: Element, above: str, socket: int) -> None:
    """A child of a cpu or of a pci: put it, and what is below it, into the tree."""
    if element.tag == "nic":  # without a PCI device of its own: a virtual card
        place = _link(found, element, above, known=False)
        _add_nic(found, element, element, place, socket)
        return
    if element.tag != "pci":
        found.left_out[f"<{element.tag}> at a {'socket' if above.startswith('cpu') else 'PCIe device'}"] += 1
        return
    busid, kind = _attribute(found, element, "busid").lower(), element.attributes.get("class", "").lower()
    if busid in found.lines:
        found.fail(element, f"has the bus id of line {found.lines[busid]}", found=busid, allowed="each device once")
    found.lines[busid] = element.line
    gpu, nic = _child(element, "gpu"), _child(element, "nic")
    if gpu or kind.startswith(_GPU):
        key = f"{len(found.gpus)} gpu"
        found.tree[key] = _link(found, element, above)
        found.gpus.append((element, key, socket))
    elif nic or kind.startswith(_NIC):
        _add_nic(found, element, nic, _link(found, element, above), socket)
    elif _holds_devices(element):
        name = f"pcie{found.switches}"
        found.switches += 1
        found.tree[name] = _link(found, element, above)
        for child in element.children:
            _device(found, child, name, socket)
    elif kind == _NVSWITCH:
        pass  # its NVLinks are the GPUs'
    else:
        found.left_out["empty PCIe bridge" if kind.startswith(_BRIDGE) else f"PCI device of class {kind or '?'}"] += 1


def _add_nic(found: _Found, pci: Element, nic: Element | None, place: dict[str, Any], socket: int) -> None:
    """Each port is a NIC; several ports share the card's PCIe link."""
    nets = [net for net in (nic.children if nic else ()) if net.tag == "net" and net.attributes.get("dev") != "-1"]
    if len(nets) > 1:
        name = f"pcie{found.switches}"
        found.switches += 1
        found.tree[name] = place
        place = {**place, "at": name}
    if nic and not nets:
        found.left_out["NIC without a port in use"] += 1
        return
    ports: list[Element | None] = [*nets]
    for net in ports or [None]:
        key = f"{len(found.nics)} nic"
        found.tree[key] = dict(place)
        found.nics.append((pci, net, key, socket))


def _holds_devices(element: Element) -> bool:
    return any(
        child.tag == "nic"
        or (
            child.tag == "pci"
            and (_child(child, "gpu") or _child(child, "nic") or _is_end(child) or _holds_devices(child))
        )
        for child in element.children
    )


def _is_end(pci: Element) -> bool:
    return pci.attributes.get("class", "").lower().startswith((_GPU, _NIC))


def _link(found: _Found, element: Element, above: str, known: bool = True) -> dict[str, Any]:
    """The PCIe link above a device. A rate or width that is missing is taken as NCCL does: generation 3, 16 lanes."""
    speed, width = element.attributes.get("link_speed", ""), element.attributes.get("link_width", "")
    rate = re.match(r"\s*(\d+(?:\.\d+)?)\s*GT/s", speed)
    if rate and float(rate[1]) not in _GENERATION:
        allowed = ", ".join(f"{gt:g} GT/s" for gt in _GENERATION)
        found.fail(element, "has a PCIe rate that is not known", found=brief(speed), allowed=allowed)
    generation = _GENERATION[float(rate[1])] if rate else 3
    lanes = int(width) if re.fullmatch(r"\d{1,3}", width) else 0
    if lanes and lanes not in (1, 2, 4, 8, 16):
        found.fail(element, "has an odd number of lanes", found=brief(width), allowed="1, 2, 4, 8, 16")
    if not rate or not lanes:
        text = "node.pcie.tree: PCIe 3 x16, NCCL's default, where the file gives no rate or width of the link"
        found.assumed[text if known else "node.pcie.tree: PCIe 3 x16 for a NIC that is no PCI device in the file"] += 1
    return {"at": above, "generation": generation, "lanes": lanes or 16}


def _short(tree: dict[str, Any]) -> dict[str, Any]:
    """Places as short as they can be said: what is usual is left out."""
    usual = _usual(tree)
    short: dict[str, Any] = {}
    for name, place in tree.items():
        generation, lanes = place["generation"], place["lanes"]
        said: dict[str, Any] = {"at": place["at"]}
        if generation < 3:
            said["bandwidth_Bps"] = _OLD_LANE_Bps[generation] * lanes
        else:
            said |= {"generation": generation} if generation != usual else {}
            said |= {"lanes": lanes} if lanes != 16 else {}
        short[name] = said["at"] if len(said) == 1 else said
    return short


def _usual(tree: dict[str, Any]) -> int:
    counts = Counter(place["generation"] for place in tree.values() if place["generation"] >= 3)
    return max(counts, key=lambda generation: counts[generation], default=3)


def _type(found: _Found, gpus: list[tuple[Element, str, int]]) -> str:
    pci = gpus[0][0].attributes
    known = _TYPES.get(f"{pci.get('vendor', '').lower()}:{pci.get('device', '').lower()}")
    if known is None:
        found.assumed[f"node.gpus.type: {imported.NO_TYPE}, as the file does not say what GPU it is"] += 1
    return known or imported.NO_TYPE


def _sockets(found: _Found, cpus: list[Element]) -> dict[str, Any]:
    vendor = cpus[0].attributes.get("vendor", "")
    family = _whole(found, cpus[0], "familyid", default=0)
    # Of AMD the tables are by family, which some versions write as its two parts side by side: 0x8f is 0xf + 0x8.
    number = family % 16 + family // 16 if family > 100 else family
    number = _whole(found, cpus[0], "modelid", default=0) if vendor == "GenuineIntel" else number
    GBps = _OTHER_SOCKETS
    for first, figure in _BETWEEN_SOCKETS.get(vendor, ()):
        GBps = figure if number >= first else GBps
    found.assumed[
        f"node.sockets.bandwidth_Bps: {line_rate_Bps(GBps) / 1e9:.1f} GB/s, for the {GBps:g} GB/s that NCCL counts "
        f"between {vendor or 'unnamed'} CPUs of this kind (src/graph/topo.h)"
    ] += 1
    found.assumed[f"node.sockets.latency_s: {imported.SOCKET_LATENCY_s:g} s, Intel MLC on a Xeon 8280"] += 1
    return {
        "count": len(cpus),
        "bandwidth_Bps": round(line_rate_Bps(GBps), -8),
        "latency_s": imported.SOCKET_LATENCY_s,
    }


def _nvlink(found: _Found, gpus: list[Element]) -> dict[str, Any] | None:
    """The section ``nvlink``: to a switch where the links lead to one, else from GPU to GPU."""
    number = {pci.attributes["busid"].lower(): i for i, pci in enumerate(gpus)}
    counts: dict[tuple[int, int], int] = {}
    to_switch: Counter[int] = Counter()
    name = "nvlink"
    for i, pci in enumerate(gpus):
        gpu = _child(pci, "gpu")
        for link in gpu.children if gpu else ():
            if link.tag not in ("nvlink", "xgmi"):
                found.left_out[f"<{link.tag}> of a GPU"] += 1
                continue
            name = link.tag
            target, count = _attribute(found, link, "target").lower(), _whole(found, link, "count")
            if not 1 <= count <= 1000:
                found.fail(link, "has no such number of links", found=count, allowed="1 to 1000")
            if target in number and number[target] != i:
                counts[i, number[target]] = counts.get((i, number[target]), 0) + count
            elif target in number:
                found.left_out["NVLink of a GPU to itself"] += 1
            elif link.attributes.get("tclass", "").lower() == _NVSWITCH:
                to_switch[i] += count
            else:
                found.fail(link, "leads to no GPU of this file", found=target, allowed=", ".join(number))
    if not counts and not to_switch:
        if not any(_child(pci, "gpu") for pci in gpus):
            found.assumed["node.nvlink: none; a file made for NCCL_TOPO_FILE leaves NVLinks to be found by NCCL"] += 1
        return None
    each_Bps = _per_link(found, gpus[0], name)
    found.assumed[f"node.nvlink.latency_s: {imported.NVLINK_LATENCY_s:g} s, NCCL's figure for an NVLink hop"] += 1
    section: dict[str, Any] = {"name": name} if name != "nvlink" else {}
    if to_switch:
        uneven = sorted({to_switch[i] for i in range(len(gpus))})
        if len(uneven) > 1 or counts:
            where = _child(gpus[0], "gpu") or gpus[0]
            found.fail(where, "has not as many links to NVSwitches as every other, or others too", found=uneven)
        return section | {
            "kind": "nvswitch", "bandwidth_Bps": uneven[0] * each_Bps, "latency_s": imported.NVLINK_LATENCY_s,
        }  # fmt: skip
    pairs = {tuple(sorted(pair)): count for pair, count in counts.items()}
    for a, b in pairs:
        if counts.get((a, b)) != counts.get((b, a)):
            seen = {f"gpu{a} to gpu{b}": counts.get((a, b), 0), f"gpu{b} to gpu{a}": counts.get((b, a), 0)}
            found.fail(_child(gpus[a], "gpu") or gpus[a], "has another number of links than its peer says", found=seen)
    links = [{"gpus": list(pair), "count": count} for pair, count in sorted(pairs.items())]
    return section | {
        "kind": "links",
        "bandwidth_Bps": each_Bps,
        "latency_s": imported.NVLINK_LATENCY_s,
        "links": links,
    }


def _per_link(found: _Found, pci: Element, name: str) -> float:
    gpu = _child(pci, "gpu") or pci
    key, table = ("gcn", _XGMI_Bps) if name == "xgmi" else ("sm", _NVLINK_Bps)
    # RCCL writes gfx90a and gfx94x as numbers of their own, and newer versions by name.
    digits = re.sub(r"\D", "", gpu.attributes.get(key, "").replace("gfx90a", "910")) or "0"
    generation = max((known for known in table if known <= int(digits[:4])), default=min(table))
    each_Bps = table[generation] if int(digits[:4]) else imported.NVLINK_Bps
    found.assumed[f"node.nvlink.bandwidth_Bps: {each_Bps / 1e9:g} GB/s per {name} link, by its {key} {digits}"] += 1
    return each_Bps


def _transport(nics: list[tuple[Element, Element | None, str, int]]) -> str:
    kinds: Counter[str] = Counter()
    for pci, net, _, _ in nics:
        rdma = net is None or net.attributes.get("gdr") != "0" or _net_name(pci, net).startswith("mlx")
        infiniband = pci.attributes.get("class", "").lower().startswith(_INFINIBAND)
        kinds["infiniband" if infiniband else "roce" if rdma and pci.tag == "pci" else "tcp"] += 1
    return max(kinds, key=lambda kind: kinds[kind])


def _rates_Mbps(found: _Found, nics: list[tuple[Element, Element | None, str, int]]) -> list[int]:
    rates = []
    for _, net, key, _ in nics:
        Mbps = _whole(found, net, "speed", default=0) if net else 0
        if Mbps <= 0:
            place = found.tree[key]
            Mbps = int(1000 * _NIC_Gbps[place["generation"]] * place["lanes"] / 16)
            held = f"{Mbps / 1e3:g} Gb/s, as much as its PCIe link holds"
            found.assumed[f"node.nics.bandwidth_bps: {held}, where the file gives no speed"] += 1
        rates.append(Mbps)
    return rates


def _nic_section(
    found: _Found, nics: list[tuple[Element, Element | None, str, int]], transport: str, Mbps: int
) -> dict[str, Any]:
    found.assumed[f"fabric.transport: {transport}, by the class of the NICs"] += 1
    given = [net.attributes.get("latency", "") for _, net, _, _ in nics if net]
    latency_us = max((float(text) for text in given if re.fullmatch(r"\d{1,6}(\.\d+)?", text)), default=0.0)
    if latency_us:
        latency_s = latency_us * 1e-6
    else:
        latency_s = imported.NIC_LATENCY_s[transport]
        found.assumed[f"node.nics.latency_s: {latency_s:g} s, usual of {transport} under one switch"] += 1
    return {"count": len(nics), "bandwidth_bps": Mbps * 1e6, "latency_s": latency_s}


def _net_name(pci: Element, net: Element | None) -> str:
    return (net.attributes.get("name") if net else None) or pci.attributes.get("busid", "?")


def _order(found: _Found, pci: Element, inner: Element | None) -> tuple[int, tuple[int, ...]]:
    """By the number that the file gives, or else by bus id, as nvidia-smi numbers GPUs."""
    digits = re.findall(r"[0-9a-f]+", pci.attributes.get("busid", "").lower())
    return _whole(found, inner, "dev", default=0) if inner else 0, tuple([int(part, 16) for part in digits])


def _cpu_list(found: _Found, cpu: Element) -> str:
    """The mask ``affinity``, words of 32 bits in hexadecimal, as a list of CPUs."""
    words = cpu.attributes.get("affinity", "").split(",")
    if words == [""]:
        return ""
    if not all(re.fullmatch(r"[0-9a-fA-F]{1,8}", word) for word in words):
        found.fail(
            cpu,
            "has no mask of CPUs",
            found=brief(",".join(words)),
            allowed="such as 00ffffff,0000ffff",
        )
    mask = int("".join(word.zfill(8) for word in words), 16)
    return numbers(bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def _attribute(found: _Found, element: Element, name: str) -> str:
    value = element.attributes.get(name, "")
    if not value:
        found.fail(element, f"lacks {name}")
    return value


def _whole(found: _Found, element: Element, name: str, default: int | None = None) -> int:
    value = element.attributes.get(name, "")
    if not value and default is not None:
        return default
    if not re.fullmatch(r"-?\d{1,12}", value):
        found.fail(element, f"has no whole number as {name}", found=brief(value))
    return int(value)


def _child(element: Element, tag: str) -> Element | None:
    return next((child for child in element.children if child.tag == tag), None)


def _counted(texts: Counter[str]) -> Iterator[str]:
    for text, count in texts.items():
        yield text if count == 1 else f"{text} ({count} times)"
