"""A cluster as a file describes it: nodes, the fabric between them, what differs, and traffic of others."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from simulator.bounds import MAX_GPUS, Count, Text
from simulator.errors import InputError, raise_all
from simulator.fabrics import Fabric, fabric_problems
from simulator.hardware.node import NodeSpec
from simulator.hardware.node_problems import node_problems
from simulator.hardware.overrides import (
    PART_NAME,
    GpuOverride,
    LinkOverride,
    NicOverride,
    Override,
    missing_parts,
    named_part,
)
from simulator.hardware.traffic import BackgroundTraffic


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind, one after another."""

    count: Count
    """number of nodes"""
    node: NodeSpec
    """what each is; in a file also the name of a cluster that has such nodes"""


#: Types of GPU that have no NVLink (their data sheets, NVIDIA).
WITHOUT_NVLINK = frozenset(
    [
        "a10-24gb",
        "a10g-24gb",
        "l4-24gb",
        "l40s-48gb",
        "rtx-3080-10gb",
        "rtx-4090-24gb",
        "rtx-5090-32gb",
        "rtx-6000-ada-48gb",
        "rtx-pro-6000-96gb",
        "t4-16gb",
    ]
)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster file. Raises `InputError` where it contradicts itself."""

    laid_over: ClassVar[str] = "like"

    name: Text
    """what results call it; in a workload, of a mapping without node, groups and like, the cluster that is meant; with
    like a label alone, not that of another shipped cluster"""
    like: Text | None = None
    """a cluster, by name or path, that this one starts from; the other keys are laid over it [null: none]"""
    nodes: Count | None = None
    """number of nodes [1, or as many as a job needs; with groups: what they add up to]"""
    node: NodeSpec | None = None
    """what every node is"""
    groups: tuple[NodeGroup, ...] = ()
    """in place of node: nodes of several kinds, numbered group by group"""
    fabric: Fabric = field(default_factory=Fabric)
    price_per_gpu_hour: Annotated[float, Ge(0), Le(1e6)] | None = None
    """price of one GPU for an hour, in any currency"""
    overrides: tuple[Override, ...] = ()
    """single links, GPUs and network cards that differ; of several that mean one link, all count"""
    background: tuple[BackgroundTraffic, ...] = ()
    """traffic of others, there all the time"""
    assumed: tuple[Text, ...] = ()
    """figures that nobody has told, each as "key: figure and why", of which runs warn"""

    def __post_init__(self) -> None:
        if self.like is not None:
            raise InputError("stands for keys of another file, which is read first", key="like", found=self.like)
        if bool(self.groups) is (self.node is not None):
            both = "both" if self.groups else "neither"
            raise InputError("what nodes are is said by either node or groups", key="node", found=both)
        if self.nodes is None and self.fixed_nodes:
            object.__setattr__(self, "nodes", self.fixed_nodes)
        raise_all(_problems(self))

    @property
    def n_nodes(self) -> int:
        """Number of nodes; 1 where the file leaves it to the job."""
        return self.nodes or 1

    @property
    def warnings(self) -> list[str]:
        """Sentences to know before figures of this cluster are trusted."""
        return [*(f"assumed: {text}" for text in self.assumed), *self._links_without_a_plug()]

    def _links_without_a_plug(self) -> Iterator[str]:
        """Yield types of GPU that have no NVLink and get one, as in a file that is ``like`` another."""
        for node in self.kinds:
            for gpu in node.gpus.types if node.nvlink.kind != "none" else ():
                if gpu in WITHOUT_NVLINK:
                    kind = node.nvlink.kind
                    yield f"node.nvlink: {kind}, but a {gpu} has no NVLink; nvlink: {{kind: none}} takes it away"

    @property
    def kinds(self) -> tuple[NodeSpec, ...]:
        """The kinds of node, in order."""
        return tuple(dict.fromkeys(node for _, node in self._spans()))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types of GPU, in order."""
        return tuple(dict.fromkeys(gpu for node in self.kinds for gpu in node.gpus.types))

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node of the kind that has the fewest."""
        return min(node.gpus.count for node in self.kinds)

    @property
    def fixed_nodes(self) -> int:
        """Number of nodes by the groups, or by the shape of the fabric; 0: any number."""
        sites = self.fabric.sites.count if self.fabric.sites else 1
        return sum(group.count for group in self.groups) or (sites * math.prod(self.fabric.shape or (0,)))

    @property
    def n_gpus(self) -> int:
        """GPUs of all nodes, missing ones not counted."""
        return self.gpus_on(self.n_nodes)

    def node_at(self, index: int) -> NodeSpec:
        """Return node number ``index``; past the last one more of the last kind would follow."""
        for end, node in self._spans():
            if index < end:
                return node
        return node

    @property
    def kinds_in_order(self) -> tuple[NodeSpec, ...]:
        """The nodes of each group, the same object for all nodes of it."""
        return tuple(node for _, node in self._spans())

    def with_hosts_at(self, share: float) -> ClusterSpec:
        """Return the cluster with the speed of its hosts times ``share``."""
        if self.node is not None:
            return replace(self, node=self.node.with_host_at(share))
        return replace(self, groups=tuple(replace(one, node=one.node.with_host_at(share)) for one in self.groups))

    @property
    def node_specs(self) -> tuple[NodeSpec, ...]:
        """Return what every node is, in order, each one of `kinds_in_order`."""
        nodes: list[NodeSpec] = []
        for end, node in self._spans():
            nodes += [node] * (end - len(nodes))
        return tuple(nodes)

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield node and number in it of every GPU that is there, in the order of ranks."""
        missing = missing_parts(self.overrides, "gpu")
        for index in range(self.n_nodes):
            absent = missing.get(index, frozenset()) | missing.get(None, frozenset())
            if None not in absent:
                yield from ((index, gpu) for gpu in range(self.node_at(index).gpus.count) if gpu not in absent)

    def gpus_on(self, nodes: int) -> int:
        """Return how many GPUs the first so many nodes have, missing ones not counted."""
        missing = missing_parts(self.overrides, "gpu")
        everywhere = missing.pop(None, frozenset())
        total = first = 0
        spans = self._spans()
        for number, (last, node) in enumerate(spans, start=1):
            end = nodes if number == len(spans) else min(last, nodes)
            total += max(end - first, 0) * _present(node, everywhere)
            first = max(first, end)
        for index, absent in missing.items():
            if index is not None and index < nodes:
                node = self.node_at(index)
                total -= _present(node, everywhere) - _present(node, everywhere | absent)
        return total

    def gpus_at(self, index: int) -> int:
        """Return how many GPUs node number ``index`` has, missing ones not counted."""
        return self.gpus_on(index + 1) - self.gpus_on(index)

    def types_on(self, nodes: Iterable[int], gpus: int) -> tuple[str, ...]:
        """Return the types of the first so many GPUs of these nodes, missing ones not counted, each type once."""
        missing = missing_parts(self.overrides, "gpu")
        everywhere, types = missing.get(None, frozenset()), dict[str, None]()
        for index in nodes:
            by_number = self.node_at(index).gpus.by_number
            absent = missing.get(index, frozenset()) | everywhere
            present = [gpu for number, gpu in enumerate(by_number) if None not in absent and number not in absent]
            types |= dict.fromkeys(present[:gpus])
            gpus -= min(gpus, len(present))
        return tuple(types)

    def nodes_for(self, gpus: int) -> int:
        """Return how many nodes, from the first on, hold so many GPUs; past the last one more of its kind would
        follow."""
        most = gpus + len(self.overrides) + sum(group.count for group in self.groups)
        return bisect.bisect_left(range(most), gpus, key=self.gpus_on)

    def _spans(self) -> tuple[tuple[int, NodeSpec], ...]:
        """Return the runs of alike nodes: the number after the last of each, and its kind."""
        if self.node is not None:
            return ((self.n_nodes, self.node),)
        ends = itertools.accumulate(group.count for group in self.groups)
        return tuple(zip(ends, (group.node for group in self.groups), strict=True))


