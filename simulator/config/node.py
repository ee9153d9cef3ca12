"""The section ``node`` of a cluster file: what is inside a machine, and what joins it.

The usual boxes are said in a few numbers (GPUs per PCIe switch, NVLink by kind); any other one by listing what hangs
where (``pcie.tree``) and which GPUs are bridged (``nvlink.links``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from simulator.config.section import AsTuple, Integral, Section, Text
from simulator.errors import InputError
from simulator.input_files import closest

MAX_GPUS = 1_000_000
#: Of a link, in the unit of its key; 0 where there is none.
MIN_BANDWIDTH = 1_000

Count = Annotated[int, Field(ge=1, le=MAX_GPUS), Integral]
Bandwidth = Annotated[float, Field(ge=MIN_BANDWIDTH, le=1e18)]
Generation = Annotated[int, Field(ge=3, le=6), Integral]
Lanes = Literal[1, 2, 4, 8, 16]


class Gpus(Section):
    """GPUs of a node."""

    type: Text
    """name of a GPU, such as a100-sxm-80gb; the calibration profile of that name describes it"""
    count: Count
    """GPUs per node"""


class Sockets(Section):
    """CPU sockets of a node, or its NUMA nodes where there are several in a socket."""

    count: Annotated[int, Field(ge=1, le=64), Integral] = 1
    """sockets per node; PCIe switches, and cards without one, are dealt evenly to them"""
    bandwidth_Bps: float = Field(default=0.0, ge=0)
    """bytes/s in each direction between any two sockets (QPI, UPI, xGMI)"""
    latency_s: float = Field(default=0.0, ge=0, le=10)
    """seconds from socket to socket"""


class NvLinks(Section):
    """NVLinks between two GPUs."""

    gpus: Annotated[tuple[int, ...], Field(min_length=2, max_length=2), AsTuple]
    """the two GPUs, by their numbers"""
    count: Annotated[int, Field(ge=1, le=1000), Integral] = 1
    """links side by side"""


class NvLink(Section):
    """What joins the GPUs of a node directly."""

    kind: Literal["none", "pairs", "mesh", "nvswitch", "links"] = "none"
    """none; pairs (GPU 0 with 1, 2 with 3); mesh (each with each, bandwidth divided); nvswitch (full speed to any);
    links (those that are listed)"""
    bandwidth_Bps: float = Field(default=0.0, ge=0)
    """bytes/s per GPU and direction, all its NVLinks together; of one link where the kind is links"""
    latency_s: float = Field(default=0.0, ge=0, le=10)
    """seconds from GPU to GPU"""
    sharp: bool = False
    """whether its NVSwitches sum up and multicast what crosses them (NVLink SHARP, third generation and later)"""
    links: Annotated[tuple[NvLinks, ...], AsTuple] = ()
    """which GPUs have links, and how many"""
    name: Literal["nvlink", "xgmi"] = "nvlink"
    """what its links are called; AMD's are xgmi (Infinity Fabric). How they carry bytes is `transports.nvlink` of the
    calibration profile"""


def _placed(value: object) -> object:
    return {"at": value} if isinstance(value, str) else value


class Place(Section):
    """Where something is plugged in; a plain name is short for ``{at: name}``."""

    at: str
    """the PCIe switch or CPU socket above it, such as pcie0 or cpu1"""
    generation: Generation | None = None
    """of this PCIe link [pcie.generation]"""
    lanes: Lanes | None = None
    """of this PCIe link [pcie.lanes]"""
    bandwidth_Bps: Bandwidth | None = None
    """bytes/s in each direction of this link, in place of its generation and lanes [null]"""


class Pcie(Section):
    """The PCI Express tree of a node."""

    generation: Generation
    """3, 4, 5 or 6"""
    lanes: Lanes = 16
    """lanes per link"""
    gpus_per_switch: Count = 1
    """GPUs that share a PCIe switch, and its one link to the CPU"""
    p2p: bool = True
    """whether GPUs copy to each other directly; false: through host memory"""
    tree: dict[str, Annotated[Place, BeforeValidator(_placed, json_schema_input_type=Place | str)]] = Field(
        default_factory=dict
    )
    """in place of gpus_per_switch and nics.attach: what each GPU (gpu0 ...), NIC (nic0 ...) and switch (pcie0 ...) is
    plugged into, a switch or a socket (cpu0 ...)"""

    def __hash__(self) -> int:
        """Of a node's sections this one alone holds a mapping, whose hash is not made by itself."""
        return hash((self.generation, self.lanes, self.gpus_per_switch, self.p2p, *self.tree.items()))


