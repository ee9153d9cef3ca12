"""Devices of NCCL's topology XML: the PCIe tree with its GPUs and network cards, met from the sockets down."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from simulator.errors import InputError
from simulator.importers.xml_tree import Element
from simulator.input_files import brief

#: PCI classes by their first digits (NCCL src/graph/topo.cc, kvDictPciClass).
_GPU_CLASS, _NIC_CLASS, _BRIDGE_CLASS = "0x03", "0x02", "0x0604"
NVSWITCH_CLASS, INFINIBAND_CLASS = "0x068000", "0x0207"
#: PCIe transfer rate of a lane in GT/s -> generation.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
#: Bytes/s of a lane before generation 3, whose coding is 8b/10b.
_OLD_LANE_Bps = {1: 0.25e9, 2: 0.5e9}
#: Links between two devices at most.
_MOST_LINKS = 1000


@dataclass(frozen=True)
class GpuDevice:
    """A GPU: its PCI device, its key in the tree until GPUs are numbered, and its socket."""

    pci: Element
    key: str
    socket: int

    @property
    def inner(self) -> Element | None:
        """The element ``gpu`` inside the PCI device, if there is one."""
        return child(self.pci, "gpu")

    @property
    def label(self) -> str:
        """Name of the GPU in the file."""
        return self.pci.attributes["busid"]


@dataclass(frozen=True)
class NicDevice:
    """A port of a network card: its PCI device, its ``net``, its key in the tree until cards are numbered, and its
    socket."""

    pci: Element
    net: Element | None
    key: str
    socket: int

    @property
    def label(self) -> str:
        """Name of the port in the file, or else its card's bus id."""
        return (self.net.attributes.get("name") if self.net else None) or self.pci.attributes.get("busid", "?")


@dataclass
class Devices:
    """Devices of a file, as they are met.

    ``tree``: where each is plugged in, with generation and lanes of the link. ``bus_ids``: the line of each bus id.
    ``assumed`` and ``left_out``: what `Imported` says under these names, each text with how often it came up.
    """

    path: Path
    tree: dict[str, dict[str, Any]] = field(default_factory=dict)
    gpus: list[GpuDevice] = field(default_factory=list)
    nics: list[NicDevice] = field(default_factory=list)
    bus_ids: dict[str, int] = field(default_factory=dict)
    assumed: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    switches: int = 0

    def fail(self, element: Element, message: str, **parts: Any) -> NoReturn:
        """Raise `InputError` of an element, with its line."""
        raise InputError(f"line {element.line}: <{element.tag}> {message}", file=self.path, **parts)

    def attribute(self, element: Element, name: str) -> str:
        """Return an attribute that has to be there."""
        value = element.attributes.get(name, "")
        if not value:
            self.fail(element, f"lacks {name}")
        return value

    def whole(self, element: Element, name: str, default: int | None = None) -> int:
        """Return an attribute that is a whole number."""
        value = element.attributes.get(name, "")
        if not value and default is not None:
            return default
        if not re.fullmatch(r"-?\d{1,12}", value):
            self.fail(element, f"has no whole number as {name}", found=brief(value))
        return int(value)

    def link_count(self, element: Element) -> int:
        """Return how many links an element says there are."""
        count = self.whole(element, "count")
        if not 1 <= count <= _MOST_LINKS:
            self.fail(element, "has no such number of links", found=count, allowed=f"1 to {_MOST_LINKS}")
        return count

    def add(self, element: Element, above: str, socket: int) -> None:
        """Put a child of a ``cpu`` or of a ``pci``, and what is below it, into the tree."""
        if element.tag == "nic":  # without a PCI device of its own: a virtual card
            self._add_nic(element, element, self._slot(element, above, virtual=True), socket)
        elif element.tag == "pci":
            self._add_pci(element, above, socket)
        else:
            self.left_out[f"<{element.tag}> at a {'socket' if above.startswith('cpu') else 'PCIe device'}"] += 1

    def _add_pci(self, element: Element, above: str, socket: int) -> None:
        self._note_bus_id(element)
        pci_class = element.attributes.get("class", "").lower()
        nic = child(element, "nic")
        if child(element, "gpu") or pci_class.startswith(_GPU_CLASS):
            key = f"{len(self.gpus)} gpu"
            self.tree[key] = self._slot(element, above)
            self.gpus.append(GpuDevice(element, key, socket))
        elif nic or pci_class.startswith(_NIC_CLASS):
            self._add_nic(element, nic, self._slot(element, above), socket)
        elif _holds_devices(element):
            name = self._add_switch(self._slot(element, above))
            for inner in element.children:
                self.add(inner, name, socket)
        elif pci_class != NVSWITCH_CLASS:  # whose NVLinks are the GPUs'
            bridge = pci_class.startswith(_BRIDGE_CLASS)
            self.left_out["empty PCIe bridge" if bridge else f"PCI device of class {pci_class or '?'}"] += 1

    def _note_bus_id(self, element: Element) -> None:
        busid = self.attribute(element, "busid").lower()
        if busid in self.bus_ids:
            message = f"has the bus id of line {self.bus_ids[busid]}"
            self.fail(element, message, found=busid, allowed="each device once")
        self.bus_ids[busid] = element.line

    def _add_switch(self, slot: dict[str, Any]) -> str:
        name = f"pcie{self.switches}"
        self.switches += 1
        self.tree[name] = slot
        return name

    def _add_nic(self, pci: Element, nic: Element | None, slot: dict[str, Any], socket: int) -> None:
        """Add each port of a card as a NIC; several ports share the card's PCIe link."""
        nets = [net for net in (nic.children if nic else ()) if net.tag == "net" and net.attributes.get("dev") != "-1"]
        if len(nets) > 1:
            slot = {**slot, "at": self._add_switch(slot)}
        if nic and not nets:
            self.left_out["NIC without a port in use"] += 1
            return
        ports: list[Element | None] = [*nets]
        for net in ports or [None]:
            key = f"{len(self.nics)} nic"
            self.tree[key] = dict(slot)
            self.nics.append(NicDevice(pci, net, key, socket))

    def _slot(self, element: Element, above: str, virtual: bool = False) -> dict[str, Any]:
        """Return the PCIe link above a device.

        A rate or width that is missing is taken as NCCL does: generation 3, 16 lanes.
        """
        speed, width = element.attributes.get("link_speed", ""), element.attributes.get("link_width", "")
        rate = re.match(r"\s*(\d+(?:\.\d+)?)\s*GT/s", speed)
        if rate and float(rate[1]) not in _GENERATIONS:
            allowed = ", ".join(f"{rate_GTps:g} GT/s" for rate_GTps in _GENERATIONS)
            self.fail(element, "has a PCIe rate that is not known", found=brief(speed), allowed=allowed)
        lanes = int(width) if re.fullmatch(r"\d{1,3}", width) else 0
        if lanes and lanes not in (1, 2, 4, 8, 16):
            self.fail(element, "has an odd number of lanes", found=brief(width), allowed="1, 2, 4, 8, 16")
        if not rate or not lanes:
            where = "for a NIC that is no PCI device in the file"
            if not virtual:
                where = ", NCCL's default, where the file gives no rate or width of the link"
            self.assumed[f"node.pcie.tree: PCIe 3 x16{' ' if virtual else ''}{where}"] += 1
        return {"at": above, "generation": _GENERATIONS[float(rate[1])] if rate else 3, "lanes": lanes or 16}

    def order(self) -> None:
        """Sort GPUs and NICs by the numbers that the file gives, or else by bus id, as nvidia-smi numbers GPUs."""
        self.gpus.sort(key=lambda gpu: self._number(gpu.pci, gpu.inner))
        self.nics.sort(key=lambda nic: self._number(nic.pci, nic.net))

    def _number(self, pci: Element, inner: Element | None) -> tuple[int, tuple[int, ...]]:
        digits = re.findall(r"[0-9a-f]+", pci.attributes.get("busid", "").lower())
        return self.whole(inner, "dev", default=0) if inner else 0, tuple([int(part, 16) for part in digits])


