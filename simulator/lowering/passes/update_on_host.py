"""Optimizer states and parameters that live on the host, or on drives behind it.

Copies have lanes of their own (CUDA streams), so that they run beside compute, and share PCIe with whatever else
crosses it. The CPU's work is bytes of the host's memory, which all ranks of a node share.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulator.config import Workload
from simulator.lowering.host_copies import HostGradients, host_computation, host_copy, host_gradients
from simulator.lowering.lanes import Lanes, labels_off_compute, weights_updated, with_steps
from simulator.lowering.rank_context import RankContext
from simulator.models import host_state_bytes, host_update_bytes, optimized_elements
from simulator.program import COMPUTE_LANE, HostKind, Step
from simulator.units import DTYPE_BYTES

#: Parts of the optimizer's states that are read ahead of the update from drives (DeepSpeed's ``buffer_count`` of
#: offload_optimizer).
NVME_BUFFERS = 4
#: First words of the labels of steps that put updated parameters where they live, if other than where they are updated.
_PUT = ("params in ", "params out", "params to drive")
#: First word of the labels of the CPU's updates.
_UPDATE = "update "


def update_on_host(lanes: Lanes, context: RankContext) -> Lanes:
    """Add the optimizer step of a CPU, once the backward pass has ended and all ranks agree on the gradient norm.

    Shares of the parameters go through in order: read from drives, updated, written back, and the working copy copied
    to where it lives. Each runs beside the others' other parts.
    """
    workload = context.workload
    if workload.parallelism.offload.optimizer == "none":
        return lanes
    begin = weights_updated(lanes)
    shares = host_gradients(lanes, workload.host_gradient_bytes)
    steps = [step for number, share in enumerate(shares) for step in _updated(workload, number, share, begin)]
    return with_steps(lanes, lanes[COMPUTE_LANE], steps)


def move_parameters_out(lanes: Lanes, context: RankContext) -> Lanes:
    """Copy the shard of the parameters that the GPU has updated to where it lives, if that is outside the GPU."""
    workload = context.workload
    offload = workload.parallelism.offload
    if offload.optimizer != "none" or offload.parameters == "none":
        return lanes
    nbytes = optimized_elements(workload, context.weights) * DTYPE_BYTES[workload.training.trained_dtype]
    steps = [Step("params out", host_copy("params to host", HostKind.TO_HOST, nbytes), weights_updated(lanes))]
    if offload.parameters == "nvme":
        comm = host_copy("params to drive", HostKind.TO_NVME, nbytes, "params")
        steps.append(Step("params to drive", comm, ("params out",)))
    return with_steps(lanes, lanes[COMPUTE_LANE], steps)


def weights_in_place(lanes: Lanes) -> tuple[str, ...]:
    """Return the labels of steps after which each updated parameter is where it lives: GPU, host or drives."""
    return labels_off_compute(lanes, _PUT) or labels_off_compute(lanes, (_UPDATE,)) or weights_updated(lanes)


def _updated(workload: Workload, number: int, share: HostGradients, begin: tuple[str, ...]) -> Iterator[Step]:
    """Yield the steps of one share of the parameters."""
    offload = workload.parallelism.offload
    update, states = f"{_UPDATE}{number}", share.params * host_state_bytes(workload)
    needs = (share.ready, *begin)
    if offload.optimizer == "nvme":
        full = (f"states out {number - NVME_BUFFERS}",) if number >= NVME_BUFFERS else ()
        yield Step(f"states in {number}", host_copy("read states", HostKind.FROM_NVME, states), (*begin, *full))
        needs += (f"states in {number}",)
    nbytes = share.params * host_update_bytes(workload)
    adam = host_computation(workload, "adam", nbytes)
    yield Step(update, adam, needs)
    if offload.optimizer == "nvme":
        yield Step(f"states out {number}", host_copy("write states", HostKind.TO_NVME, states), (update,))
    copied = share.params * DTYPE_BYTES[workload.training.trained_dtype]
    if offload.parameters == "none":
        comm = host_copy("params to GPU", HostKind.FROM_HOST, copied, "params")
        yield Step(f"params in {number}", comm, (update,))
    elif offload.parameters == "nvme":
        comm = host_copy("params to drive", HostKind.TO_NVME, copied, "params")
        yield Step(f"params out {number}", comm, (update,))
