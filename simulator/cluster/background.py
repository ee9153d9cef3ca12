"""Traffic of others on the links of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from simulator.cluster import names
from simulator.cluster.cluster import BackgroundFlow, Cluster
from simulator.cluster.link import Spread
from simulator.cluster.names import PartNames
from simulator.errors import InputError
from simulator.hardware.traffic import BackgroundTraffic, TrafficBetween


def with_background(cluster: Cluster, background: Sequence[BackgroundTraffic]) -> Cluster:
    """Return the cluster with traffic of others on its links. Raises `InputError` where one names what does not
    exist."""
    if not background:
        return cluster
    links = names.link_names(cluster.links)
    flows = [
        flow
        for number, traffic in enumerate(background)
        for flow in _flows(traffic, cluster, links, f"background[{number}]")
    ]
    return replace(cluster, background=tuple(flows))


def _flows(traffic: BackgroundTraffic, cluster: Cluster, links: PartNames, key: str) -> Iterator[BackgroundFlow]:
    if isinstance(traffic, TrafficBetween):
        name = f"{traffic.from_} to {traffic.to}"
        yield BackgroundFlow(name, _loads(traffic, cluster, links, key), traffic.bandwidth_Bps)
        return
    for index in names.matching(traffic.link, links, f"{key}.link", "link"):
        link = cluster.links[index]
        yield BackgroundFlow(link.name, ((index, 1.0),), traffic.share * link.bandwidth_Bps)


def _loads(traffic: TrafficBetween, cluster: Cluster, links: PartNames, key: str) -> Spread:
    """Return the links between two network cards on different nodes, or between two GPUs."""
    gpu_at = {gpu.name: number for number, gpu in enumerate(cluster.gpus)}
    ends = {f"{key}.from": traffic.from_, f"{key}.to": traffic.to}
    if all(end in gpu_at for end in ends.values()):
        loads = cluster.spread(gpu_at[traffic.from_], gpu_at[traffic.to])
        if not loads:
            raise InputError("must be another GPU", key=f"{key}.to", found=traffic.to)
        return loads
    nics = {name.removesuffix(":tx"): index for name, (index, *_) in links.items() if _is_port(name)}
    for where, end in ends.items():
        if end in gpu_at:
            raise InputError("is a GPU, and the other end is none", key=where, found=end, fix="two GPUs, or two cards")
        if end not in nics:
            raise names.unknown_name(where, end, [*nics, *gpu_at], "network card or GPU")
    (node_a, nic_a), (node_b, nic_b) = (_numbers(end) for end in ends.values())
    if node_a == node_b:
        raise InputError("must be on another node", key=f"{key}.to", found=traffic.to)
    return (
        (nics[traffic.from_], 1.0),
        *cluster.trunks_between(node_a, nic_a, node_b, nic_b),
        (links[f"{traffic.to}:rx"][0], 1.0),
    )


def _is_port(name: str) -> bool:
    return name.endswith(":tx") and name.count(".") == 1 and ".nic" in name


def _numbers(nic: str) -> tuple[int, int]:
    node, card = nic.split(".")
    return int(node.removeprefix("node")), int(card.removeprefix("nic"))