def child(element: Element, tag: str) -> Element | None:
    """Return the first child with a tag."""
    return next((inner for inner in element.children if inner.tag == tag), None)


def counted_texts(texts: Counter[str]) -> Iterator[str]:
    """Yield texts, each with how often it came up where that is several times."""
    for text, count in texts.items():
        yield text if count == 1 else f"{text} ({count} times)"


def usual_generation(tree: dict[str, dict[str, Any]]) -> int:
    """Return the PCIe generation that most links of a tree have, of those from 3 on."""
    counts = Counter(slot["generation"] for slot in tree.values() if slot["generation"] >= 3)
    return max(counts, key=lambda generation: counts[generation], default=3)


def short_tree(tree: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a tree with each slot as short as it can be written: what is usual is left out."""
    usual = usual_generation(tree)
    short: dict[str, Any] = {}
    for name, slot in tree.items():
        generation, lanes = slot["generation"], slot["lanes"]
        written: dict[str, Any] = {"at": slot["at"]}
        if generation < 3:
            written["bandwidth_Bps"] = _OLD_LANE_Bps[generation] * lanes
        else:
            written |= {"generation": generation} if generation != usual else {}
            written |= {"lanes": lanes} if lanes != 16 else {}
        short[name] = written["at"] if len(written) == 1 else written
    return short


def _holds_devices(element: Element) -> bool:
    return any(inner.tag == "nic" or (inner.tag == "pci" and _leads_to_device(inner)) for inner in element.children)


def _leads_to_device(pci: Element) -> bool:
    is_end = pci.attributes.get("class", "").lower().startswith((_GPU_CLASS, _NIC_CLASS))
    return bool(child(pci, "gpu") or child(pci, "nic")) or is_end or _holds_devices(pci)
