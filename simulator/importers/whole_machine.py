"""One cluster from several files on one machine: a topology, and what commands print on GPUs, cards and jobs.

What a topology says counts. Facts of the other files go where it has only an assumption. Without a topology the machine
is completed from a shipped cluster that has GPUs of its type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.importers import imported
from simulator.importers.imported import Imported
from simulator.importers.machine_facts import GpuFacts, MachineFacts, NicFacts
from simulator.importers.machines import MACHINES, machine_with
from simulator.units import counted

#: Beginning of a type of GPU -> bytes/s of one NVLink per direction, where it is not `imported.NVLINK_Bps`. These are
#: Blackwell's (B200 and B300 data sheets), and bridges of four links (data sheets of RTX 3090, A40 and RTX A6000).
_LINK_Bps = {"b200": 50e9, "b300": 50e9, "gb": 50e9, "rtx-3090": 14.0625e9, "rtx-a6000": 14.0625e9, "a40": 14.0625e9}


def merged_facts(facts: Sequence[MachineFacts], paths: Sequence[Path]) -> MachineFacts:
    """Return the facts of several files as one. Raises `InputError` where two are of one command."""
    by_form: dict[str, Path] = {}
    for one, path in zip(facts, paths, strict=True):
        if one.form in by_form:
            raise InputError(f"is of {one.form}, as is {by_form[one.form]}", file=path, fix="one of them")
        by_form[one.form] = path
    return MachineFacts(
        form=", ".join(by_form),
        gpus=next((one.gpus for one in facts if one.gpus), None),
        nics=next((one.nics for one in facts if one.nics), None),
        nodes=next((one.nodes for one in facts if one.nodes), None),
        assumed=tuple(text for one in facts for text in one.assumed),
        left_out=tuple(text for one in facts for text in one.left_out),
    )


def completed(facts: MachineFacts, path: Path) -> Imported:
    """Return a cluster of facts alone, completed from a shipped one. Raises `InputError` where no file names GPUs."""
    gpus = facts.gpus
    if gpus is None:
        fix = "add the output of nvidia-smi -q, of nvidia-smi topo -m, or NCCL's XML"
        raise InputError(f"says nothing of GPUs ({facts.form})", file=path, fix=fix)
    cluster: dict[str, Any] = {"name": path.stem}
    assumed = list(facts.assumed)
    (kind, count), *more = gpus.types.items()
    machine = None if more else machine_with(kind, count)
    node: dict[str, Any] = {"gpus": _gpu_section(gpus)}
    if machine is not None:
        cluster |= {"like": machine.name, "nodes": facts.nodes or 1, "node": node}
        sections = ["node.nvlink", *(["node.nics", "fabric"] if machine.network else [])]
        assumed += [f"{section}: as in {machine.name}, for GPUs of type {kind}" for section in sections]
        assumed.append(f"node.pcie: devices are plugged in as in {machine.name}")
    else:
        node["pcie"] = {"generation": gpus.generation or 4}
        assumed.append(f"node.nvlink: none, {_why_no_machine(gpus)}")
        if gpus.generation is None:
            assumed.append("node.pcie.generation: 4, as the file does not say it")
        cluster |= {"nodes": facts.nodes or 1, "node": node}
    if machine is None or not machine.tree:
        _put_pcie(node, gpus)
    if facts.nics is not None:
        _put_network(cluster, facts.nics, assumed, has_fabric=machine is not None and machine.network)
    elif facts.nodes and facts.nodes > 1 and not (machine and machine.network):
        fix = "add the output of ibstat"
        raise InputError("is of several nodes, and no file says what joins them", file=path, found=facts.nodes, fix=fix)
    return Imported(facts.form, cluster, (), tuple(assumed), facts.left_out)


def _why_no_machine(gpus: GpuFacts) -> str:
    """Return why no shipped cluster completes a machine."""
    (kind, count), *more = gpus.types.items()
    if more:
        return "as no shipped cluster has GPUs of several types"
    most = max((machine.gpus for machine in MACHINES.get(kind, ())), default=0)
    if most:
        return f"as shipped clusters have at most {counted(most, 'GPU')} of type {kind} in a node, and this has {count}"
    return f"as no shipped cluster has GPUs of type {kind}"


def _gpu_section(gpus: GpuFacts) -> Any:
    """Return the section ``gpus``; a list where there are several types."""
    sections = [{"type": kind, "count": count} for kind, count in gpus.types.items()]
    return sections if len(sections) > 1 else sections[0]


def _put_pcie(node: dict[str, Any], gpus: GpuFacts) -> None:
    """Put the PCIe link that GPUs have, where the file says it."""
    link = {"generation": gpus.generation, "lanes": gpus.lanes}
    section = {**node.get("pcie", {}), **{key: value for key, value in link.items() if value is not None}}
    if section:
        node["pcie"] = section


def _put_network(cluster: dict[str, Any], nics: NicFacts, assumed: list[str], *, has_fabric: bool) -> None:
    """Put network cards and what joins them, and take out what was assumed of either."""
    assumed[:] = [text for text in assumed if text.split(":")[0] != "node.nics"]
    latency_s = imported.NIC_LATENCY_s[nics.transport]
    cluster["node"]["nics"] = {"count": len(nics.names), "bandwidth_bps": nics.bandwidth_bps, "latency_s": latency_s}
    cluster["fabric"] = {"transport": nics.transport}
    assumed.append(f"node.nics.latency_s: {latency_s:g} s, usual of {nics.transport} under one switch")
    if not has_fabric:
        cluster["fabric"]["kind"] = "rail_fat_tree"
        assumed.append("fabric.kind: a rail-optimised fat tree, as the files are of one node")


def with_facts(topology: Imported, facts: MachineFacts, path: Path) -> Imported:
    """Return a machine's topology with the facts of other files in place of its assumptions.

    Raises `InputError` where they contradict each other, or the topology is of a fabric without its nodes.
    """
    if topology.hosts:
        fix = "llmsim import the other files --out mine.yaml, then this one --node mine.yaml"
        raise InputError("is of the network alone, and is read by itself", file=path, fix=fix)
    cluster = {**topology.cluster, "node": dict(topology.cluster["node"])}
    node = cluster["node"]
    assumed = dict(_by_key(topology.assumed))
    if facts.gpus is not None:
        _put_gpus(node, facts.gpus, assumed, path)
    if facts.nics is not None:
        _put_nics(cluster, facts.nics, assumed, path)
    if facts.nodes is not None:
        cluster["nodes"] = facts.nodes
    texts = (*assumed.values(), *facts.assumed)
    form = f"{topology.format}, {facts.form}" if facts.form else topology.format
    return replace(
        topology, format=form, cluster=cluster, assumed=texts, left_out=(*topology.left_out, *facts.left_out)
    )


def _by_key(texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(text.split(":")[0], text) for text in texts]


def _put_gpus(node: dict[str, Any], gpus: GpuFacts, assumed: dict[str, str], path: Path) -> None:
    """Put the type of GPU, and what depends on it.

    Raises `InputError` where the topology has others, or not so many.
    """
    section = node["gpus"]
    if gpus.count != section["count"]:
        message, count = "has another number of GPUs than nvidia-smi -q", section["count"]
        raise InputError(message, file=path, found=count, allowed=gpus.count)
    (kind, _), *more = gpus.types.items()
    if "node.gpus.type" not in assumed and (more or section["type"] != kind):
        message = "has another type of GPU than nvidia-smi -q"
        raise InputError(message, file=path, found=section["type"], allowed=", ".join(gpus.types))
    node["gpus"] = _gpu_section(gpus)
    assumed.pop("node.gpus.type", None)
    if gpus.generation is not None and "node.pcie.generation" in assumed:
        node["pcie"] = {**node["pcie"], "generation": gpus.generation, **({"lanes": gpus.lanes} if gpus.lanes else {})}
        assumed.pop("node.pcie.generation")
    link_Bps = next((rate for name, rate in _LINK_Bps.items() if kind.startswith(name)), imported.NVLINK_Bps)
    if "node.nvlink.bandwidth_Bps" in assumed and not more:
        nvlink = node["nvlink"]
        node["nvlink"] = {**nvlink, "bandwidth_Bps": nvlink["bandwidth_Bps"] * link_Bps / imported.NVLINK_Bps}
        assumed["node.nvlink.bandwidth_Bps"] = f"node.nvlink.bandwidth_Bps: {link_Bps / 1e9:g} GB/s per link of {kind}"


def _put_nics(cluster: dict[str, Any], nics: NicFacts, assumed: dict[str, str], path: Path) -> None:
    """Put the speed and kind of the network cards. Raises `InputError` where the topology has not so many of them."""
    section: Mapping[str, Any] = cluster["node"].get("nics", {"count": 0})
    if section["count"] != len(nics.names):
        message, allowed = "has another number of network cards than ibstat", ", ".join(nics.names)
        raise InputError(message, file=path, found=section["count"], allowed=f"{len(nics.names)}: {allowed}")
    if "node.nics.bandwidth_bps" not in assumed:
        return
    latency_s = imported.NIC_LATENCY_s[nics.transport]
    cluster["node"]["nics"] = {**section, "bandwidth_bps": nics.bandwidth_bps, "latency_s": latency_s}
    cluster["fabric"] = {**cluster["fabric"], "transport": nics.transport}
    for key in ("node.nics.bandwidth_bps", "fabric.transport"):
        assumed.pop(key, None)
    assumed["node.nics.latency_s"] = f"node.nics.latency_s: {latency_s:g} s, usual of {nics.transport} under one switch"