class Nics(Section):
    """Network cards of a node."""

    count: Annotated[int, Field(ge=0, le=MAX_GPUS), Integral] = 0
    """cards per node; 0 for a machine that stands alone"""
    bandwidth_bps: float = Field(default=0.0, ge=0)
    """bits/s per card and direction, as on its data sheet"""
    latency_s: float = Field(default=0.0, ge=0, le=10)
    """seconds from card to card through one switch"""
    attach: Literal["pcie_switch", "cpu"] = "pcie_switch"
    """where the card sits: pcie_switch (beside the GPUs, GPUDirect RDMA) or cpu"""


class Nvme(Section):
    """Drives of a node, striped."""

    count: Annotated[int, Field(ge=0, le=MAX_GPUS), Integral] = 0
    """drives per node"""
    read_Bps: float = Field(default=0.0, ge=0)
    """bytes/s that a drive reads one after another"""
    write_Bps: float = Field(default=0.0, ge=0)
    """bytes/s that a drive writes one after another"""


class Node(Section):
    """One machine."""

    gpus: Gpus
    sockets: Sockets = Sockets()
    nvlink: NvLink = NvLink()
    pcie: Pcie
    nics: Nics = Nics()
    host_speed: float = Field(default=1.0, ge=1e-3, le=1e3)
    """how fast the host issues ops, as a multiple of the calibrated one: virtual machines differ twofold"""
    autograd_speed: float = Field(default=1.0, ge=1e-3, le=1e3)
    """how fast autograd's thread does, which issues backward passes, as a multiple of that: a thread that shares its
    core is slower than one that does not"""
    host_memory_bytes: float | None = Field(default=None, gt=0, le=1e18)
    """memory of the host [null: not known, so that it is not checked]"""
    host_memory_bandwidth_Bps: Bandwidth | None = None
    """peak bytes/s of the host's memory, all sockets together; what is offloaded needs it [null: not known]"""
    nvme: Nvme = Nvme()


def node_problems(node: Node) -> Iterator[InputError]:
    """What the sections of a node say against each other; keys are those of a cluster file."""
    for key, bandwidth in (
        ("node.sockets.bandwidth_Bps", node.sockets.bandwidth_Bps),
        ("node.nvlink.bandwidth_Bps", node.nvlink.bandwidth_Bps),
        ("node.nics.bandwidth_bps", node.nics.bandwidth_bps),
        ("node.nvme.read_Bps", node.nvme.read_Bps),
        ("node.nvme.write_Bps", node.nvme.write_Bps),
    ):
        if 0 < bandwidth < MIN_BANDWIDTH:
            yield InputError("is too slow to simulate", key=key, found=bandwidth, allowed=f"0, or >= {MIN_BANDWIDTH:,}")
    if node.sockets.count > 1 and not node.sockets.bandwidth_Bps:
        yield InputError("must be given where there are several", key="node.sockets.bandwidth_Bps", allowed="> 0")
    for name in ("bandwidth_Bps", "latency_s"):
        if node.sockets.count == 1 and getattr(node.sockets, name):
            yield InputError(
                "is between sockets, and there is one",
                key=f"node.sockets.{name}",
                found=getattr(node.sockets, name),
                fix="sockets.count: 2",
            )
    if node.nics.count and not node.nics.bandwidth_bps:
        yield InputError("must be given where there are cards", key="node.nics.bandwidth_bps", allowed="> 0")
    if node.nvme.count:
        for name, bandwidth in (("read_Bps", node.nvme.read_Bps), ("write_Bps", node.nvme.write_Bps)):
            if not bandwidth:
                yield InputError("must be given where there are drives", key=f"node.nvme.{name}", allowed="> 0")
        if node.host_memory_bandwidth_Bps is None:
            yield InputError(
                "must be given where there are drives, which read and write the host's memory",
                key="node.host_memory_bandwidth_Bps",
                allowed=f">= {MIN_BANDWIDTH:,}",
            )
    yield from _nvlink_problems(node)
    if node.pcie.tree:
        yield from _tree_problems(node)


