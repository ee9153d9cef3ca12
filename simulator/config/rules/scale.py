"""How many ranks a layout has, and whether the cluster holds them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from simulator.bounds import MAX_GPUS
from simulator.config.rules.numbers import divisors, listed, nearest
from simulator.errors import InputError
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.units import counted, format_time

if TYPE_CHECKING:
    from simulator.config.parallelism import Parallelism
    from simulator.config.workload import Workload


def gpus_of_workers(layout: Parallelism, cluster: ClusterSpec, nodes: Sequence[int] | None) -> int:
    """Return the GPUs of a job's nodes (None: all), without the last of them, which are its parameter servers'."""
    if nodes is None:
        return cluster.gpus_on(cluster.n_nodes - layout.server_count)
    return sum(map(cluster.gpus_at, nodes[: max(len(nodes) - layout.server_count, 0)]))


def replicas(layout: Parallelism, cluster: ClusterSpec, listed_nodes: Sequence[int] | None) -> int:
    """Return dp where the file gives the cluster's nodes instead: as many as the GPUs of workers make.

    ``listed_nodes``: those that the job lists; whether they are too few or too many is for `rules.placement` to say.
    Raises `InputError` where the GPUs do not divide."""
    nodes = cluster.n_nodes - layout.server_count
    model_parallel, gpus = layout.model_parallel, gpus_of_workers(layout, cluster, listed_nodes)
    if gpus % model_parallel == 0 < gpus or listed_nodes is not None:
        return max(gpus // model_parallel, 1)
    if gpus < model_parallel:
        raise too_small(cluster, model_parallel, axes(layout), layout.server_count)
    per_node = cluster.gpus_per_node
    alike = not cluster.groups and gpus == nodes * per_node and _can_grow(cluster)  # else more nodes need not help
    step = model_parallel // math.gcd(model_parallel, per_node)
    near = nearest(nodes, [max(1, nodes // step) * step, (nodes // step + 1) * step]) + layout.server_count
    what = f"{gpus} GPUs ({nodes} of {per_node})" if alike else f"{gpus} GPUs"
    raise InputError(
        f"{what} do not divide by {axes(layout)} = {model_parallel}",
        key="parallelism.dp",
        allowed=f"their product one of {listed(divisors(gpus))}"
        + (f", or nodes a multiple of {step}, or dp given" if alike else ", or dp given"),
        fix=f"cluster: {{nodes: {near}}}" if alike else f"dp: {gpus // model_parallel}",
    )


def fills_cluster(workload: Workload, **sizes: int) -> bool:
    """Return whether the GPUs make whole replicas with other ``sizes`` of axes, which the batch and experts divide by.

    Sizes of the model are not looked at.
    """
    layout, training = workload.parallelism.model_copy(update=sizes), workload.training
    dp, cluster = layout.dp, workload.cluster
    if cluster.nodes is not None and "dp" not in layout.model_fields_set:
        try:
            dp = replicas(layout, cluster, workload.nodes)
        except InputError:
            return False
    if cluster.nodes is not None and layout.model_parallel * dp > gpus_of_workers(layout, cluster, workload.nodes):
        return False
    microbatches, rest = divmod(training.global_batch, training.micro_batch * dp)
    if rest or layout.pipeline_schedule.check(layout.pp, microbatches, layout.vpp) is not None:
        return False
    return layout.tp * layout.cp * dp % (layout.ep * layout.etp) == 0


def too_small(cluster: ClusterSpec, ranks: int, what: str, servers: int = 0) -> InputError:
    """The error of ``ranks`` (explained by ``what``), and nodes for servers, that need more than the cluster has."""
    needed = cluster.nodes_for(ranks) + servers
    beside = f" and {counted(servers, 'node')} for parameter servers" if servers else ""
    cluster_size = f"{counted(cluster.n_nodes, 'node')} of {cluster.name} {'has' if cluster.n_nodes == 1 else 'have'}"
    return InputError(
        f"{what} needs {ranks:,} GPUs{beside}, {cluster_size} {cluster.n_gpus:,}",
        key="cluster.nodes",
        found=cluster.n_nodes,
        allowed=f">= {needed}",
        fix=("larger counts in cluster.groups" if cluster.groups else f"cluster: {{nodes: {needed}}}")
        if _can_grow(cluster)
        else None,
    )


def _can_grow(cluster: ClusterSpec) -> bool:
    """Return whether more nodes can stand beside these: several need network cards."""
    return all(node.nics.count for node in cluster.kinds)


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
    """Yield the error of too few GPUs."""
    layout, cluster = workload.parallelism, workload.cluster
    # Of a cluster without any GPU, below, no number of nodes has enough.
    if workload.nodes is None and workload.n_ranks > gpus_of_workers(layout, cluster, None) and cluster.n_gpus:
        yield too_small(cluster, workload.n_ranks, f"{axes(layout)} x dp {layout.dp}", layout.server_count)


def warnings(workload: Workload) -> Iterator[str]:
    """GPUs without work, and links of a site that are as slow as those between sites."""
    yield from _slow_links(workload)
    cluster, layout = workload.cluster, workload.parallelism
    idle = gpus_of_workers(layout, cluster, None) - workload.n_ranks
    if workload.nodes is not None:
        idle = cluster.n_gpus - sum(map(cluster.gpus_at, workload.server_nodes)) - workload.n_ranks
    if idle > 0:
        yield without_rank(idle, cluster.n_gpus) + _all_in_use(workload)


#: Most seconds between two machines of one site: light takes 1 ms for 200 km of fibre (5e-6 s per km).
_SLOWEST_LINK_S = 1e-3


def _slow_links(workload: Workload) -> Iterator[str]:
    """Yield links inside a site whose latency is of another order than theirs, as of a figure in microseconds."""
    for node in workload.cluster.kinds:
        parts = (("nics", node.nics.latency_s), ("nvlink", node.nvlink.latency_s), ("sockets", node.sockets.latency_s))
        for part, latency_s in parts:
            if latency_s > _SLOWEST_LINK_S:
                yield (
                    f"cluster.node.{part}.latency_s is {format_time(latency_s)}, more than light takes for 200 km; "
                    "links of a site have microseconds, such as 3us"
                )


def _all_in_use(workload: Workload) -> str:
    """Return how to give every GPU a rank, where the file gives neither the number of nodes nor of replicas."""
    layout, cluster = workload.parallelism, workload.cluster
    if "dp" in layout.model_fields_set or workload.nodes is not None:
        return ""
    default = "; parallelism.dp is 1, as neither it nor cluster.nodes is given"
    dp, left = divmod(gpus_of_workers(layout, cluster, None), layout.model_parallel)
    batch = workload.training.global_batch
    if left or batch % (workload.training.micro_batch * dp):
        return default
    return f"{default}: cluster.nodes: {cluster.n_nodes} gives all of them a rank, with dp {dp}"


def without_rank(idle: int, total: int) -> str:
    """The warning of GPUs without work."""
    return f"{idle} of the {total} GPUs of the cluster have no rank"
