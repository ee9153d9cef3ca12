"""What may live outside the GPU, and what the nodes need for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def problems(workload: Workload) -> Iterator[InputError]:
    """Hosts that nothing is known of, drives that are not there, parameters that are not sharded."""
    layout, kinds = workload.parallelism, workload.cluster.kinds
    places = layout.offload.model_dump()
    used = {what: place for what, place in places.items() if place != "none"}
    what_for = "parameter servers" if layout.server_count else "what is offloaded"
    if (used or layout.server_count) and any(node.host_memory_bandwidth_Bps is None for node in kinds):
        yield InputError(
            f"{what_for} moves through the host's memory, whose bandwidth must be known",
            key="cluster.node.host_memory_bandwidth_Bps",
            found="null",
            allowed="bytes/s of all channels together",
        )
    for what, place in used.items():
        if place == "nvme" and not all(node.nvme.count for node in kinds):
            yield InputError(
                f"the nodes of {workload.cluster.name} have no drives (cluster.node.nvme)",
                key=f"parallelism.offload.{what}",
                found=place,
                allowed="none, cpu",
                fix=f"offload.{what}: cpu",
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
    if "optimizer" in used and layout.plan.copies > 1:
        yield InputError(
            f"the schedule {layout.schedule} adds up the gradients of two ranks once both have reduced theirs",
            key="parallelism.offload.optimizer",
            found=layout.offload.optimizer,
            allowed="none, or another schedule",
            fix="schedule: 1f1b",
        )