def _nvlink_problems(node: Node) -> Iterator[InputError]:
    link, key = node.nvlink, "node.nvlink"
    if link.kind == "none" and link.bandwidth_Bps:
        fix = "nvlink.kind: nvswitch, mesh, pairs or links"
        yield InputError("is given, but kind is none", key=f"{key}.bandwidth_Bps", found=link.bandwidth_Bps, fix=fix)
    if link.kind != "none" and not link.bandwidth_Bps:
        yield InputError(f"must be given for {link.kind}", key=f"{key}.bandwidth_Bps", allowed="> 0")
    if link.sharp and link.kind != "nvswitch":
        yield InputError("only NVSwitches sum up", key=f"{key}.sharp", found=True, fix="nvlink.kind: nvswitch")
    if link.kind == "pairs" and node.gpus.count % 2:
        yield InputError("NVLink pairs need an even number of GPUs", key="node.gpus.count", found=node.gpus.count)
    if link.kind == "links" and not link.links:
        yield InputError("must be given for links", key=f"{key}.links", allowed="such as [{gpus: [0, 1], count: 4}]")
    if link.kind != "links" and link.links:
        yield InputError("are of kind links alone", key=f"{key}.links", found=link.kind, fix="nvlink.kind: links")
    first: dict[tuple[int, ...], int] = {}
    for i, bundle in enumerate(link.links):
        at, ends = f"{key}.links[{i}].gpus", tuple(sorted(bundle.gpus))
        for gpu in ends:
            if not 0 <= gpu < node.gpus.count:
                yield InputError("this GPU does not exist", key=at, found=gpu, allowed=f"0 to {node.gpus.count - 1}")
        if ends[0] == ends[1]:
            yield InputError("a GPU has no link to itself", key=at, found=ends[0], fix="two different GPUs")
        elif first.setdefault(ends, i) != i:
            fix = "one entry, whose count is that of all their links"
            yield InputError(f"links[{first[ends]}] joins them already", key=at, found=list(ends), fix=fix)


def _tree_problems(node: Node) -> Iterator[InputError]:
    tree, key = node.pcie.tree, "node.pcie.tree"
    for section, name, plain in ((node.pcie, "gpus_per_switch", "pcie"), (node.nics, "attach", "nics")):
        if name in section.model_fields_set:
            found, fix = getattr(section, name), f"leave {plain}.{name} out"
            yield InputError(
                "is given beside pcie.tree, which says it", key=f"node.{plain}.{name}", found=found, fix=fix
            )
    counts = {"gpu": node.gpus.count, "nic": node.nics.count}
    switches = [name for name in tree if re.fullmatch(r"pcie\d{1,9}", name)]
    above = [*switches, *(f"cpu{i}" for i in range(node.sockets.count))]
    for name, place in tree.items():
        family, number = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
        if name not in switches and (family not in counts or not number or f"{family}{int(number)}" != name):
            allowed = "gpu0 ..., nic0 ..., pcie0 ..."
            yield InputError(
                "is no name of a GPU, NIC or PCIe switch", key=f"{key}.{name}", found=name, allowed=allowed
            )
        elif family in counts and int(number) >= counts[family]:
            what = f"{family}0 to {family}{counts[family] - 1}" if counts[family] else f"none: {family}s.count is 0"
            yield InputError("does not exist", key=f"{key}.{name}", found=name, allowed=what)
        if place.at not in above:
            near = closest(place.at, above)
            yield InputError(
                "is no switch of this tree, and no socket",
                key=f"{key}.{name}.at",
                found=place.at,
                allowed=", ".join(above[:12]) + (" ..." if len(above) > 12 else ""),
                fix=near and f"at: {near}",
            )
        if place.bandwidth_Bps is not None and (place.generation is not None or place.lanes is not None):
            fix = "either the bandwidth, or generation and lanes"
            yield InputError("is given twice", key=f"{key}.{name}.bandwidth_Bps", found=place.bandwidth_Bps, fix=fix)
    for family, count in counts.items():
        missing = [f"{family}{i}" for i in range(min(count, 1000)) if f"{family}{i}" not in tree]
        if missing:
            shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
            yield InputError(
                f"lacks {shown}", key=key, fix=f"{missing[0]}: cpu0, or the switch that it is plugged into"
            )
    for name in switches:
        way = [name]
        while (up := tree[way[-1]].at) in tree and up not in way:
            way.append(up)
        if up == name:
            yield InputError(
                "hangs under itself", key=f"{key}.{name}.at", found=" in ".join([*way, name]), fix="at: cpu0"
            )
    used = Counter(place.at for place in tree.values())
    for name in switches:
        if not used[name]:
            yield InputError("has nothing plugged in", key=f"{key}.{name}", found=name, fix=f"leave {name} out")
