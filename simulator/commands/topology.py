"""Python entry point of what a cluster is: `topology`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from simulator.cluster import Cluster, Gpu, Link, build_cluster
from simulator.cluster.link import Spread
from simulator.config import catalog
from simulator.config.cluster import describe_fabric, describe_nodes, load_cluster
from simulator.errors import located
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.input_files import closest
from simulator.results import Result
from simulator.units import GB, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class TopologyResult(Result):
    """A cluster's GPUs and links, its bisection and some routes."""

    command: ClassVar[str] = "topology"

    cluster: Cluster

    @property
    def warnings(self) -> list[str]:
        """Notes on the cluster, and types of GPU of which no profile is shipped."""
        return [*self.cluster.spec.warnings, *_unknown_types(self.cluster.spec)]

    @cached_property
    def bisection_Bps(self) -> float:
        """Bandwidth between two halves of the cluster in each direction, bytes/s."""
        return self.cluster.bisection_Bps()

    @cached_property
    def routes(self) -> list[dict[str, Any]]:
        """One route of each kind; its bandwidth is what all its links sustain."""
        return _routes(self.cluster)

    def content(self) -> dict[str, Any]:
        """Return the figures under the names of the JSON output, SI units."""
        built = self.cluster
        return {
            "cluster": built.name,
            "nodes": built.n_nodes,
            "fabric": describe_fabric(built.spec.fabric),
            "switch_tiers": built.switches.tiers,
            "gpus": [_gpu(gpu) for gpu in built.gpus],
            "links": [_link(built, link) for link in built.links],
            "bisection_Bps": self.bisection_Bps,
            "routes": self.routes,
        }

    def opening(self) -> list[str]:
        """Return lines on nodes, on the fabric between several, and on the bisection of several GPUs."""
        built, spec = self.cluster, self.cluster.spec
        tiers = f", {built.switches.tiers} in use" if built.switches.tiers else ""
        lines = [f"{built.name}: {describe_nodes(spec)} = {counted(len(built.gpus), 'GPU')}"]
        if built.n_nodes > 1:
            lines.append(f"fabric: {describe_fabric(spec.fabric)}{tiers}; {spec.fabric.transport}")
        if len(built.gpus) > 1:
            lines.append(f"bisection: {self.bisection_Bps / GB:,.0f} GB/s in each direction")
        return lines

    def __repr__(self) -> str:
        """Return lines on nodes, fabric and bisection."""
        return "\n".join(self.opening())

    def plot(self) -> Figure:
        """Draw the cluster."""
        from simulator.output.topology import draw_topology

        return draw_topology(self.cluster)


def _unknown_types(spec: ClusterSpec) -> Iterator[str]:
    """Yield types of GPU without a shipped profile, but for those that an imported file leaves open."""
    shipped = catalog.names("profile")
    open_types = any(text.startswith("node.gpus.type:") for text in spec.assumed)
    for gpu in spec.gpu_types:
        if gpu not in shipped and not open_types:
            near = closest(gpu, shipped)
            meant = f"; is {near} meant?" if near else ""
            yield f"no profile of {gpu} is shipped, which runs need (calibration: FILE){meant}"


def topology(cluster: str | Path | Mapping[str, Any], *, nodes: int | None = None) -> TopologyResult:
    """Build ``cluster``: a file, a shipped name or a mapping, with so many ``nodes`` [as its file].

    Raises `InputError` on what cannot be used.
    """
    spec = load_cluster(cluster, nodes=nodes)
    with located(lambda key: (cluster if isinstance(cluster, str | Path) else "cluster", key)):
        return TopologyResult(build_cluster(spec))


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
