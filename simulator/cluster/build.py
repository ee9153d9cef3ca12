"""From a cluster file to a `Cluster`."""

from __future__ import annotations

from dataclasses import replace

from simulator.cluster.background import with_background
from simulator.cluster.cluster import Cluster, Gpu, Link
from simulator.cluster.node import NodeLayout, lay_out
from simulator.config.cluster import ClusterSpec, GpuOverride, cluster_problems
from simulator.config.files import closest, raise_all
from simulator.config.transport import TransportKind
from simulator.errors import InputError
from simulator.fabrics import FABRICS, Switches

#: Seconds that one more switch adds to a route: half of what crossing leaf-spine-leaf costs over staying under one
#: leaf (arXiv 2505.09343, table 5: InfiniBand 2.8 and 3.7 us, RoCE 3.6 and 5.6 us). TCP crosses the same Ethernet
#: switches as RoCE.
SWITCH_LATENCY_s: dict[TransportKind, float] = {"infiniband": 0.45e-6, "roce": 1.0e-6, "tcp": 1.0e-6}


def build_cluster(spec: ClusterSpec, nodes: int | None = None) -> Cluster:
    """The cluster that ``spec`` describes, with ``nodes`` nodes where given.

    Raises `InputError` where the fabric does not hold the nodes, or an override names what does not exist.
    """
    if nodes is not None:
        spec = spec.model_copy(update={"nodes": nodes})
        raise_all(cluster_problems(spec))
    node, fabric = spec.node, spec.fabric
    layout = lay_out(node, fabric.transport)
    if node.nics.count:
        switches = FABRICS[fabric.kind](fabric, spec.nodes, node.nics.count, node.nics.bandwidth_bps / 8)
    else:
        switches = Switches(((),) * spec.nodes, (), 0)
    gpus = [Gpu(f"node{n}.gpu{g}", n, g, node.gpus.type) for n in range(spec.nodes) for g in range(node.gpus.count)]
    links = _links(spec, layout, switches)
    _override(spec, gpus, links)
    cluster = Cluster(spec=spec, gpus=tuple(gpus), links=tuple(links), layout=layout, switches=switches)
    return with_background(cluster, spec.background)


def _links(spec: ClusterSpec, layout: NodeLayout, switches: Switches) -> list[Link]:
    links: list[Link] = []
    for n in range(spec.nodes):
        prefix = f"node{n}."
        for edge in layout.edges:
            links.append(
                Link(
                    len(links),
                    prefix + edge.name,
                    edge.kind,
                    prefix + edge.src,
                    prefix + edge.dst,
                    edge.bandwidth_Bps,
                    edge.latency_s,
                )
            )
        for k, (out, back) in enumerate(zip(layout.port_out, layout.port_in, strict=True)):
            base, leaf = n * len(layout.edges), switches.leaf(n, k)
            links[base + out] = replace(links[base + out], dst=leaf)
            links[base + back] = replace(links[base + back], src=leaf)
    kind = spec.fabric.transport
    for trunk in switches.trunks:
        for name, src, dst in (("tx", trunk.lower, trunk.upper), ("rx", trunk.upper, trunk.lower)):
            links.append(
                Link(
                    len(links),
                    f"{trunk.lower}.up:{name}",
                    kind,
                    src,
                    dst,
                    trunk.bandwidth_Bps,
                    SWITCH_LATENCY_s[kind],
                )
            )
    return links


def _override(spec: ClusterSpec, gpus: list[Gpu], links: list[Link]) -> None:
    """Apply ``spec.overrides`` in place. A link's name without ``:tx`` or ``:rx`` means both directions."""
    if not spec.overrides:
        return
    named: dict[str, list[int]] = {}
    for link in links:
        named[link.name] = [link.index]
        both, way, _ = link.name.partition(":")
        if way:
            named.setdefault(both, []).append(link.index)
    gpu_at = {gpu.name: i for i, gpu in enumerate(gpus)}
    for index, override in enumerate(spec.overrides):
        if isinstance(override, GpuOverride):
            if override.gpu not in gpu_at:
                raise _unknown(f"overrides[{index}].gpu", override.gpu, list(gpu_at), "GPU")
            at = gpu_at[override.gpu]
            gpus[at] = replace(gpus[at], speed_scale=gpus[at].speed_scale * override.speed_scale)
        else:
            if override.link not in named:
                raise _unknown(f"overrides[{index}].link", override.link, list(named), "link")
            for at in named[override.link]:
                links[at] = replace(links[at], bandwidth_Bps=links[at].bandwidth_Bps * override.bandwidth_scale)


def _unknown(key: str, found: str, known: list[str], what: str) -> InputError:
    near = closest(found, known)
    return InputError(f"this {what} does not exist", key=key, found=found, fix=near and f"{what.lower()}: {near}")
