"""``topology``: what a cluster is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.cli.options import ClusterNodes, Json, Quiet
from simulator.cli.outputs import check_outputs, shows_summary, write_json
from simulator.cli.terminal import show, table, warn
from simulator.output.files import PICTURES
from simulator.units import GB, Gbit, us

if TYPE_CHECKING:
    from simulator.cluster import Cluster


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
    from simulator.cli.device_table import show_joined
    from simulator.commands.topology import topology
    from simulator.hardware.node import count_types

    result = topology(cluster, nodes=nodes)
    check_outputs({"--json": json, "--plot": plot})
    write_json(json, result.report if json else {})
    warn(result.warnings)
    if plot:
        from simulator.output.gantt import save_gantt

        save_gantt(result.plot(), plot)
    if not shows_summary(json, quiet):
        return

    show(*result.opening())
    show(table(_link_rows(result.cluster), "Links, each with both directions"))
    if result.routes:
        show(table([_route_row(route) for route in result.routes], "Routes"))
    for node in result.cluster.spec.kinds:
        show_joined(node, f"Inside a node of {count_types(node.gpus.by_number)}, joined by")


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
