"""The cluster file: nodes, the links in them, and the fabric between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from simulator.config import catalog
from simulator.config.files import AsTuple, Integral, Section, Text, brief, raise_all, read_yaml, validated
from simulator.config.node import MAX_GPUS, Count, Node, node_problems
from simulator.errors import InputError
from simulator.fabrics import FABRICS

if TYPE_CHECKING:
    FabricKind = str
else:
    FabricKind = Literal[tuple(FABRICS)]  # what is registered, so that a new fabric needs no line here


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
    yield from node_problems(node)
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
