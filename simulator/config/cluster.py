"""The cluster file: nodes, the links in them, and the fabric between them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from simulator.config import catalog
from simulator.config.background import Background
from simulator.config.files import AsTuple, Integral, Section, Text, brief, raise_all, read_yaml, validated
from simulator.config.foreign import SUFFIXES, is_foreign, read_topology
from simulator.config.node import MAX_GPUS, Bandwidth, Count, Node, node_problems
from simulator.config.overrides import Override, missing_parts, override_problems
from simulator.errors import InputError
from simulator.fabrics import FABRICS

if TYPE_CHECKING:
    FabricKind = str
else:
    FabricKind = Literal[tuple(FABRICS)]  # what is registered, so that a new fabric needs no line here


class FabricSwitch(Section):
    """A switch of a `switch_tree`."""

    at: Text | None = None
    """the switch above it [null: none is]"""
    nodes: Annotated[int, Field(ge=0, le=MAX_GPUS), Integral] = 0
    """nodes that are cabled to it, with all their cards; they are numbered switch by switch"""
    bandwidth_Bps: Bandwidth | None = None
    """bytes/s of its link upwards, in each direction [what its links below carry, over oversubscription]"""


class Fabric(Section):
    """The network between nodes."""

    kind: FabricKind = "rail_fat_tree"
    """rail_fat_tree: card i of every node on the same leaf switches, leaves joined by spines; switch_tree: as listed"""
    transport: Literal["infiniband", "roce", "tcp"] = "infiniband"
    """what carries the bytes; the calibration profile says how well"""
    tiers: Annotated[int, Field(ge=1, le=3), Integral] = 2
    """levels of switches, 1 to 3"""
    radix: Annotated[int, Field(ge=2, le=4096), Integral] = 64
    """ports per switch"""
    oversubscription: float = Field(default=1.0, ge=1)
    """bandwidth down over bandwidth up at a leaf; 1: none"""
    sharp: bool = False
    """whether its switches sum up for all-reduces (InfiniBand SHARP) and NCCL is set up to use it (CollNet)"""
    switches: dict[str, FabricSwitch] = Field(default_factory=dict)
    """of a switch_tree, by name"""


class Group(Section):
    """Nodes of one kind, one after another."""

    count: Count
    """number of nodes"""
    node: Node


class ClusterSpec(Section):
    """A cluster file. Raises `InputError` where it contradicts itself."""

    name: Text
    nodes: Count = 1
    """number of nodes [with groups: what they add up to]"""
    node: Node | None = None
    """what every node is"""
    groups: Annotated[tuple[Group, ...], AsTuple] = ()
    """in place of node: nodes of several kinds, numbered group by group"""
    fabric: Fabric = Fabric()
    price_per_gpu_hour: float | None = Field(default=None, ge=0, le=1e6)
    """price of one GPU for an hour, in any currency"""
    overrides: Annotated[tuple[Override, ...], AsTuple] = ()
    """single links, GPUs and network cards that differ; of several that mean one link, all count"""
    background: Annotated[tuple[Background, ...], AsTuple] = ()
    """traffic of others, there all the time"""

    @property
    def kinds(self) -> tuple[Node, ...]:
        """The kinds of node, in order."""
        return tuple(dict.fromkeys(node for _, node in self._spans()))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types of GPU, in order."""
        return tuple(dict.fromkeys(node.gpus.type for node in self.kinds))

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node of the kind that has the fewest."""
        return min(node.gpus.count for node in self.kinds)

    @property
    def n_gpus(self) -> int:
        return self.gpus_on(self.nodes)

    def node_at(self, index: int) -> Node:
        """Node number ``index``; past the last one more of the last kind would follow."""
        for end, node in self._spans():
            if index < end:
                return node
        return node

    def places(self) -> Iterator[tuple[int, int]]:
        """Node and number in it of every GPU that is there, in the order of ranks."""
        missing = missing_parts(self, "gpu")
        for index in range(self.nodes):
            gone = missing.get(index, frozenset()) | missing.get(None, frozenset())
            if None not in gone:
                yield from ((index, gpu) for gpu in range(self.node_at(index).gpus.count) if gpu not in gone)

    def gpus_on(self, nodes: int) -> int:
        """How many GPUs the first so many nodes have, missing ones not counted."""
        missing = missing_parts(self, "gpu")
        everywhere = missing.pop(None, frozenset())
        total = first = 0
        spans = self._spans()
        for number, (last, node) in enumerate(spans, start=1):
            end = nodes if number == len(spans) else min(last, nodes)
            total += max(end - first, 0) * _present(node, everywhere)
            first = max(first, end)
        for index, gone in missing.items():
            if index is not None and index < nodes:
                node = self.node_at(index)
                total -= _present(node, everywhere) - _present(node, everywhere | gone)
        return total

    def nodes_for(self, gpus: int) -> int:
        """How many nodes, from the first on, it takes to hold so many GPUs; past the last one more of its kind would
        follow."""
        most = gpus + len(self.overrides) + sum(group.count for group in self.groups)
        return bisect.bisect_left(range(most), gpus, key=self.gpus_on)

    def _spans(self) -> tuple[tuple[int, Node], ...]:
        """Nodes of one kind that follow one another: the number after the last of them, and the kind."""
        if self.node is not None:
            return ((self.nodes, self.node),)
        ends = itertools.accumulate(group.count for group in self.groups)
        return tuple(zip(ends, (group.node for group in self.groups), strict=True))

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, data: Any, handler: ModelWrapValidatorHandler[ClusterSpec]) -> ClusterSpec:
        spec = handler(data)
        if bool(spec.groups) is (spec.node is not None):
            found = "both" if spec.groups else "neither"
            raise InputError("what nodes are is said by either node or groups", key="node", found=found)
        if spec.groups and "nodes" not in spec.model_fields_set:
            spec = spec.model_copy(update={"nodes": sum(group.count for group in spec.groups)})
        raise_all(cluster_problems(spec))
        return spec


def _present(node: Node, gone: frozenset[int | None]) -> int:
    """GPUs of a node that are not ``gone``; None: all are."""
    return 0 if None in gone else node.gpus.count - sum(gpu is not None and gpu < node.gpus.count for gpu in gone)


def cluster_problems(spec: ClusterSpec) -> Iterator[InputError]:
    """What a cluster's sections say against each other. Node numbers count only once ``nodes`` has been given."""
    if spec.n_gpus > MAX_GPUS:
        yield InputError(
            f"makes {spec.n_gpus:,} GPUs", key="nodes", found=spec.nodes, allowed=f"at most {MAX_GPUS:,} GPUs"
        )
    grouped = sum(group.count for group in spec.groups)
    if spec.groups and spec.nodes != grouped:
        yield InputError(
            f"groups make {grouped:,} nodes", key="nodes", found=spec.nodes, allowed=grouped, fix="other counts"
        )
    if spec.fabric.sharp and spec.fabric.transport != "infiniband":
        found, fix = spec.fabric.transport, "fabric.transport: infiniband"
        yield InputError("only InfiniBand switches sum up", key="fabric.sharp", found=found, fix=fix)
    kinds = (
        {"node": spec.node} if spec.node else {f"groups[{i}].node": group.node for i, group in enumerate(spec.groups)}
    )
    for key, node in kinds.items():
        for problem in node_problems(node):
            problem.key = key + str(problem.key).removeprefix("node")
            yield problem
        if spec.nodes > 1 and not node.nics.count:
            yield InputError("several nodes need network cards", key=f"{key}.nics.count", found=0, allowed=">= 1")
    yield from _tree_problems(spec.fabric)
    yield from override_problems(spec)


