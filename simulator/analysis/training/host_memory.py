"""Memory of hosts, and room on drives, that a job with offload or parameter servers takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulator.config import Workload
from simulator.models import host_state_bytes, optimized, rank_parts, weights_of
from simulator.operations.weights import elements_by_axis
from simulator.timeline import Timeline
from simulator.units import DTYPE_BYTES


def host_memory(workload: Workload, pipeline_rank: Sequence[int], played: Timeline) -> dict[str, Any] | None:
    """Bytes that the fullest node's host holds (``peak_bytes``) and its drives (``nvme_bytes``), beside what the host
    has (null where the cluster does not say), and whether it fits; None where nothing lives there.

    ``pipeline_rank``: of each rank. Optimizer states and gradients, shards of parameters, and activations are those of
    all ranks of the node, each at its fullest; a server keeps its part of states and working copy, and the gradients of
    all replicas until it adds them up.
    """
    layout, cluster = workload.parallelism, workload.cluster
    if not layout.server_count and set(layout.offload.model_dump().values()) == {"none"}:
        return None
    nodes = workload.own_nodes
    cpu, nvme = dict.fromkeys(nodes, 0.0), dict.fromkeys(nodes, 0.0)
    of_ranks = [node for node in nodes for _ in range(cluster.gpus_at(node))]
    held = _activations(played)
    per_param = _per_param(workload)
    shares: dict[int, float] = {}
    for rank, (stage, at) in enumerate(zip(pipeline_rank, of_ranks, strict=False)):
        if stage not in shares:
            shares[stage] = optimized(workload, weights_of(rank_parts(workload, stage)))
        cpu[at] += per_param["cpu"] * shares[stage]
        nvme[at] += per_param["nvme"] * shares[stage]
        on = nvme if layout.offload.activations == "nvme" else cpu
        on[at] += held.get(played.simulated_as[rank], 0.0)
    if layout.server_count:
        for at in workload.server_nodes:
            cpu[at] += _on_servers(workload) / layout.servers
    rooms = {node: cluster.node_at(node).host_memory_bytes for node in nodes}
    fullest = max(nodes, key=lambda node: cpu[node] / (rooms[node] or 1.0))
    return {
        "capacity_bytes": rooms[fullest],
        "fits": all(room is None or cpu[node] <= room for node, room in rooms.items()),
        "peak_bytes": cpu[fullest],
        "nvme_bytes": max(nvme.values()),
    }


def _on_servers(workload: Workload) -> float:
    """Bytes of all servers together."""
    training, layout = workload.training, workload.parallelism
    grad, total = DTYPE_BYTES[training.grad_dtype], 0.0
    for stage in range(layout.pp):
        for axis, count in elements_by_axis(weights_of(rank_parts(workload, stage))).items():
            together = layout.replicas(axis)
            gradients = together if layout.data_parallel == "parameter_server" else 1
            kept = host_state_bytes(workload) + gradients * grad + DTYPE_BYTES[training.precision]
            total += kept * count * (workload.n_ranks / layout.pp / together)
    return total


def _per_param(workload: Workload) -> Mapping[str, float]:
    """Bytes per parameter of a rank's share that its host and its drives hold."""
    training, offload = workload.training, workload.parallelism.offload
    found = {"none": 0.0, "cpu": 0.0, "nvme": 0.0}
    found[offload.optimizer] += host_state_bytes(workload)
    found[offload.parameters] += DTYPE_BYTES[training.precision]
    found["none" if offload.optimizer == "none" else "cpu"] += DTYPE_BYTES[training.grad_dtype]
    return found


def _activations(played: Timeline) -> dict[int, float]:
    """Per simulated rank, the most bytes of activations that are outside the GPU, or on the way."""
    peaks: dict[int, float] = {}
    names = np.array(played.lane_names, dtype=object)[played.lane]
    out, back = names == "d2h_activations", names == "h2d_activations"
    moved = np.array([template.nbytes.sum() for template in played.templates])
    for rank in played.ranks:
        mine = np.flatnonzero((played.rank == rank) & (out | back))
        times = np.where(out, played.start_s, played.end_s)[mine]
        change = np.where(out, 1.0, -1.0)[mine] * moved[played.template[mine]]
        order = np.argsort(times, kind="stable")
        peaks[rank] = float(np.cumsum(change[order]).max(initial=0.0))
    return peaks
