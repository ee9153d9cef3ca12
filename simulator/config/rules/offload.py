"""Rules of offloading: tensors outside the GPU, and what nodes need for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config import catalog
from simulator.config.cluster import load_cluster
from simulator.errors import InputError
from simulator.input_files import brief

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def problems(workload: Workload) -> Iterator[InputError]:
    """Hosts that nothing is known of, drives that are not there, parameters that are not sharded."""
    layout, kinds = workload.parallelism, workload.cluster.kinds
    places = layout.offload.model_dump()
    used = {what: place for what, place in places.items() if place != "none"}
    what_for = "parameter servers" if layout.server_count else "what is offloaded"
    cluster = workload.cluster
    node_keys = [f"cluster.groups[{i}].node" for i in range(len(cluster.groups))] or ["cluster.node"]
    for key, node in zip(node_keys, [group.node for group in cluster.groups] or kinds, strict=True):
        if (used or layout.server_count) and node.host_memory_bandwidth_Bps is None:
            name, known_Bps = _known_host(node.gpus.types)
            yield InputError(
                f"{what_for} moves through the host's memory, whose bandwidth must be known",
                key=f"{key}.host_memory_bandwidth_Bps",
                found=brief(None),
                allowed="bytes/s of all channels together",
                fix=f"host_memory_bandwidth_Bps: {known_Bps / 1e9:g}e9, if hosts are those of {name}",
            )
    for what, place in used.items():
        if place == "nvme" and not all(node.nvme.count for node in kinds):
            yield InputError(
                f"the nodes of {workload.cluster.name} have no drives (cluster.node.nvme)",
                key=f"parallelism.offload.{what}",
                found=place,
                allowed="none, cpu",
                fix=f"offload: {{{what}: cpu}}",
            )
    if "parameters" in used and layout.zero < 3:
        yield InputError(
            "parameters are copied in for each use where they are gathered for it, which is zero 3 (DeepSpeed's "
            "offload_param, torch's CPUOffloadPolicy)",
            key="parallelism.offload.parameters",
            found=layout.offload.parameters,
            allowed="none, or zero: 3",
            fix="zero: 3",
        )
    if "optimizer" in used and layout.pipeline_schedule.copies > 1:
        yield InputError(
            f"the schedule {layout.schedule} adds up the gradients of two ranks once both have reduced theirs",
            key="parallelism.offload.optimizer",
            found=layout.offload.optimizer,
            allowed="none, or another schedule",
            fix="schedule: 1f1b",
        )


def _known_host(gpus: tuple[str, ...]) -> tuple[str, float]:
    """The first shipped cluster, with such GPUs if there is one, that says how fast its hosts' memory is, bytes/s."""
    shipped = [(node, name) for name in catalog.names("cluster") for node in load_cluster(name).kinds]
    hosts = [(node.gpus.types != gpus, name, node.host_memory_bandwidth_Bps) for node, name in shipped]
    _, name, known_Bps = min((other, name, rate) for other, name, rate in hosts if rate is not None)
    return name, known_Bps