def _tree_problems(fabric: Fabric) -> Iterator[InputError]:
    listed = fabric.kind == "switch_tree"
    if listed is not bool(fabric.switches):
        message = "must list the switches of a switch_tree" if listed else "are of the kind switch_tree alone"
        yield InputError(message, key="fabric.switches", found=fabric.kind, fix=None if listed else "kind: switch_tree")
    for name in ("tiers", "radix"):
        if listed and name in fabric.model_fields_set:
            fix = f"leave fabric.{name} out"
            yield InputError("is what fabric.switches says", key=f"fabric.{name}", found=getattr(fabric, name), fix=fix)


def describe_nodes(spec: ClusterSpec) -> str:
    """Such as ``4 nodes x 8 h100-sxm-80gb + 2 nodes x 8 a100-sxm-80gb``."""
    counts = [(group.count, group.node) for group in spec.groups]
    if spec.node is not None:
        counts = [(spec.nodes, spec.node)]
    return " + ".join(f"{count} nodes x {node.gpus.count} {node.gpus.type}" for count, node in counts)


def load_cluster(
    reference: str | Path | Mapping[str, Any], *, nodes: int | None = None, base: Path | None = None
) -> ClusterSpec:
    """A cluster by shipped name, by path, or from a mapping.

    A mapping whose ``name`` is a shipped cluster or a path starts from that file, and its other keys replace or add to
    the file's; any other mapping is a whole cluster. A file may also be another tool's topology (`config.foreign`).
    ``nodes`` fixes the size. ``base`` is the folder that relative paths start from.

    Raises `InputError`.
    """
    data, file, _ = cluster_data(reference, base=base)
    if nodes is not None:
        data["nodes"] = nodes

    def origin(key: str) -> tuple[object, str]:
        return ("--nodes" if nodes is not None and key == "nodes" else file), key

    return validated(ClusterSpec, data if "groups" in data else {"nodes": 1, **data}, file, origin=origin)