def _present(node: NodeSpec, absent: frozenset[int | None]) -> int:
    """Return the GPUs of a node that are not ``absent``; None: all are."""
    return 0 if None in absent else node.gpus.count - sum(gpu is not None and gpu < node.gpus.count for gpu in absent)


def _problems(spec: ClusterSpec) -> Iterator[InputError]:
    """Yield the contradictions between sections. Node numbers count only once ``nodes`` has been given."""
    if spec.n_gpus > MAX_GPUS:
        allowed = f"at most {MAX_GPUS:,} GPUs"
        yield InputError(f"makes {spec.n_gpus:,} GPUs", key="nodes", found=spec.n_nodes, allowed=allowed)
    if spec.fixed_nodes and spec.nodes != spec.fixed_nodes:
        source = "groups make" if spec.groups else "the shape of the fabric makes"
        allowed = f"{spec.fixed_nodes:,}"
        yield InputError(f"{source} {allowed} nodes", key="nodes", found=spec.nodes, allowed=allowed)
    kinds = (
        {"node": spec.node} if spec.node else {f"groups[{i}].node": group.node for i, group in enumerate(spec.groups)}
    )
    for key, node in kinds.items():
        for problem in node_problems(node):
            problem.key = key + str(problem.key).removeprefix("node")
            yield problem
        if spec.n_nodes > 1 and not node.nics.count:
            yield InputError("several nodes need network cards", key=f"{key}.nics.count", found=0, allowed=">= 1")
    yield from fabric_problems(spec.fabric)
    yield from _override_problems(spec)


