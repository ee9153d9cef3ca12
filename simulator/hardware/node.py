"""The section ``node`` of a cluster file: what is inside a machine, and what joins it.

The usual boxes are described in a few numbers (GPUs per PCIe switch, NVLink by kind). Any other box lists what hangs
where (``pcie.tree``) and which GPUs are bridged (``nvlink.links``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Len

from simulator.bounds import (
    SLOWEST,
    Bandwidth,
    CountOrNone,
    InNode,
    InNodeOrNone,
    Latency,
    NotNegative,
    SpeedScale,
    Text,
)

PcieGeneration = Annotated[int, Ge(3), Le(6)]
PcieLanes = Literal[1, 2, 4, 8, 16]


def count_types(types: Iterable[str]) -> str:
    """Return text such as ``8 h100-sxm-80gb``.

    >>> count_types(["rtx-3090-24gb", "rtx-4090-24gb", "rtx-3090-24gb"])
    '2 rtx-3090-24gb + 1 rtx-4090-24gb'
    """
    return " + ".join(f"{count} {gpu}" for gpu, count in Counter(types).items())


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of one type in a node."""

    type: Text
    """name of a GPU, such as a100-sxm-80gb; the calibration profile of that name describes it"""
    count: InNode
    """GPUs per node"""

    @property
    def by_number(self) -> tuple[str, ...]:
        """The type of every GPU, in the order of their numbers."""
        return (self.type,) * self.count

    @property
    def types(self) -> tuple[str, ...]:
        """The types, each once."""
        return (self.type,)


@dataclass(frozen=True, kw_only=True)
class MixedGpus:
    """GPUs of several types in a node, written as a list; they are numbered entry by entry."""

    list_means: ClassVar[str] = "kinds"

    kinds: Annotated[tuple[Gpus, ...], Len(1, 64)]
    """GPUs of one type each"""

    @property
    def count(self) -> int:
        """GPUs per node."""
        return sum(kind.count for kind in self.kinds)

    @property
    def by_number(self) -> tuple[str, ...]:
        """The type of every GPU, in the order of their numbers."""
        return tuple(gpu for kind in self.kinds for gpu in kind.by_number)

    @property
    def types(self) -> tuple[str, ...]:
        """The types, each once."""
        return tuple(dict.fromkeys(kind.type for kind in self.kinds))


@dataclass(frozen=True, kw_only=True)
class Sockets:
    """CPU sockets of a node, or its NUMA nodes where there are several in a socket."""

    count: Annotated[int, Ge(1), Le(64)] = 1
    """sockets per node; PCIe switches, and cards without one, are dealt evenly to them"""
    bandwidth_Bps: NotNegative = 0.0
    """bytes/s in each direction between any two sockets (QPI, UPI, xGMI)"""
    latency_s: Latency = 0.0
    """seconds from socket to socket"""


@dataclass(frozen=True, kw_only=True)
class NvLinks:
    """NVLinks between two GPUs."""

    gpus: Annotated[tuple[int, ...], Len(2, 2)]
    """the two GPUs, by their numbers"""
    count: Annotated[int, Ge(1), Le(1000)] = 1
    """links side by side"""


@dataclass(frozen=True, kw_only=True)
class NvLink:
    """Links that join the GPUs of a node directly."""

    kind: Literal["none", "pairs", "mesh", "nvswitch", "links"] = "none"
    """none; pairs (GPU 0 with 1, 2 with 3); mesh (each with each, bandwidth divided); nvswitch (full speed to any);
    links (those that are listed)"""
    bandwidth_Bps: NotNegative = 0.0
    """bytes/s per GPU and direction, all its NVLinks together; of one link where the kind is links"""
    latency_s: Latency = 0.0
    """seconds from GPU to GPU"""
    sharp: bool = False
    """whether its NVSwitches sum up and multicast what crosses them (NVLink SHARP, third generation and later)"""
    links: tuple[NvLinks, ...] = ()
    """which GPUs have links, and how many"""
    name: Literal["nvlink", "xgmi"] = "nvlink"
    """what its links are called; AMD's are xgmi (Infinity Fabric). How they carry bytes is `transports.nvlink` of the
    calibration profile"""


