"""The section ``nvlink`` of a node, from the NVLinks (or xGMI links) of NCCL's topology XML."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from simulator.importers import imported
from simulator.importers.nccl_devices import NVSWITCH_CLASS, Devices
from simulator.importers.xml_tree import Element

#: Bytes/s of one link per direction, by the GPU's generation: NVLink by compute capability, xGMI by gfx number (data
#: sheets of P100, V100, A100, A40, H100, B200; MI50, MI100, MI210, MI300X).
_NVLINK_Bps = {60: 20e9, 70: 25e9, 80: 25e9, 86: 14.0625e9, 90: 25e9, 100: 50e9}
_XGMI_Bps = {906: 46e9, 908: 46e9, 910: 50e9, 942: 64e9}


@dataclass
class _Links:
    """Numbers of links: ``between`` GPUs, both ways, and from each GPU ``to_switch``; ``name`` of their kind."""

    between: dict[tuple[int, int], int] = field(default_factory=dict)
    to_switch: Counter[int] = field(default_factory=Counter)
    name: str = "nvlink"


def nvlink_section(devices: Devices) -> dict[str, Any] | None:
    """Return the section ``nvlink``: to a switch where the links lead to one, else from GPU to GPU; None: no links."""
    links = _count_links(devices)
    if not links.between and not links.to_switch:
        if not any(gpu.inner for gpu in devices.gpus):
            devices.assumed["node.nvlink: none; a file made for NCCL_TOPO_FILE leaves NVLinks to be found by NCCL"] += 1
        return None
    section: dict[str, Any] = {"name": links.name} if links.name != "nvlink" else {}
    each_Bps = _link_Bps(devices, links.name)
    devices.assumed[f"node.nvlink.latency_s: {imported.NVLINK_LATENCY_s:g} s, NCCL's figure for an NVLink hop"] += 1
    if links.to_switch:
        return section | {
            "kind": "nvswitch",
            "bandwidth_Bps": _links_to_switch(devices, links) * each_Bps,
            "latency_s": imported.NVLINK_LATENCY_s,
        }
    return section | imported.links_section(_links_of_pairs(devices, links), len(devices.gpus), each_Bps)


def _count_links(devices: Devices) -> _Links:
    links = _Links()
    number = {gpu.label.lower(): i for i, gpu in enumerate(devices.gpus)}
    for i, gpu in enumerate(devices.gpus):
        for link in gpu.inner.children if gpu.inner else ():
            if link.tag in ("nvlink", "xgmi"):
                links.name = link.tag
                _count_link(devices, links, link, i, number)
            else:
                devices.left_out[f"<{link.tag}> of a GPU"] += 1
    return links


def _count_link(devices: Devices, links: _Links, link: Element, i: int, number: dict[str, int]) -> None:
    """Add one element's links of GPU ``i``; ``number``: of each GPU, by bus id."""
    target, count = devices.attribute(link, "target").lower(), devices.link_count(link)
    if target in number and number[target] != i:
        pair = i, number[target]
        links.between[pair] = links.between.get(pair, 0) + count
    elif target in number:
        devices.left_out["NVLink of a GPU to itself"] += 1
    elif link.attributes.get("tclass", "").lower() == NVSWITCH_CLASS:
        links.to_switch[i] += count
    else:
        devices.fail(link, "leads to no GPU of this file", found=target, allowed=", ".join(number))


def _links_to_switch(devices: Devices, links: _Links) -> int:
    """Return the number of links from each GPU to NVSwitches."""
    counts = sorted({links.to_switch[i] for i in range(len(devices.gpus))})
    if len(counts) > 1 or links.between:
        message = "has not as many links to NVSwitches as every other, or others too"
        devices.fail(_element(devices, 0), message, found=counts)
    return counts[0]


def _links_of_pairs(devices: Devices, links: _Links) -> dict[tuple[int, int], int]:
    """Return the number of links between every two GPUs, which both must say alike."""
    pairs = {(min(pair), max(pair)): count for pair, count in links.between.items()}
    for a, b in pairs:
        there, back = links.between.get((a, b), 0), links.between.get((b, a), 0)
        if there != back:
            counts = {f"gpu{a} to gpu{b}": there, f"gpu{b} to gpu{a}": back}
            devices.fail(_element(devices, a), "has another number of links than its peer says", found=counts)
    return pairs


def _link_Bps(devices: Devices, name: str) -> float:
    """Return the bandwidth of one link by the generation of the first GPU."""
    key, table = ("gcn", _XGMI_Bps) if name == "xgmi" else ("sm", _NVLINK_Bps)
    # RCCL writes gfx90a and gfx94x as numbers of their own, and newer versions by name.
    text = _element(devices, 0).attributes.get(key, "").replace("gfx90a", "910")
    digits = re.sub(r"\D", "", text) or "0"
    generation = max((first for first in table if first <= int(digits[:4])), default=min(table))
    each_Bps = table[generation] if int(digits[:4]) else imported.NVLINK_Bps
    devices.assumed[f"node.nvlink.bandwidth_Bps: {each_Bps / 1e9:g} GB/s per {name} link, by its {key} {digits}"] += 1
    return each_Bps


def _element(devices: Devices, gpu: int) -> Element:
    return devices.gpus[gpu].inner or devices.gpus[gpu].pci