def cluster_data(
    reference: object, *, base: Path | None = None, file: object = None, key: str | None = None
) -> tuple[dict[str, Any], Path | None, Mapping[str, Any]]:
    """What a reference to a cluster stands for, unchecked: the mapping, the file it starts from, the keys laid over it.

    ``file`` and ``key``: where the reference itself stands. Raises `InputError` where it names nothing.
    """
    over: Mapping[str, Any] = reference if isinstance(reference, Mapping) else {}
    if isinstance(reference, Mapping):
        name = reference.get("name")
        shipped = isinstance(name, str) and (name in catalog.names("cluster") or name.endswith(SUFFIXES))
        if not shipped and ("node" in reference or "groups" in reference or not isinstance(name, str)):
            return _with_nodes({"name": "inline", **over}, base, file, key), None, over
        reference, over = name, {key: value for key, value in over.items() if key != "name"}
        key = f"{key}.name" if key else "name"
    if not isinstance(reference, str | Path):
        raise InputError("must be a name, a path or a mapping", file=file, key=key, found=brief(reference))
    path = catalog.find("cluster", str(reference), base=base, file=file, key=key)
    data = read_topology(path).cluster if is_foreign(path) else read_yaml(path)
    data = merged({"name": path.stem, **data}, over)
    return _with_nodes(data, path.parent, path, None), path, over


def _with_nodes(data: dict[str, Any], base: Path | None, file: object, key: str | None) -> dict[str, Any]:
    """With what a group's ``node`` stands for where it is the name of a cluster: that cluster's node."""
    groups = data.get("groups")
    if not isinstance(groups, list):
        return data
    whole = []
    for index, group in enumerate(groups):
        if isinstance(group, Mapping) and isinstance(group.get("node"), str):
            here = f"{key}.groups[{index}].node" if key else f"groups[{index}].node"
            other, _, _ = cluster_data(group["node"], base=base, file=file, key=here)
            if "node" not in other:
                raise InputError("has no one kind of node", file=file, key=here, found=group["node"])
            group = {**group, "node": other["node"]}
        whole.append(group)
    return {**data, "groups": whole}


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
