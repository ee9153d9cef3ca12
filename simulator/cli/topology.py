"""``topology``: what a cluster is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.cli.options import ClusterNodes, Json, Quiet
from simulator.cli.outputs import STDOUT, check_outputs, write_json
from simulator.cli.terminal import show, table, warn
from simulator.output.envelope import envelope
from simulator.output.files import PICTURES
from simulator.units import GB, Gbit, us

if TYPE_CHECKING:
    from simulator.cluster import Cluster, Gpu, Link
    from simulator.cluster.link import Spread
    from simulator.hardware.cluster_spec import ClusterSpec


def command(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="A file, or a name in topologies/.")],
    nodes: ClusterNodes = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: " + ", ".join(PICTURES) + ".")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Show a cluster: its GPUs, links, bisection and routes.

    Links are told by kind; of some routes what they cross, of the devices of a node how they are joined.

    \b
    Example:
      llmsim topology dgx_h100 --nodes 64
    """
    from simulator.cluster import build_cluster
    from simulator.config.cluster import describe_fabric, describe_nodes, load_cluster
    from simulator.errors import located

    spec = load_cluster(cluster, nodes=nodes)
    check_outputs({"--json": json, "--plot": plot}, {"--plot": PICTURES})
    with located(lambda key: (cluster, key)):
        built = build_cluster(spec)
    bisection = built.bisection_Bps()
    routes = _routes(built)
    write_json(
        json,
        envelope(
            "topology",
            spec.warnings,
            cluster=built.name,
            nodes=built.n_nodes,
            fabric=describe_fabric(spec.fabric),
            switch_tiers=built.switches.tiers,
            gpus=[_gpu(gpu) for gpu in built.gpus],
            links=[_link(built, link) for link in built.links],
            bisection_Bps=bisection,
            routes=routes,
        ),
    )
    warn(spec.warnings)
    if plot:
        from simulator.output.gantt import save_gantt
        from simulator.output.topology import draw_topology

        save_gantt(draw_topology(built), plot)
    if quiet or json == STDOUT:
        return

    show(f"{built.name}: {describe_nodes(spec)} = {len(built.gpus)} GPUs")
    tiers = f", {built.switches.tiers} in use" if built.switches.tiers else ""
    show(f"fabric: {describe_fabric(spec.fabric)}{tiers}; {spec.fabric.transport}")
    show(f"bisection: {bisection / GB:,.0f} GB/s in each direction")
    show(table(_link_rows(built), "Links, each with both directions"))
    show(table([_route_row(route) for route in routes], "Routes"))
    _show_nodes(spec)


def _show_nodes(spec: ClusterSpec) -> None:
    from simulator.cli.device_table import show_joined
    from simulator.hardware.node import count_types

    for node in spec.kinds:
        show_joined(node, f"Inside a node of {count_types(node.gpus.by_number)}, joined by")


def _gpu(gpu: Gpu) -> dict[str, Any]:
    """Return what the JSON result says of a GPU."""
    return {"name": gpu.name, "node": gpu.node, "type": gpu.type, "speed_scale": gpu.speed_scale}


def _link(cluster: Cluster, link: Link) -> dict[str, Any]:
    """Return what the JSON result says of a link."""
    return {
        "name": link.name,
        "kind": cluster.kind_of(link),
        "bandwidth_Bps": link.bandwidth_Bps,
        "latency_s": link.latency_s,
    }


def _routes(cluster: Cluster) -> list[dict[str, Any]]:
    """Return what the JSON result says of one route of each kind; its bandwidth is what all its links sustain."""
    return [
        {
            "from": cluster.gpus[a].name,
            "to": cluster.gpus[b].name,
            "links": [cluster.links[i].name for i, _ in spread],
            "shares": [share for _, share in spread],
            "latency_s": sum(share * cluster.links[i].latency_s for i, share in spread),
            "bandwidth_Bps": min(cluster.links[i].bandwidth_Bps / share for i, share in spread),
        }
        for a, b, spread in _examples(cluster)
    ]


def _examples(cluster: Cluster) -> Iterator[tuple[int, int, Spread]]:
    """One route of each kind there is: to a neighbour, to the next node, to another GPU there, to the last node."""
    last = len(cluster.gpus) - 1
    first = cluster.node_of(0)
    beyond = cluster.gpus_of(first).stop
    seen: set[int] = {0}
    for target in (1, beyond, beyond + 1, cluster.gpus_of(cluster.node_of(last)).start, last):
        if target <= last and target not in seen:
            seen.add(target)
            yield 0, target, cluster.spread(0, target)


def _link_rows(cluster: Cluster) -> list[dict[str, Any]]:
    """Links of equal name (numbers apart), kind, bandwidth and latency in one row, both directions as one link."""
    counts: dict[tuple[str, str, float, float], int] = {}
    for link in cluster.links:
        if not link.name.endswith(":rx"):
            name = re.sub(r"\d+", "*", link.name.removesuffix(":tx"))
            key = name, cluster.kind_of(link), link.bandwidth_Bps, link.latency_s
            counts[key] = counts.get(key, 0) + 1
    return [
        {
            "link": name,
            "kind": kind,
            "count": count,
            "GB/s": f"{bandwidth / GB:,.1f}",
            "Gbit/s": f"{bandwidth / Gbit:,.0f}",
            "latency": f"{latency / us:.2f} us",
        }
        for (name, kind, bandwidth, latency), count in counts.items()
    ]


def _route_row(route: dict[str, Any]) -> dict[str, Any]:
    return {
        "from": route["from"],
        "to": route["to"],
        "GB/s": f"{route['bandwidth_Bps'] / GB:.1f}",
        "latency": f"{route['latency_s'] / us:.2f} us",
        "over": ", ".join(
            name if share == 1 else f"{name} ({share:.0%})"
            for name, share in zip(route["links"], route["shares"], strict=True)
        ),
    }
