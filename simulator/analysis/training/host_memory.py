"""Memory of hosts and space on drives that offload and parameter servers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulator.config import Workload
from simulator.config.optimizer_choices import choices
from simulator.models import host_state_bytes, optimized_elements, paged_state_bytes, rank_parts, weights_of
from simulator.operations.weights import Weight, by_axis, elements_by_axis, weight_bytes
from simulator.timeline import Timeline
from simulator.units import DTYPE_BYTES


def host_memory(workload: Workload, pipeline_rank: Sequence[int], played: Timeline) -> dict[str, Any] | None:
    """Return the memory of the fullest host, and the most that drives hold; None for a job that keeps nothing there.

    ``pipeline_rank``: pipeline rank of each rank. ``peak_bytes``: bytes on the host. ``capacity_bytes``: its memory,
    None where the cluster file has no figure of any host. Hosts without one count as the fullest only then.
    ``nvme_bytes``: most bytes on the drives of a node, of this host or of another.

    A host holds optimizer states, gradients, shards of parameters and activations of all ranks of the node, each at its
    peak. Paged states count as if all had left the GPU. A server holds its share of states and working copy, and the
    gradients of all replicas until it adds them up.
    """
    layout, cluster = workload.parallelism, workload.cluster
    paged = any(choice.paged for choice in choices(workload))
    if not (paged or layout.server_count) and set(layout.offload.model_dump().values()) == {"none"}:
        return None
    nodes = workload.own_nodes
    cpu, nvme = dict.fromkeys(nodes, 0.0), dict.fromkeys(nodes, 0.0)
    node_of_rank = [node for node in nodes for _ in range(cluster.gpus_at(node))]
    activations = _activations(played)
    stage_bytes: dict[int, Mapping[str, float]] = {}
    for rank, (stage, node) in enumerate(zip(pipeline_rank, node_of_rank, strict=False)):
        if stage not in stage_bytes:
            stage_bytes[stage] = _state_bytes(workload, weights_of(rank_parts(workload, stage)))
        cpu[node] += stage_bytes[stage]["cpu"]
        nvme[node] += stage_bytes[stage]["nvme"]
        store = nvme if layout.offload.activations == "nvme" else cpu
        store[node] += activations.get(played.simulated_as[rank], 0.0)
    if layout.server_count:
        for node in workload.server_nodes:
            cpu[node] += _server_bytes(workload) / layout.servers
    capacities = {node: cluster.node_at(node).host_memory_bytes for node in nodes}
    with_figure = [node for node in nodes if capacities[node] is not None]
    fullest = max(with_figure or nodes, key=lambda node: cpu[node] / (capacities[node] or 1.0))
    return {
        "capacity_bytes": capacities[fullest],
        "fits": all(capacity is None or cpu[node] <= capacity for node, capacity in capacities.items()),
        "peak_bytes": cpu[fullest],
        "nvme_bytes": max(nvme.values()),
    }


def _server_bytes(workload: Workload) -> float:
    """Return the bytes of all servers together."""
    training, layout = workload.training, workload.parallelism
    grad, total = DTYPE_BYTES[training.grad_dtype], 0.0
    for stage in range(layout.pp):
        for axis, count in elements_by_axis(weights_of(rank_parts(workload, stage))).items():
            replicas = layout.replicas(axis)
            gradients = replicas if layout.data_parallel == "parameter_server" else 1
            per_parameter = host_state_bytes(workload) + gradients * grad + DTYPE_BYTES[training.trained_dtype]
            total += per_parameter * count * (workload.n_ranks / layout.pp / replicas)
    return total


def _state_bytes(workload: Workload, weights: Sequence[Weight]) -> Mapping[str, float]:
    """Return the bytes of a rank's share of ``weights``, their gradients and states, by place: cpu, nvme, or none."""
    layout, share = workload.parallelism, optimized_elements(workload, weights)
    offload, shards = layout.offload, by_axis(weights).items()
    nbytes = {"none": 0.0, "cpu": 0.0, "nvme": 0.0}
    nbytes[offload.optimizer] += host_state_bytes(workload) * share
    nbytes["cpu"] += paged_state_bytes(workload, weights)
    nbytes[offload.parameters] += sum(weight_bytes(group) / layout.shards(axis) for axis, group in shards)
    nbytes["none" if offload.optimizer == "none" else "cpu"] += workload.host_gradient_bytes * share
    return nbytes


def _activations(played: Timeline) -> dict[int, float]:
    """Return the most bytes of activations outside the GPU, or on the way, per simulated rank."""
    peaks: dict[int, float] = {}
    names = np.array(played.lane_names, dtype=object)[played.lane]
    out, back = names == "d2h_activations", names == "h2d_activations"
    moved = np.array([template.nbytes.sum() for template in played.templates])
    for rank in played.ranks:
        copies = np.flatnonzero((played.rank == rank) & (out | back))
        times = np.where(out, played.start_s, played.end_s)[copies]
        change = np.where(out, 1.0, -1.0)[copies] * moved[played.template[copies]]
        order = np.argsort(times, kind="stable")
        peaks[rank] = float(np.cumsum(change[order]).max(initial=0.0))
    return peaks
