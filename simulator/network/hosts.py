"""Operations of ranks with hosts: copies over PCIe, drives, the work of a CPU in its memory, and parameter servers.

Work of a CPU that is bound by memory, such as an optimizer step, is bytes of that memory. The ranks of a node, and the
copies that arrive meanwhile, share its bandwidth.
"""

from __future__ import annotations

import numpy as np

from simulator.arrays import Ints
from simulator.cluster.cluster import Cluster
from simulator.cluster.device_routes import CPU, NVME
from simulator.network.moves import Hop, Moves


def ends(op: str, cluster: Cluster, gpus: Ints, servers: tuple[int, ...]) -> Ints:
    """Return the end points of ``op``, a row for each of ``gpus`` that calls it.

    ``servers``: the nodes of the parameter servers.
    """
    nodes = cluster.gpu_places[0][gpus]
    match op:
        case "to_host":
            columns = [gpus, cluster.host(nodes)]
        case "from_host":
            columns = [cluster.host(nodes), gpus]
        case "to_nvme":
            columns = [cluster.host(nodes), cluster.host(nodes, NVME)]
        case "from_nvme":
            columns = [cluster.host(nodes, NVME), cluster.host(nodes)]
        case "host_update":
            columns = [cluster.host(nodes), cluster.host(nodes, CPU)]
        case "push" | "pull":
            columns = [gpus, *[np.full_like(gpus, cluster.host(node)) for node in servers]]
        case _:
            pairs = [end for node in servers for end in (cluster.host(node), cluster.host(node, CPU))]
            columns = [np.full_like(gpus, end) for end in pairs]
    return np.stack(columns, axis=1)


def copy(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Copy from the first end to the second."""
    a, b = ranks
    return (Moves([Hop(a, b, None, 1.0, 1.0)]),)


def push(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Send from a worker to each server its equal part, all at once."""
    worker, *servers = ranks
    share = 1 / len(servers)
    return (Moves([Hop(worker, server, None, share, share) for server in servers], way="p2p", peers=len(servers)),)


def pull(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Send from each server its equal part to a worker, all at once."""
    worker, *servers = ranks
    share = 1 / len(servers)
    return (Moves([Hop(server, worker, None, share, share) for server in servers], way="p2p", peers=len(servers)),)


def server_update(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[Moves, ...]:
    """Every server works on its equal part, in its own memory."""
    pairs = list(zip(ranks[::2], ranks[1::2], strict=True))
    return (Moves([Hop(memory, cpu, None, 1 / len(pairs), 1 / len(pairs)) for memory, cpu in pairs]),)


OPERATIONS = {
    "to_host": {"copy": copy},
    "from_host": {"copy": copy},
    "to_nvme": {"copy": copy},
    "from_nvme": {"copy": copy},
    "host_update": {"adam": copy},
    "push": {"parameter_server": push},
    "pull": {"parameter_server": pull},
    "server_update": {"adam": server_update},
}
