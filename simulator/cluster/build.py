"""A `Cluster` built from its description."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

from simulator.cluster import names
from simulator.cluster.background import with_background
from simulator.cluster.cluster import Cluster, Gpu
from simulator.cluster.cut_off import ThinnedNode, overrides_without_cut_off
from simulator.cluster.dead_links import dead_by_node, dead_links, without_trunks
from simulator.cluster.link import Link
from simulator.cluster.node import NodeLayout, NoWayError
from simulator.errors import InputError, located
from simulator.fabrics import Switches, switches
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.hardware.overrides import GpuOverride, LinkOverride, NicOverride, missing_parts, named_part
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
    layouts = _layouts(spec)
    nics = [spec.node_at(n).nics for n in range(spec.n_nodes)]
    ports = tuple([(cards.bandwidth_bps / 8,) * cards.count for cards in nics])
    fabric = switches(spec.fabric, ports) if any(ports) else Switches(((),) * spec.n_nodes, (), 0)
    if any(isinstance(override, LinkOverride) and override.missing for override in spec.overrides):
        whole = _layouts(replace(spec, overrides=()))  # links of missing parts may be named too
        dead = dead_links(spec, _links(spec, whole, fabric)[0])
        layouts, fabric = _layouts(spec, dead), without_trunks(fabric, dead)
    gpus = [
        Gpu(f"node{n}.gpu{g}", n, g, node.gpus.type, host_speed=node.host_speed, autograd_speed=node.autograd_speed)
        for n, g in spec.places()
        for node in (spec.node_at(n),)
    ]
    links, first_link = _links(spec, layouts, fabric)
    _override(spec, gpus, links)
    first_gpu = itertools.accumulate((len(layout.gpus) for layout in layouts), initial=0)
    cluster = Cluster(
        spec=spec,
        gpus=tuple(gpus),
        links=tuple(links),
        layouts=layouts,
        first_gpu=tuple(first_gpu)[:-1],
        first_link=first_link,
        switches=fabric,
    )
    return with_background(cluster, spec.background)


def _layouts(spec: ClusterSpec, dead: frozenset[str] = frozenset()) -> tuple[NodeLayout, ...]:
    """Return the layout of every node, one for all that are alike.

    ``dead``: names of links that are not there. Raises `InputError` where one of several nodes has no NIC left, and
    where dead links leave no way inside a node.
    """
    missing_by_node = {"gpu": missing_parts(spec.overrides, "gpu"), "nic": missing_parts(spec.overrides, "nic")}
    dead_in = dead_by_node(dead)
    nodes = []
    for n in range(spec.n_nodes):
        node = spec.node_at(n)
        missing = {
            f"{part}{i}"
            for part, count in (("gpu", node.gpus.count), ("nic", node.nics.count))
            for at in (n, None)
            for number in missing_by_node[part].get(at, ())
            for i in (range(count) if number is None else (number,))
        }
        cut = dead_in.get(n, frozenset())
        missing |= {name for k in range(node.nics.count) for name in (f"nic{k}",) if cut & {name, f"{name}.pcie"}}
        nodes.append(ThinnedNode(node, frozenset(missing), cut))
    layouts: dict[ThinnedNode, NodeLayout] = {}
    transport = spec.fabric.transport
    for n, thinned in enumerate(nodes):
        if thinned not in layouts:
            with located(partial(_in_node, n)):
                try:
                    layouts[thinned] = thinned.layout(transport)
                except NoWayError as failure:
                    raise InputError(failure.message, fix=overrides_without_cut_off(nodes, transport)) from None
        if spec.n_nodes > 1 and not layouts[thinned].nics:
            raise InputError("leave no network card to this node", key="overrides", found=f"node{n}")
    return tuple([layouts[thinned] for thinned in nodes])


def _in_node(node: int, key: str) -> tuple[None, str]:
    """Return the place of an error inside a node."""
    return None, f"overrides (node{node})"


def _links(spec: ClusterSpec, layouts: tuple[NodeLayout, ...], fabric: Switches) -> tuple[list[Link], tuple[int, ...]]:
    """Return all links, and the index of each node's first."""
    links: list[Link] = []
    first_link = []
    for n, layout in enumerate(layouts):
        prefix, first = f"node{n}.", len(links)
        first_link.append(first)
        ends = {out: (False, fabric.leaves[n][k]) for k, out in layout.port_out.items()}
        ends |= {back: (True, fabric.leaves[n][k]) for k, back in layout.port_in.items()}
        for position, edge in enumerate(layout.edges):
            src, dst = prefix + edge.src, prefix + edge.dst
            if position in ends:
                enters, leaf = ends[position]
                src, dst = (leaf, dst) if enters else (src, leaf)
            links.append(
                Link(first + position, prefix + edge.name, edge.kind, src, dst, edge.bandwidth_Bps, edge.latency_s)
            )
    kind = spec.fabric.transport
    for trunk in fabric.trunks:
        latency_s = SWITCH_LATENCY_s[kind] + trunk.latency_s
        for way, src, dst in (("tx", trunk.lower, trunk.upper), ("rx", trunk.upper, trunk.lower)):
            name = f"{trunk.name}:{way}"
            links.append(Link(len(links), name, kind, src, dst, trunk.bandwidth_Bps, latency_s))
    return links, tuple(first_link)


def _override(spec: ClusterSpec, gpus: list[Gpu], links: list[Link]) -> None:
    """Apply the scales of ``spec.overrides`` in place. A link's name without ``:tx`` or ``:rx`` means both ways."""
    scales = [override for override in spec.overrides if not isinstance(override, NicOverride)]
    if not scales:
        return
    named_links = names.link_names(links)
    named_gpus = {gpu.name: [i] for i, gpu in enumerate(gpus)}
    for index, override in enumerate(spec.overrides):
        key, name = named_part(override)
        if isinstance(override, LinkOverride):
            if override.bandwidth_scale is None:
                continue
            for at in names.matching(name, named_links, f"overrides[{index}].{key}", "link"):
                links[at] = replace(links[at], bandwidth_Bps=links[at].bandwidth_Bps * override.bandwidth_scale)
        elif isinstance(override, GpuOverride) and override.is_scaled:
            speed, host, autograd = override.scales
            for at in names.matching(name, named_gpus, f"overrides[{index}].{key}", "GPU"):
                gpus[at] = replace(
                    gpus[at],
                    speed_scale=gpus[at].speed_scale * speed,
                    host_speed=gpus[at].host_speed * host,
                    autograd_speed=gpus[at].autograd_speed * autograd,
                )
