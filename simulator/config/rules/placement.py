"""Rules of placement: the nodes that a job may be put on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.rules.scale import gpus_of_workers
from simulator.errors import Bare, InputError

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """Yield errors of a list of nodes, which names as many as hold the job, and no more, each once."""
    nodes = workload.nodes
    if nodes is None:
        return
    cluster, layout = workload.cluster, workload.parallelism
    servers, ranks = layout.server_count, workload.n_ranks
    workers = nodes[: max(len(nodes) - servers, 0)]
    have = gpus_of_workers(layout, cluster, nodes)
    if have < ranks or len(nodes) < servers:
        beside = f" and {servers} nodes for parameter servers" if servers else ""
        yield InputError(
            f"the job needs {ranks:,} GPUs{beside}, and the workers' nodes have {have:,}",
            key="placement",
            found=Bare(f"{len(nodes)} nodes"),
            allowed=f"more nodes, such as a list of {cluster.nodes_for(ranks) + servers}",
        )
    elif have - cluster.gpus_at(workers[-1]) >= ranks:
        yield InputError(
            f"the job needs {ranks:,} GPUs, and has them without its node {workers[-1]}",
            key="placement",
            found=Bare(f"{len(nodes)} nodes"),
            allowed="as few nodes as hold the job",
        )
    if len(set(nodes)) != len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        yield InputError("a node cannot be taken twice", key="placement", found=twice)
    if nodes and cluster.nodes is not None and max(nodes) >= cluster.nodes:
        allowed = f"0 to {cluster.nodes - 1}"
        yield InputError("this node does not exist", key="placement", found=max(nodes), allowed=allowed)
