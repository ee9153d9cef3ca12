"""Contradictions inside the section ``node`` of a cluster file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from simulator.bounds import MAX_IN_NODE, MIN_BANDWIDTH
from simulator.errors import InputError
from simulator.hardware.node import NodeSpec, PcieSlot
from simulator.input_files import closest

_TREE = "node.pcie.tree"
#: Names of switches or sockets that a message lists.
_LISTED = 12


def node_problems(node: NodeSpec) -> Iterator[InputError]:
    """Yield the contradictions between the sections of a node; keys are those of a cluster file."""
    if node.gpus.count > MAX_IN_NODE:
        allowed = f"at most {MAX_IN_NODE} together"
        yield InputError("are more GPUs than a node holds", key="node.gpus", found=node.gpus.count, allowed=allowed)
    yield from _bandwidth_problems(node)
    yield from _socket_problems(node)
    yield from _drive_problems(node)
    yield from _nvlink_problems(node)
    if node.pcie.tree:
        yield from _tree_problems(node)


def _bandwidth_problems(node: NodeSpec) -> Iterator[InputError]:
    for key, bandwidth in (
        ("node.sockets.bandwidth_Bps", node.sockets.bandwidth_Bps),
        ("node.nvlink.bandwidth_Bps", node.nvlink.bandwidth_Bps),
        ("node.nics.bandwidth_bps", node.nics.bandwidth_bps),
        ("node.nvme.read_Bps", node.nvme.read_Bps),
        ("node.nvme.write_Bps", node.nvme.write_Bps),
    ):
        if 0 < bandwidth < MIN_BANDWIDTH:
            yield InputError("is too slow to simulate", key=key, found=bandwidth, allowed=f"0, or >= {MIN_BANDWIDTH:,}")


def _socket_problems(node: NodeSpec) -> Iterator[InputError]:
    if node.sockets.count > 1 and not node.sockets.bandwidth_Bps:
        yield InputError("must be given where there are several", key="node.sockets.bandwidth_Bps", allowed="> 0")
    for name in ("bandwidth_Bps", "latency_s"):
        if node.sockets.count == 1 and getattr(node.sockets, name):
            yield InputError(
                "is between sockets, and there is one",
                key=f"node.sockets.{name}",
                found=getattr(node.sockets, name),
                fix="sockets: {count: 2}",
            )


def _drive_problems(node: NodeSpec) -> Iterator[InputError]:
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


def _nvlink_problems(node: NodeSpec) -> Iterator[InputError]:
    link, key = node.nvlink, "node.nvlink"
    if link.kind == "none" and link.bandwidth_Bps:
        fix = "kind: nvswitch, mesh, pairs or links"
        yield InputError("is given, but kind is none", key=f"{key}.bandwidth_Bps", found=link.bandwidth_Bps, fix=fix)
    if link.kind != "none" and not link.bandwidth_Bps:
        yield InputError(f"must be given for {link.kind}", key=f"{key}.bandwidth_Bps", allowed="> 0")
    if link.sharp and link.kind != "nvswitch":
        fix = "sharp: false, or kind: nvswitch where there are switches"
        yield InputError(f"only NVSwitches sum up, and kind is {link.kind}", key=f"{key}.sharp", found=True, fix=fix)
    if link.kind == "pairs" and node.gpus.count % 2:
        fix = "nvlink: {kind: links, links: the pairs}" if node.gpus.count > 1 else "nvlink: null"
        what = "NVLink pairs need an even number of GPUs"
        yield InputError(what, key="node.gpus.count", found=node.gpus.count, fix=fix)
    if link.kind == "links" and not link.links:
        yield InputError("must be given for links", key=f"{key}.links", allowed="such as [{gpus: [0, 1], count: 4}]")
    if link.kind != "links" and link.links:
        yield InputError("are of kind links alone", key=f"{key}.links", found=link.kind, fix="kind: links")
    yield from _bundle_problems(node)


def _bundle_problems(node: NodeSpec) -> Iterator[InputError]:
    first: dict[tuple[int, ...], int] = {}
    for i, bundle in enumerate(node.nvlink.links):
        key, ends = f"node.nvlink.links[{i}].gpus", tuple(sorted(bundle.gpus))
        for gpu in ends:
            if not 0 <= gpu < node.gpus.count:
                yield InputError("this GPU does not exist", key=key, found=gpu, allowed=f"0 to {node.gpus.count - 1}")
        if ends[0] == ends[1]:
            yield InputError("a GPU has no link to itself", key=key, found=ends[0], fix="two different GPUs")
        elif first.setdefault(ends, i) != i:
            fix = "one entry, whose count is that of all their links"
            yield InputError(f"links[{first[ends]}] joins them already", key=key, found=list(ends), fix=fix)


def _tree_problems(node: NodeSpec) -> Iterator[InputError]:
    for value, key in ((node.pcie.gpus_per_switch, "pcie.gpus_per_switch"), (node.nics.attach, "nics.attach")):
        if value is not None:
            message, fix = "is given beside pcie.tree, which says it", f"leave {key} out"
            yield InputError(message, key=f"node.{key}", found=value, fix=fix)
    counts = {"gpu": node.gpus.count, "nic": node.nics.count}
    switches = [name for name in node.pcie.tree if re.fullmatch(r"pcie\d{1,9}", name)]
    above = [*switches, *(f"cpu{i}" for i in range(node.sockets.count))]
    for name, slot in node.pcie.tree.items():
        yield from _slot_problems(name, slot, counts, switches, above)
    yield from _missing_slots(node.pcie.tree.keys(), counts)
    yield from _switch_problems(node, switches)


def _slot_problems(
    name: str, slot: PcieSlot, counts: dict[str, int], switches: list[str], above: list[str]
) -> Iterator[InputError]:
    """Yield the problems of one entry of the tree. ``counts``: GPUs and NICs of the node; ``above``: the switches and
    sockets that something may be plugged into."""
    family = name.rstrip("0123456789")
    number = name[len(family) :]
    if name not in switches and (family not in counts or not number or f"{family}{int(number)}" != name):
        allowed = "gpu0 ..., nic0 ..., pcie0 ..."
        yield InputError("is no name of a GPU, NIC or PCIe switch", key=f"{_TREE}.{name}", found=name, allowed=allowed)
    elif family in counts and int(number) >= counts[family]:
        names = f"{family}0 to {family}{counts[family] - 1}" if counts[family] else f"none: {family}s.count is 0"
        yield InputError("does not exist", key=f"{_TREE}.{name}", found=name, allowed=names)
    if slot.at not in above:
        near = closest(slot.at, above)
        yield InputError(
            "is no switch of this tree, and no socket",
            key=f"{_TREE}.{name}.at",
            found=slot.at,
            allowed=", ".join(above[:_LISTED]) + (" ..." if len(above) > _LISTED else ""),
            fix=near and f"at: {near}",
        )
    if slot.bandwidth_Bps is not None and (slot.generation is not None or slot.lanes is not None):
        fix = "either the bandwidth, or generation and lanes"
        yield InputError("is given twice", key=f"{_TREE}.{name}.bandwidth_Bps", found=slot.bandwidth_Bps, fix=fix)


def _missing_slots(names: Iterable[str], counts: dict[str, int]) -> Iterator[InputError]:
    tree = set(names)
    for family, count in counts.items():
        missing = [f"{family}{i}" for i in range(min(count, 1000)) if f"{family}{i}" not in tree]
        if missing:
            shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
            fix = f"{missing[0]}: cpu0, or the switch that it is plugged into"
            yield InputError(f"lacks {shown}", key=_TREE, fix=fix)


def _switch_problems(node: NodeSpec, switches: list[str]) -> Iterator[InputError]:
    """Yield switches that hang under themselves, and those with nothing plugged in."""
    tree = node.pcie.tree
    for name in switches:
        path = [name]
        while (up := tree[path[-1]].at) in tree and up not in path:
            path.append(up)
        if up == name:
            circle = " in ".join([*path, name])
            yield InputError("hangs under itself", key=f"{_TREE}.{name}.at", found=circle, fix="at: cpu0")
    used = Counter(slot.at for slot in tree.values())
    for name in switches:
        if not used[name]:
            yield InputError("has nothing plugged in", key=f"{_TREE}.{name}", found=name, fix=f"leave {name} out")