@dataclass(frozen=True, kw_only=True)
class PcieSlot:
    """A slot that something is plugged into; a plain name is short for ``{at: name}``."""

    text_means: ClassVar[str] = "at"

    at: str
    """the PCIe switch or CPU socket above it, such as pcie0 or cpu1"""
    generation: PcieGeneration | None = None
    """of this PCIe link [pcie.generation]"""
    lanes: PcieLanes | None = None
    """of this PCIe link [pcie.lanes]"""
    bandwidth_Bps: Bandwidth | None = None
    """bytes/s in each direction of this link, in place of its generation and lanes [null]"""


@dataclass(frozen=True, kw_only=True)
class Pcie:
    """The PCI Express tree of a node."""

    generation: PcieGeneration
    """3, 4, 5 or 6"""
    lanes: PcieLanes = 16
    """lanes per link"""
    gpus_per_switch: InNode | None = None
    """GPUs that share a PCIe switch, and its one link to the CPU [1]"""
    p2p: bool = True
    """whether GPUs copy to each other directly; false: through host memory"""
    tree: dict[str, PcieSlot] = field(default_factory=dict)
    """in place of gpus_per_switch and nics.attach: what each GPU (gpu0 ...), NIC (nic0 ...) and switch (pcie0 ...) is
    plugged into, a switch or a socket (cpu0 ...)"""

    def __hash__(self) -> int:
        """Hash that includes the tree, which is a mapping and has none of its own."""
        return hash((self.generation, self.lanes, self.gpus_per_switch, self.p2p, *self.tree.items()))


@dataclass(frozen=True, kw_only=True)
class Nics:
    """Network cards of a node."""

    count: InNodeOrNone = 0
    """cards per node; 0 for a machine that stands alone"""
    bandwidth_bps: NotNegative = 0.0
    """bits/s per card and direction, as on its data sheet"""
    latency_s: Latency = 0.0
    """seconds from card to card through one switch"""
    attach: Literal["pcie_switch", "cpu"] | None = None
    """where the card sits: pcie_switch (beside the GPUs, GPUDirect RDMA) or cpu [pcie_switch]"""


@dataclass(frozen=True, kw_only=True)
class Nvme:
    """Drives of a node, striped."""

    count: CountOrNone = 0
    """drives per node"""
    read_Bps: NotNegative = 0.0
    """bytes/s that a drive reads one after another"""
    write_Bps: NotNegative = 0.0
    """bytes/s that a drive writes one after another"""


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One machine."""

    gpus: Gpus | MixedGpus
    """one type, or a list of several such as [{type: rtx-3090-24gb, count: 2}, {type: rtx-4090-24gb, count: 2}]"""
    sockets: Sockets = Sockets()
    nvlink: NvLink = NvLink()
    pcie: Pcie
    nics: Nics = Nics()
    host_speed: SpeedScale = 1.0
    """how fast the host issues ops, as a multiple of the calibrated one: virtual machines differ twofold"""
    autograd_speed: SpeedScale = 1.0
    """how fast autograd's thread does, which issues backward passes, as a multiple of that: a thread that shares its
    core is slower than one that does not"""
    host_memory_bytes: Annotated[float, Gt(0), Le(1e18)] | None = None
    """memory of the host [null: not known, so that it is not checked]"""
    host_memory_bandwidth_Bps: Bandwidth | None = None
    """peak bytes/s of the host's memory, all sockets together; what is offloaded needs it [null: not known]"""
    nvme: Nvme = Nvme()

    def with_host_at(self, share: float) -> NodeSpec:
        """Return the node with the speed of its host times ``share``, and no slower than files may say."""
        return replace(self, host_speed=max(share * self.host_speed, SLOWEST))
