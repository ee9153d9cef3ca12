"""The cluster file: nodes, the links in them, and the fabric between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from simulator.config import catalog
from simulator.config.files import AsTuple, Integral, Section, Text, brief, raise_all, read_yaml, validated
from simulator.errors import InputError
from simulator.fabrics import FABRICS

MAX_GPUS = 1_000_000
#: Of a link, in the unit of its key; 0 where there is none.
MIN_BANDWIDTH = 1_000

if TYPE_CHECKING:
    FabricKind = str
else:
    FabricKind = Literal[tuple(FABRICS)]  # what is registered, so that a new fabric needs no line here

Count = Annotated[int, Field(ge=1, le=MAX_GPUS), Integral]


class Gpus(Section):
    """GPUs of a node."""

    type: Text
    """name of a GPU, such as a100-sxm-80gb; the calibration profile of that name describes it"""
    count: Count
    """GPUs per node"""


class NvLink(Section):
    """What joins the GPUs of a node directly."""

    kind: Literal["none", "pairs", "mesh", "nvswitch"] = "none"
    """none; pairs (GPU 0 with 1, 2 with 3); mesh (each with each, bandwidth divided); nvswitch (full speed to any)"""
    bandwidth_Bps: float = Field(default=0.0, ge=0)
    """bytes/s per GPU and direction, all its NVLinks together"""
    latency_s: float = Field(default=0.0, ge=0, le=10)
    """seconds from GPU to GPU"""
    sharp: bool = False
    """whether its NVSwitches sum up and multicast what crosses them (NVLink SHARP, third generation and later)"""


class Pcie(Section):
    """The PCI Express tree of a node."""

    generation: Annotated[int, Field(ge=3, le=6), Integral]
    """3, 4, 5 or 6"""
    lanes: Literal[4, 8, 16] = 16
    """lanes per GPU"""
    gpus_per_switch: Count = 1
    """GPUs that share a PCIe switch, and its one link to the CPU"""
    p2p: bool = True
    """whether GPUs copy to each other directly; false: through host memory"""


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
    nvlink: NvLink = NvLink()
    pcie: Pcie
    nics: Nics = Nics()
    host_memory_bytes: float | None = Field(default=None, gt=0, le=1e18)
    """memory of the host [null: not known, so that it is not checked]"""
    host_memory_bandwidth_Bps: float | None = Field(default=None, ge=MIN_BANDWIDTH, le=1e18)
    """peak bytes/s of the host's memory, all sockets together; what is offloaded needs it [null: not known]"""
    nvme: Nvme = Nvme()


class Fabric(Section):
    """The network between nodes."""

    kind: FabricKind = "rail_fat_tree"
    """rail_fat_tree: card i of every node on the same leaf switches, leaves joined by spines"""
    transport: Literal["infiniband", "roce", "tcp"] = "infiniband"
    """what carries the bytes; the calibration profile says how well"""
    tiers: Annotated[int, Field(ge=1, le=3), Integral] = 2
    """levels of switches, 1 to 3"""
    radix: Annotated[int, Field(ge=2, le=4096), Integral] = 64
    """ports per switch"""
    oversubscription: float = Field(default=1.0, ge=1)
    """bandwidth down over bandwidth up at a leaf; 1: none"""


class LinkOverride(Section):
    """A link that differs from its kind."""

    link: str
    """name of a link, such as node3.nic2"""
    bandwidth_scale: float = Field(ge=1e-6, le=1e6)
    """its bandwidth as a multiple of what it would be"""


class GpuOverride(Section):
    """A GPU that differs from its kind."""

    gpu: str
    """name of a GPU, such as node1.gpu4"""
    speed_scale: float = Field(ge=1e-6, le=1e6)
    """its speed as a multiple of what it would be"""


def _override_class(value: object) -> str:
    has_gpu = "gpu" in value if isinstance(value, Mapping) else isinstance(value, GpuOverride)
    return "GpuOverride" if has_gpu else "LinkOverride"


Override = Annotated[
    Annotated[LinkOverride, Tag("LinkOverride")] | Annotated[GpuOverride, Tag("GpuOverride")],
    Discriminator(_override_class),
]


class ClusterSpec(Section):
    """A cluster file. Raises `InputError` where it contradicts itself."""

    name: Text
    nodes: Count = 1
    """number of nodes"""
    node: Node
    fabric: Fabric = Fabric()
    price_per_gpu_hour: float | None = Field(default=None, ge=0, le=1e6)
    """price of one GPU for an hour, in any currency"""
    overrides: Annotated[tuple[Override, ...], AsTuple] = ()
    """single links and GPUs that differ"""

    @property
    def n_gpus(self) -> int:
        return self.nodes * self.node.gpus.count

    @model_validator(mode="after")
    def _legal(self) -> Self:
        raise_all(cluster_problems(self))
        return self


