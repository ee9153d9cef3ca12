"""How many ranks a layout has, and whether the cluster holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.cluster import ClusterSpec, cluster_problems
from simulator.config.node import MAX_GPUS
from simulator.config.rules.numbers import divisors, listed, nearest
from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.config.parallelism import Parallelism
    from simulator.config.workload import Workload


def replicas(layout: Parallelism, cluster: ClusterSpec) -> int:
    """dp where the file gives the cluster's nodes instead: those that parameter servers leave to workers. Raises
    `InputError` where the GPUs do not divide."""
    if layout.server_count:
        if cluster.nodes <= layout.server_count:
            raise too_small(cluster, layout.model_parallel, axes(layout), layout.server_count)
        cluster = cluster.model_copy(update={"nodes": cluster.nodes - layout.server_count})
    model_parallel = layout.model_parallel
    if cluster.n_gpus % model_parallel == 0:
        return cluster.n_gpus // model_parallel
    if cluster.n_gpus < model_parallel:
        raise too_small(cluster, model_parallel, axes(layout))
    per_node = cluster.node.gpus.count
    step = model_parallel // math.gcd(model_parallel, per_node)
    nodes = nearest(cluster.nodes, [max(1, cluster.nodes // step) * step, (cluster.nodes // step + 1) * step])
    raise InputError(
        f"{cluster.n_gpus} GPUs ({cluster.nodes} of {per_node}) do not divide by {axes(layout)} = {model_parallel}",
        key="parallelism.dp",
        allowed=f"their product one of {listed(divisors(cluster.n_gpus))}, or nodes a multiple of {step}, or dp given",
        fix=f"cluster.nodes: {nodes}",
    )


def too_small(cluster: ClusterSpec, ranks: int, what: str, servers: int = 0) -> InputError:
    """The error of ``ranks`` (explained by ``what``), and nodes for servers, that need more than the cluster has."""
    needed = math.ceil(ranks / cluster.node.gpus.count) + servers
    beside = f" and {servers} nodes for parameter servers" if servers else ""
    return InputError(
        f"{what} needs {ranks:,} GPUs{beside}, {cluster.nodes} nodes of {cluster.name} have {cluster.n_gpus:,}",
        key="cluster.nodes",
        found=cluster.nodes,
        allowed=f">= {needed}",
        fix=f"cluster.nodes: {needed}",
    )


def check_scale(ranks: int) -> None:
    """Raise `InputError` for more ranks than can be simulated, before anything of that size exists."""
    if ranks > MAX_GPUS:
        raise InputError(
            f"the layout makes {ranks:,} ranks",
            key="parallelism",
            allowed=f"at most {MAX_GPUS:,} GPUs",
            fix="a smaller dp, pp, cp or tp",
        )


def axes(layout: Parallelism) -> str:
    """The model-parallel sizes in words: ``tp 8 x pp 4``, and cp where it is used."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis != "cp")


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """Too few GPUs, and what is wrong with the cluster itself at its resolved size."""
    layout, cluster = workload.parallelism, workload.cluster
    workers = cluster.n_gpus - layout.server_count * cluster.node.gpus.count
    if workload.n_ranks > workers:
        yield too_small(cluster, workload.n_ranks, f"{axes(layout)} x dp {layout.dp}", layout.server_count)
    for problem in cluster_problems(cluster):
        problem.key = f"cluster.{problem.key}"
        yield problem


def warnings(workload: Workload) -> Iterator[str]:
    """GPUs without work."""
    cluster = workload.cluster
    idle = cluster.n_gpus - workload.parallelism.server_count * cluster.node.gpus.count - workload.n_ranks
    if idle > 0:
        yield f"{idle} of the {workload.cluster.n_gpus} GPUs of the cluster have no rank"
