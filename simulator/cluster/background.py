"""Traffic of others on the links of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from simulator.cluster import names
from simulator.cluster.cluster import BackgroundFlow, Cluster, Spread
from simulator.config.background import Background, Flow
from simulator.errors import InputError


def with_background(cluster: Cluster, flows: Sequence[Background]) -> Cluster:
    """The cluster with ``flows`` on its links. Raises `InputError` where one names what does not exist."""
    if not flows:
        return cluster
    known = names.of_links(cluster.links)
    found = [one for number, flow in enumerate(flows) for one in _of(flow, cluster, known, f"background[{number}]")]
    return replace(cluster, background=tuple(found))


def _of(flow: Background, cluster: Cluster, known: Mapping[str, list[int]], key: str) -> Iterator[BackgroundFlow]:
    if isinstance(flow, Flow):
        name = f"{flow.source} to {flow.to}"
        yield BackgroundFlow(name, _loads(flow, cluster, known, key), flow.bandwidth_Bps)
        return
    for index in names.meant(flow.link, known, f"{key}.link", "link"):
        link = cluster.links[index]
        yield BackgroundFlow(link.name, ((index, 1.0),), flow.share * link.bandwidth_Bps)


def _loads(flow: Flow, cluster: Cluster, known: Mapping[str, list[int]], key: str) -> Spread:
    """The links between two network cards on different nodes, or between two GPUs."""
    gpu_at = {gpu.name: number for number, gpu in enumerate(cluster.gpus)}
    ends = {f"{key}.from": flow.source, f"{key}.to": flow.to}
    if all(end in gpu_at for end in ends.values()):
        loads = cluster.spread(gpu_at[flow.source], gpu_at[flow.to])
        if not loads:
            raise InputError("must be another GPU", key=f"{key}.to", found=flow.to)
        return loads
    nics = {name.removesuffix(":tx"): index for name, (index, *_) in known.items() if _is_port(name)}
    for where, end in ends.items():
        if end in gpu_at:
            raise InputError("is a GPU, and the other end is none", key=where, found=end, fix="two GPUs, or two cards")
        if end not in nics:
            raise names.unknown(where, end, [*nics, *gpu_at], "network card or GPU")
    (node_a, nic_a), (node_b, nic_b) = (_numbers(end) for end in ends.values())
    if node_a == node_b:
        raise InputError("must be on another node", key=f"{key}.to", found=flow.to)
    return (
        (nics[flow.source], 1.0),
        *cluster.trunks_between(node_a, nic_a, node_b, nic_b),
        (known[f"{flow.to}:rx"][0], 1.0),
    )


def _is_port(name: str) -> bool:
    return name.endswith(":tx") and name.count(".") == 1 and ".nic" in name


def _numbers(nic: str) -> tuple[int, int]:
    node, card = nic.split(".")
    return int(node.removeprefix("node")), int(card.removeprefix("nic"))
