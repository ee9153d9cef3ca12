"""The cluster file: nodes, the links in them, and the fabric between them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from simulator.config import catalog
from simulator.config.background import Background
from simulator.config.node import MAX_GPUS, Bandwidth, Count, Node, node_problems
from simulator.config.overrides import Override, missing_parts, override_problems
from simulator.config.section import AsTuple, Integral, Section, Text, raise_all, validated
from simulator.errors import InputError
from simulator.fabrics import FABRICS, ports_down
from simulator.importers import SUFFIXES, is_foreign, read_topology, unanswered
from simulator.input_files import brief, read_yaml
from simulator.units import counted

if TYPE_CHECKING:
    FabricKind = str
else:
    FabricKind = Literal[tuple(FABRICS)]  # what is registered, so that a new fabric needs no line here


class Sites(Section):
    """Data centres that the nodes are spread over, in order, and the WAN link between each two of them."""

    count: Annotated[int, Field(ge=2, le=1000), Integral]
    """number of sites; it divides the number of nodes"""
    bandwidth_bps: Bandwidth
    """bits/s of a WAN link in each direction"""
    latency_s: float = Field(ge=0, le=10)
    """seconds one way: light takes 5e-6 per km of fibre"""
    window_bytes: float | None = Field(default=None, ge=1, le=1e18)
    """bytes that may be under way on a WAN link in each direction, so that it carries no more than window_bytes / (2 *
    latency_s) [null: as many as its bandwidth can use]"""


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
    """rail_fat_tree (card i of every node on the same leaf switches, leaves joined by spines), rail_only (rails meet in
    nodes alone), fat_tree (all cards of a node on one leaf switch), dragonfly, torus, or switch_tree (as listed)"""
    transport: Literal["infiniband", "roce", "tcp"] = "infiniband"
    """what carries the bytes; the calibration profile says how well"""
    tiers: Annotated[int, Field(ge=1, le=3), Integral] = 2
    """levels of switches, 1 to 3"""
    radix: Annotated[int, Field(ge=2, le=4096), Integral] = 64
    """ports per switch"""
    oversubscription: float = Field(default=1.0, ge=1)
    """bandwidth down over bandwidth up at a leaf, in whole ports: no less upwards than that; 1: none"""
    shape: Annotated[tuple[Count, ...], Field(min_length=2, max_length=3), AsTuple] | None = None
    """nodes along the axes of a torus, such as [4, 4] or [2, 4, 4]; nodes follows from it"""
    sites: Sites | None = None
    """several data centres, each with a fabric of this kind [null: one]"""
    sharp: bool = False
    """whether its switches sum up for all-reduces (InfiniBand SHARP) and NCCL is set up to use it (CollNet)"""
    switches: dict[str, FabricSwitch] = Field(default_factory=dict)
    """of a switch_tree, by name"""


class Group(Section):
    """Nodes of one kind, one after another."""

    count: Count
    """number of nodes"""
    node: Node
    """what each is; in a file also the name of a cluster that has such nodes"""


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
    assumed: Annotated[tuple[Text, ...], AsTuple] = ()
    """figures that nobody has told, each as "key: figure and why", of which runs warn"""

    @property
    def warnings(self) -> list[str]:
        """What is to be known before figures of this cluster are trusted."""
        return [f"assumed: {text}" for text in self.assumed]

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
    def fixed_nodes(self) -> int:
        """How many nodes there are by the groups, or the shape of the fabric; 0: any number."""
        sites = self.fabric.sites.count if self.fabric.sites else 1
        return sum(group.count for group in self.groups) or (sites * math.prod(self.fabric.shape or (0,)))

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

    def gpus_at(self, index: int) -> int:
        """How many GPUs node number ``index`` has, missing ones not counted."""
        return self.gpus_on(index + 1) - self.gpus_on(index)

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
        if "nodes" not in spec.model_fields_set and (nodes := spec.fixed_nodes):
            spec = spec.model_copy(update={"nodes": nodes})
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
    if spec.fixed_nodes and spec.nodes != spec.fixed_nodes:
        what = "groups make" if spec.groups else "the shape of the fabric makes"
        allowed = f"{spec.fixed_nodes:,}"
        yield InputError(f"{what} {allowed} nodes", key="nodes", found=spec.nodes, allowed=allowed)
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
    yield from _fabric_problems(spec.fabric)
    yield from override_problems(spec)


def _fabric_problems(fabric: Fabric) -> Iterator[InputError]:
    for name in sorted(_keys_of_kinds() - set(FABRICS[fabric.kind].keys)):
        if getattr(fabric, name) != Fabric.model_fields[name].get_default(call_default_factory=True):
            kinds = [kind for kind, entry in FABRICS.items() if name in entry.keys]
            yield InputError(
                f"{fabric.kind} has none",
                key=f"fabric.{name}",
                found=brief(getattr(fabric, name)),
                allowed=f"with kind {', '.join(kinds)}",
            )
    yield from FABRICS[fabric.kind].check(fabric)


def _keys_of_kinds() -> set[str]:
    """What some kinds of fabric read and others do not."""
    return {name for entry in FABRICS.values() for name in entry.keys}


def describe_nodes(spec: ClusterSpec) -> str:
    """Such as ``4 nodes x 8 h100-sxm-80gb + 2 nodes x 8 a100-sxm-80gb``."""
    counts = [(group.count, group.node) for group in spec.groups]
    if spec.node is not None:
        counts = [(spec.nodes, spec.node)]
    return " + ".join(f"{counted(count, 'node')} x {node.gpus.count} {node.gpus.type}" for count, node in counts)


def describe_fabric(fabric: Fabric) -> str:
    """Such as ``fat_tree, at most 3 tiers of 63 ports, 2:1`` or ``torus, 4 x 4``, of so many sites; what the ports of a
    switch make of an oversubscription that does not divide them."""
    used, said = FABRICS[fabric.kind].keys, [fabric.kind]
    if "tiers" in used:
        said.append(f"at most {fabric.tiers} tiers of {fabric.radix} ports")
    elif "radix" in used:
        said.append(f"routers of {fabric.radix} ports")
    if fabric.shape:
        said.append(" x ".join(map(str, fabric.shape)))
    if fabric.oversubscription > 1:
        said.append(f"{fabric.oversubscription:g}:1")
        down = ports_down(fabric)
        up = fabric.radix - down
        if "tiers" in used and up and abs(down / up - fabric.oversubscription) > 1e-9:
            said[-1] += f" (in whole ports {down}:{up}, which is {down / up:.3g}:1)"
    if fabric.sites:
        said.append(f"{fabric.sites.count} sites")
    return ", ".join(said)


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

    spec = validated(ClusterSpec, data, file, origin=origin)
    if "nodes" not in spec.model_fields_set:
        spec = validated(ClusterSpec, {**data, "nodes": spec.nodes}, file, origin=origin)
    return spec


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
    if is_foreign(path):
        imported = read_topology(path)
        data = {**imported.cluster, "assumed": list(imported.assumed)}
    else:
        data = read_yaml(path)
    kept = _without_replaced({"name": path.stem, **data}, over)
    assumed = data.get("assumed")
    if isinstance(assumed, list) and all(isinstance(text, str) for text in assumed):
        kept["assumed"] = unanswered(assumed, [*_figures(over), *(data.keys() - kept.keys())])
    data = merged(kept, over)
    if is_foreign(path) and not {"node", "groups"} & set(data):
        fix = f"llmsim import {path} --node dgx_h100 --out mine.yaml, or another cluster that its nodes are of"
        raise InputError("says nothing of the nodes themselves", file=path, key="node", fix=fix)
    return _with_nodes(data, path.parent, path, None), path, over


def _figures(data: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """The dotted keys of a mapping's values, which are no mappings themselves."""
    for name, value in data.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping):
            yield from _figures(value, f"{key}.")
        else:
            yield key


def _without_replaced(data: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A file's mapping without what goes when ``over`` is laid over it: groups stand in place of its node, a shape in
    place of its nodes, and another kind of fabric has no use for all keys of its own."""
    fabric, other = data.get("fabric"), over.get("fabric")
    gone: tuple[str, ...] = ("node", "nodes") if "groups" in over else ()
    if isinstance(fabric, Mapping) and isinstance(other, Mapping):
        gone += ("nodes",) if "shape" in other else ()
        if "kind" in other:
            kind = FABRICS.get(str(other["kind"]))  # an unknown one is refused later
            gone_too = _keys_of_kinds() - set(kind.keys) if kind else set()
            data = {**data, "fabric": {name: value for name, value in fabric.items() if name not in gone_too}}
    return {name: value for name, value in data.items() if name not in gone}


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
