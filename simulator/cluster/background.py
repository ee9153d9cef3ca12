"""Traffic of others on the links of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from simulator.cluster.cluster import BackgroundFlow, Cluster, Spread
from simulator.config.background import Background, Flow
from simulator.config.files import closest
from simulator.errors import InputError


def with_background(cluster: Cluster, flows: Sequence[Background]) -> Cluster:
    """The cluster with ``flows`` on its links. Raises `InputError` where one names what does not exist."""
    if not flows:
        return cluster
    link_at = {link.name: link.index for link in cluster.links}
    found = [one for number, flow in enumerate(flows) for one in _of(flow, cluster, link_at, f"background[{number}]")]
    return replace(cluster, background=tuple(found))


def _of(flow: Background, cluster: Cluster, link_at: Mapping[str, int], key: str) -> Iterator[BackgroundFlow]:
    if isinstance(flow, Flow):
        name = f"{flow.source} to {flow.to}"
        yield BackgroundFlow(name, _loads(flow, cluster, link_at, key), flow.bandwidth_Bps)
        return
    names = [name for name in (flow.link, f"{flow.link}:tx", f"{flow.link}:rx") if name in link_at]
    if not names:
        raise _unknown(f"{key}.link", flow.link, link_at, "link")
    for name in names:
        link = cluster.links[link_at[name]]
        yield BackgroundFlow(name, ((link.index, 1.0),), flow.share * link.bandwidth_Bps)


def _loads(flow: Flow, cluster: Cluster, link_at: Mapping[str, int], key: str) -> Spread:
    """The links between two network cards on different nodes, or between two GPUs."""
    gpu_at = {gpu.name: number for number, gpu in enumerate(cluster.gpus)}
    ends = {f"{key}.from": flow.source, f"{key}.to": flow.to}
    if all(end in gpu_at for end in ends.values()):
        loads = cluster.spread(gpu_at[flow.source], gpu_at[flow.to])
        if not loads:
            raise InputError("must be another GPU", key=f"{key}.to", found=flow.to)
        return loads
    nics = {name.removesuffix(":tx"): index for name, index in link_at.items() if _is_port(name)}
    for where, end in ends.items():
        if end in gpu_at:
            raise InputError("is a GPU, and the other end is none", key=where, found=end, fix="two GPUs, or two cards")
        if end not in nics:
            raise _unknown(where, end, [*nics, *gpu_at], "network card or GPU")
    (node_a, nic_a), (node_b, nic_b) = (_numbers(end) for end in ends.values())
    if node_a == node_b:
        raise InputError("must be on another node", key=f"{key}.to", found=flow.to)
    return (
        (nics[flow.source], 1.0),
        *cluster.trunks_between(node_a, nic_a, node_b, nic_b),
        (link_at[f"{flow.to}:rx"], 1.0),
    )


def _is_port(name: str) -> bool:
    return name.endswith(":tx") and name.count(".") == 1 and ".nic" in name


def _numbers(nic: str) -> tuple[int, int]:
    node, card = nic.split(".")
    return int(node.removeprefix("node")), int(card.removeprefix("nic"))


def _unknown(key: str, found: str, known: Mapping[str, int] | Sequence[str], what: str) -> InputError:
    near = closest(found, list(known))
    return InputError(f"this {what} does not exist", key=key, found=found, fix=near)