def _override_problems(spec: ClusterSpec) -> Iterator[InputError]:
    """Yield names that are none, or of nodes and parts that do not exist, and overrides of one part twice."""
    first: dict[tuple[str, str, bool], int] = {}
    for index, override in enumerate(spec.overrides):
        part, name = named_part(override)
        key = f"overrides[{index}].{part}"
        yield from _name_problems(spec, name, part, key)
        missing = override.missing
        yield from _scale_problems(override, f"overrides[{index}]")
        if isinstance(override, NicOverride) and not missing:
            yield InputError("says nothing", key=f"overrides[{index}].missing", found=False, allowed="true")
        if first.setdefault((part, name, missing), index) != index:
            scale = {"gpu": "speed_scale", "link": "bandwidth_scale"}.get(part, "missing")
            message = f"overrides[{first[part, name, missing]}] is of it too, and only one {scale} can be meant"
            yield InputError(message, key=key, found=name, fix="one override of it")
    if spec.nodes is not None and spec.n_gpus < 1 and spec.overrides:
        yield InputError("leave no GPU", key="overrides", allowed="at least one GPU that is not missing")


def _scale_problems(override: Override, key: str) -> Iterator[InputError]:
    """Yield the error of a GPU or link that is both slow and missing, or neither."""
    message = "must be given, or missing: true, one of the two"
    match override:
        case GpuOverride() if override.missing is override.is_scaled:
            yield InputError(message, key=f"{key}.speed_scale", found=override.speed_scale)
        case LinkOverride() if override.missing is (override.bandwidth_scale is not None):
            allowed = ">= 1e-06, <= 1,000,000"
            yield InputError(message, key=f"{key}.bandwidth_scale", found=override.bandwidth_scale, allowed=allowed)
        case LinkOverride() if override.missing and ":" in override.link:
            fix = override.link.partition(":")[0]
            yield InputError(
                "is one direction, and a link is dead both ways", key=f"{key}.link", found=override.link, fix=fix
            )


def _name_problems(spec: ClusterSpec, name: str, part: str, key: str) -> Iterator[InputError]:
    numbers = re.match(r"node(\d{1,9}|\*)\.(?:(?:gpu|nic)(\d{1,9})$)?", name)
    noun = {"gpu": "GPU", "nic": "network card", "link": "link"}[part]
    match = PART_NAME.fullmatch(name)
    if part != "link" and (not match or match[2] != part):
        allowed = f"node<i>.{part}<j>, such as node1.{part}4, or * for a number"
        yield InputError(f"is no name of a {noun}", key=key, found=name, allowed=allowed)
    elif numbers and numbers[1] != "*" and spec.nodes is not None and int(numbers[1]) >= spec.nodes:
        yield InputError("this node does not exist", key=key, found=name, allowed=f"node0 to node{spec.nodes - 1}")
    elif part != "link" and match and match[3] != "*":
        kinds = spec.kinds if match[1] == "*" else [spec.node_at(int(match[1]))]
        count = max(kind.gpus.count if part == "gpu" else kind.nics.count for kind in kinds)
        if int(match[3]) >= count:
            allowed = f"{part}0 to {part}{count - 1}" if count else f"none: its nodes have no {noun}"
            yield InputError(f"this {noun} does not exist", key=key, found=name, allowed=allowed)
