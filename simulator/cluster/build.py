"""A `Cluster` built from its description."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from simulator.cluster import names
from simulator.cluster.background import with_background
from simulator.cluster.cluster import Cluster
from simulator.cluster.cut_off import ThinnedNode, overrides_without_cut_off
from simulator.cluster.dead_links import dead_by_node, dead_links, without_trunks
from simulator.cluster.gpu import Gpu
from simulator.cluster.inner_routes import NoWayError
from simulator.cluster.link import Link
from simulator.cluster.node import NodeLayout
from simulator.cluster.parts import ClusterGpus, ClusterLinks
from simulator.errors import InputError, located
from simulator.fabrics import Switches, switches
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.hardware.node import NodeSpec
from simulator.hardware.overrides import GpuOverride, LinkOverride, missing_parts, named_part
from simulator.hardware.transport import TransportKind

#: Seconds that one more switch adds to a route: half of what crossing leaf-spine-leaf costs over staying under a leaf.
#: These are 3.7 and 2.8 us on InfiniBand, 5.6 and 3.6 us on RoCE (arXiv 2505.09343, table 5). TCP crosses the same
#: Ethernet switches as RoCE.
SWITCH_LATENCY_s: dict[TransportKind, float] = {"infiniband": 0.45e-6, "roce": 1.0e-6, "tcp": 1.0e-6}


def build_cluster(spec: ClusterSpec, nodes: int | None = None) -> Cluster:
    """Return the cluster that ``spec`` describes, with ``nodes`` nodes if given.

    Raises `InputError` where the fabric does not hold the nodes, or an override names what does not exist.
    """
    if nodes is not None:
        spec = replace(spec, nodes=nodes)
    specs = spec.node_specs
    layouts = _layouts(spec, specs)
    ports_of = {id(node): (node.nics.bandwidth_bps / 8,) * node.nics.count for node in spec.kinds_in_order}
    ports = tuple([ports_of[id(node)] for node in specs])
    fabric = switches(spec.fabric, ports) if any(ports) else Switches(((),) * spec.n_nodes, (), 0)
    if any(isinstance(override, LinkOverride) and override.missing for override in spec.overrides):
        whole = _layouts(replace(spec, overrides=()), specs)  # links of missing parts may be named too
        dead = dead_links(spec, _links(spec, whole, fabric))
        layouts, fabric = _layouts(spec, specs, dead), without_trunks(fabric, dead)
    first_gpu = _firsts(len(layout.gpus) for layout in layouts)
    links = _links(spec, layouts, fabric)
    scaled_gpus, scaled_links = _changes(spec, ClusterGpus(specs, layouts, first_gpu, {}), links)
    cluster = Cluster(
        spec=spec,
        gpus=ClusterGpus(specs, layouts, first_gpu, scaled_gpus),
        links=ClusterLinks(layouts, links.first, fabric, links.trunks, scaled_links),
        layouts=layouts,
        first_gpu=first_gpu,
        first_link=tuple(links.first),
        switches=fabric,
    )
    return with_background(cluster, spec.background)


def _firsts(counts: Iterable[int]) -> tuple[int, ...]:
    """Return the number of the first part of every node, which have so many parts."""
    return tuple(itertools.accumulate(counts, initial=0))[:-1]


def _layouts(
    spec: ClusterSpec, specs: Sequence[NodeSpec], dead: frozenset[str] = frozenset()
) -> tuple[NodeLayout, ...]:
    """Return the layout of every node, one for all that are alike.

    ``dead``: names of links that are not there. Raises `InputError` where one of several nodes has no NIC left, and
    where dead links leave no way inside a node.
    """
    nodes = _thinned_nodes(spec, specs, dead)
    layouts: dict[ThinnedNode, NodeLayout] = {}
    transport = spec.fabric.transport
    for thinned in dict.fromkeys({id(node): node for node in nodes}.values()):
        n = nodes.index(thinned)
        with located(partial(_in_node, n)):
            try:
                layouts[thinned] = thinned.layout(transport)
            except NoWayError as failure:
                raise InputError(failure.message, fix=overrides_without_cut_off(nodes, transport)) from None
        if spec.n_nodes > 1 and not layouts[thinned].nics:
            raise InputError("leave no network card to this node", key="overrides", found=f"node{n}")
    layout_of = {id(node): layouts[node] for node in {id(node): node for node in nodes}.values()}
    return tuple([layout_of[id(node)] for node in nodes])


def _thinned_nodes(spec: ClusterSpec, specs: Sequence[NodeSpec], dead: frozenset[str]) -> list[ThinnedNode]:
    """Return every node without what is missing; those that no override names alone share one of their kind."""
    missing_by_node = {"gpu": missing_parts(spec.overrides, "gpu"), "nic": missing_parts(spec.overrides, "nic")}
    dead_in = dead_by_node(dead)

    def thinned(node: NodeSpec, number: int | None) -> ThinnedNode:
        missing = {
            f"{part}{i}"
            for part, count in (("gpu", node.gpus.count), ("nic", node.nics.count))
            for at in dict.fromkeys((number, None))
            for index in missing_by_node[part].get(at, ())
            for i in (range(count) if index is None else (index,))
        }
        cut = dead_in.get(number, frozenset()) if number is not None else frozenset[str]()
        missing |= {name for k in range(node.nics.count) for name in (f"nic{k}",) if cut & {name, f"{name}.pcie"}}
        return ThinnedNode(node, frozenset(missing), cut)

    shared = {id(node): thinned(node, None) for node in spec.kinds_in_order}
    nodes = [shared[id(node)] for node in specs]
    for number in {*dead_in, *(at for by_node in missing_by_node.values() for at in by_node)}:
        if number is not None and number < len(nodes):
            nodes[number] = thinned(specs[number], number)
    return nodes


def _in_node(node: int, key: str) -> tuple[None, str]:
    """Return the place of an error inside a node."""
    return None, f"overrides (node{node})"


def _links(spec: ClusterSpec, layouts: tuple[NodeLayout, ...], fabric: Switches) -> ClusterLinks:
    """Return all links, as no override changes them."""
    first_link = _firsts(len(layout.edges) for layout in layouts)
    kind, trunks, number = spec.fabric.transport, [], itertools.count(first_link[-1] + len(layouts[-1].edges))
    for trunk in fabric.trunks:
        latency_s = SWITCH_LATENCY_s[kind] + trunk.latency_s
        for way, src, dst in (("tx", trunk.lower, trunk.upper), ("rx", trunk.upper, trunk.lower)):
            name = f"{trunk.name}:{way}"
            trunks.append(Link(next(number), name, kind, src, dst, trunk.bandwidth_Bps, latency_s))
    return ClusterLinks(layouts, first_link, fabric, trunks, {})


def _changes(spec: ClusterSpec, gpus: ClusterGpus, links: ClusterLinks) -> tuple[dict[int, Gpu], dict[int, Link]]:
    """Return the GPUs and links that ``spec.overrides`` scale. A link's name without ``:tx`` or ``:rx`` means both."""
    scaled_gpus: dict[int, Gpu] = {}
    scaled_links: dict[int, Link] = {}
    for index, override in enumerate(spec.overrides):
        key, name = named_part(override)
        if isinstance(override, LinkOverride) and override.bandwidth_scale is not None:
            for at in names.matching(name, names.link_names(links), f"overrides[{index}].{key}", "link"):
                link = scaled_links.get(at, links[at])
                scaled_links[at] = replace(link, bandwidth_Bps=link.bandwidth_Bps * override.bandwidth_scale)
        elif isinstance(override, GpuOverride) and override.is_scaled:
            speed, host, autograd = override.scales
            for at in names.matching(name, names.gpu_names(gpus), f"overrides[{index}].{key}", "GPU"):
                gpu = scaled_gpus.get(at, gpus[at])
                scaled_gpus[at] = replace(
                    gpu,
                    speed_scale=gpu.speed_scale * speed,
                    host_speed=gpu.host_speed * host,
                    autograd_speed=gpu.autograd_speed * autograd,
                )
    return scaled_gpus, scaled_links
