"""What lives outside the GPU: optimizer states, parameters and activations, on the host or on drives behind it.

Copies have lanes of their own (CUDA streams), so that they run beside compute, and share PCIe with whatever else
crosses it. The CPU's work is bytes of the host's memory, which all ranks of a node share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.config import Workload
from simulator.models import host_state_bytes, host_update_bytes
from simulator.program import Axis, HostKind, HostOperation, Purpose, Step
from simulator.units import DTYPE_BYTES

#: Parts of the optimizer's states that are read ahead of the update from drives (DeepSpeed's ``buffer_count`` of
#: offload_optimizer).
NVME_BUFFERS = 4


@dataclass(frozen=True)
class HostGradients:
    """``params`` parameters of which this rank's gradients are on the host once step ``ready`` has ended."""

    params: float
    ready: str


def gradients_to_host(
    workload: Workload,
    label: str,
    share: float,
    after: tuple[str, ...],
    given_back: float,
    earlier: HostGradients | None,
) -> list[Step]:
    """Copy the reduced gradients of ``share`` parameters to the host, and give back ``given_back`` bytes on the GPU;
    the CPU adds them to what is there ``earlier``, from another micro-batch."""
    nbytes = share * DTYPE_BYTES[workload.training.grad_dtype]
    comm = _copy("grads to host", HostKind.TO_HOST, nbytes, "grads")
    steps = [Step(f"{label} to host", comm, after, free_bytes=given_back)]
    if earlier is not None:
        add = HostOperation("offload.add grads", HostKind.HOST_UPDATE, 3 * nbytes, Axis.RANK, Purpose.OPTIMIZER)
        steps.append(Step(f"{label} added", add, (steps[0].label, earlier.ready)))
    return steps


def update_on_host(
    workload: Workload, shares: Sequence[HostGradients], begin: tuple[str, ...]
) -> tuple[list[Step], tuple[str, ...]]:
    """The optimizer step of ``shares`` on the CPU, once the steps ``begin`` have ended (the backward pass, and whatever
    all ranks agree on), and what has to have ended before the weights may be used: shares go through in order, read
    from drives, updated, written back, and the working copy to where it lives, each beside the others' other parts."""
    offload, element = workload.parallelism.offload, DTYPE_BYTES[workload.training.precision]
    steps: list[Step] = []
    done: list[str] = []

    def add(label: str, comm: HostOperation, after: tuple[str, ...]) -> str:
        steps.append(Step(label, comm, after))
        return label

    for number, share in enumerate(shares):
        needs = (share.ready, *begin)
        states = share.params * host_state_bytes(workload)
        if offload.optimizer == "nvme":
            full = (f"states out {number - NVME_BUFFERS}",) if number >= NVME_BUFFERS else ()
            needs += (add(f"states in {number}", _copy("read states", HostKind.FROM_NVME, states), (*begin, *full)),)
        nbytes = share.params * host_update_bytes(workload)
        adam = HostOperation("offload.adam", HostKind.HOST_UPDATE, nbytes, Axis.RANK, Purpose.OPTIMIZER)
        last = add(f"update {number}", adam, needs)
        copied = share.params * element
        if offload.optimizer == "nvme":
            done.append(add(f"states out {number}", _copy("write states", HostKind.TO_NVME, states), (last,)))
        if offload.parameters == "none":
            comm = _copy("params to GPU", HostKind.FROM_HOST, copied, "params")
            done.append(add(f"params in {number}", comm, (last,)))
        elif offload.parameters == "nvme":
            comm = _copy("params to drive", HostKind.TO_NVME, copied, "params")
            done.append(add(f"params out {number}", comm, (last,)))
        else:
            done.append(last)
    return steps, tuple(done)


def parameters_to_host(workload: Workload, params: float, after: tuple[str, ...]) -> list[Step]:
    """Where the GPU has updated its shard of ``params`` parameters that live outside it: copy it there."""
    place = workload.parallelism.offload.parameters
    if place == "none":
        return []
    nbytes = params * DTYPE_BYTES[workload.training.precision]
    steps = [Step("params out", _copy("params to host", HostKind.TO_HOST, nbytes), after)]
    if place == "nvme":
        comm = _copy("params to drive", HostKind.TO_NVME, nbytes, "params")
        steps.append(Step("params to drive", comm, ("params out",)))
    return steps


def fetch_parameters(workload: Workload, label: str, nbytes: float) -> list[Step]:
    """Copy a shard of ``nbytes`` to the GPU, if it lives outside; the last step bears the ``label``, and holds it."""
    place = workload.parallelism.offload.parameters
    if place == "none":
        return []
    comm = _copy("params to GPU", HostKind.FROM_HOST, nbytes, "params")
    if place == "cpu":
        return [Step(label, comm, alloc_bytes=nbytes)]
    read = _copy("params from drive", HostKind.FROM_NVME, nbytes, "params")
    return [Step(f"{label} read", read), Step(label, comm, (f"{label} read",), alloc_bytes=nbytes)]


def _copy(name: str, op: HostKind, nbytes: float, stream: str = "") -> HostOperation:
    return HostOperation(f"offload.{name}", op, nbytes, Axis.RANK, Purpose.OFFLOAD, stream=stream)
