"""Which nodes a job may be put on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """A list of nodes names as many of the cluster's as the job needs, each once."""
    nodes = workload.nodes
    if nodes is None:
        return
    cluster, servers = workload.cluster, workload.parallelism.server_count
    needed = cluster.nodes_for(workload.n_ranks) + servers
    if len(nodes) != needed:
        beside = f" and {servers} nodes for parameter servers" if servers else ""
        yield InputError(
            f"the job needs {needed} nodes ({workload.n_ranks:,} GPUs{beside})",
            key="placement",
            found=f"{len(nodes)} nodes",
            allowed=f"a list of {needed}",
        )
    if len(set(nodes)) != len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        yield InputError("a node cannot be taken twice", key="placement", found=twice)
    if nodes and max(nodes) >= cluster.nodes:
        allowed = f"0 to {cluster.nodes - 1}"
        yield InputError("this node does not exist", key="placement", found=max(nodes), allowed=allowed)