def cluster_problems(spec: ClusterSpec) -> Iterator[InputError]:
    """What a cluster's sections say against each other. Node numbers count only once ``nodes`` has been given."""
    node = spec.node
    if spec.n_gpus > MAX_GPUS:
        yield InputError(
            f"makes {spec.n_gpus:,} GPUs", key="nodes", found=spec.nodes, allowed=f"at most {MAX_GPUS:,} GPUs"
        )
    for key, bandwidth in (
        ("node.nvlink.bandwidth_Bps", node.nvlink.bandwidth_Bps),
        ("node.nics.bandwidth_bps", node.nics.bandwidth_bps),
        ("node.nvme.read_Bps", node.nvme.read_Bps),
        ("node.nvme.write_Bps", node.nvme.write_Bps),
    ):
        if 0 < bandwidth < MIN_BANDWIDTH:
            yield InputError("is too slow to simulate", key=key, found=bandwidth, allowed=f"0, or >= {MIN_BANDWIDTH:,}")
    if node.nvlink.kind == "none" and node.nvlink.bandwidth_Bps:
        found, fix = node.nvlink.bandwidth_Bps, "nvlink.kind: nvswitch, mesh or pairs"
        yield InputError("is given, but kind is none", key="node.nvlink.bandwidth_Bps", found=found, fix=fix)
    if node.nvlink.kind != "none" and not node.nvlink.bandwidth_Bps:
        yield InputError(f"must be given for {node.nvlink.kind}", key="node.nvlink.bandwidth_Bps", allowed="> 0")
    if node.nvlink.sharp and node.nvlink.kind != "nvswitch":
        yield InputError("only NVSwitches sum up", key="node.nvlink.sharp", found=True, fix="nvlink.kind: nvswitch")
    if node.nvlink.kind == "pairs" and node.gpus.count % 2:
        yield InputError("NVLink pairs need an even number of GPUs", key="node.gpus.count", found=node.gpus.count)
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
    if spec.nodes > 1 and not node.nics.count:
        yield InputError("several nodes need network cards", key="node.nics.count", found=0, allowed=">= 1")
    first: dict[str, int] = {}
    for index, override in enumerate(spec.overrides):
        is_gpu = isinstance(override, GpuOverride)
        part, scale = ("gpu", "speed_scale") if is_gpu else ("link", "bandwidth_scale")
        key, name = f"overrides[{index}].{part}", str(getattr(override, part))
        yield from _name_problems(spec, name, is_gpu, key)
        if first.setdefault(name, index) != index:
            yield InputError(
                f"overrides[{first[name]}] is of it too, and only one {scale} can be meant",
                key=key,
                found=name,
                fix="one override of it",
            )


def _name_problems(spec: ClusterSpec, name: str, is_gpu: bool, key: str) -> Iterator[InputError]:
    numbers = re.match(r"node(\d{1,9})\.(?:gpu(\d{1,9})$)?", name)
    if is_gpu and (not numbers or numbers[2] is None):
        yield InputError("is no name of a GPU", key=key, found=name, allowed="node<i>.gpu<j>, such as node1.gpu4")
    elif numbers and int(numbers[1]) >= spec.nodes and "nodes" in spec.model_fields_set:
        yield InputError("this node does not exist", key=key, found=name, allowed=f"node0 to node{spec.nodes - 1}")
    elif numbers and numbers[2] and int(numbers[2]) >= spec.node.gpus.count:
        allowed = f"gpu0 to gpu{spec.node.gpus.count - 1}"
        yield InputError("this GPU does not exist", key=key, found=name, allowed=allowed)


def load_cluster(
    reference: str | Path | Mapping[str, Any], *, nodes: int | None = None, base: Path | None = None
) -> ClusterSpec:
    """A cluster by shipped name, by path, or from a mapping.

    A mapping whose ``name`` is a shipped cluster or a path starts from that file, and its other keys replace or add to
    the file's; any other mapping is a whole cluster. ``nodes`` fixes the size. ``base`` is the folder that relative
    paths start from.

    Raises `InputError`.
    """
    data, file, _ = cluster_data(reference, base=base)
    if nodes is not None:
        data["nodes"] = nodes

    def origin(key: str) -> tuple[object, str]:
        return ("--nodes" if nodes is not None and key == "nodes" else file), key

    return validated(ClusterSpec, {"nodes": 1, **data}, file, origin=origin)


def cluster_data(
    reference: object, *, base: Path | None = None, file: object = None, key: str | None = None
) -> tuple[dict[str, Any], Path | None, Mapping[str, Any]]:
    """What a reference to a cluster stands for, unchecked: the mapping, the file it starts from, the keys laid over it.

    ``file`` and ``key``: where the reference itself stands. Raises `InputError` where it names nothing.
    """
    over: Mapping[str, Any] = reference if isinstance(reference, Mapping) else {}
    if isinstance(reference, Mapping):
        name = reference.get("name")
        shipped = isinstance(name, str) and (name in catalog.names("cluster") or name.endswith((".yaml", ".yml")))
        if not shipped and ("node" in reference or not isinstance(name, str)):
            return {"name": "inline", **over}, None, over
        reference, over = name, {key: value for key, value in over.items() if key != "name"}
        key = f"{key}.name" if key else "name"
    if not isinstance(reference, str | Path):
        raise InputError("must be a name, a path or a mapping", file=file, key=key, found=brief(reference))
    path = catalog.find("cluster", str(reference), base=base, file=file, key=key)
    return merged({"name": path.stem, **read_yaml(path)}, over), path, over


def merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with ``changes`` laid over it, mapping by mapping.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    result = dict(data)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
