"""What lives outside the GPU: optimizer states, parameters and activations, on the host or on drives behind it.

Copies have lanes of their own (CUDA streams), so that they run beside compute, and share PCIe with whatever else
crosses it. The CPU's work is bytes of the host's memory, which all ranks of a node share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.config import Workload
from simulator.models import host_state_bytes, host_update_bytes
from simulator.program import Comm, Step
from simulator.units import DTYPE_BYTES

#: Parts of the optimizer's states that are read ahead of the update from drives (DeepSpeed's ``buffer_count`` of
#: offload_optimizer).
NVME_BUFFERS = 4


@dataclass(frozen=True)
class Share:
    """``params`` parameters of which this rank's gradients are on the host once step ``ready`` has ended."""

    params: float
    ready: str


def gradients_to_host(
    workload: Workload, label: str, share: float, after: tuple[str, ...], given_back: float, earlier: Share | None
) -> list[Step]:
    """Copy the reduced gradients of ``share`` parameters to the host, and give back ``given_back`` bytes on the GPU;
    the CPU adds them to what is there ``earlier``, from another micro-batch."""
    nbytes = share * DTYPE_BYTES[workload.training.grad_dtype]
    comm = Comm("offload.grads to host", "to_host", nbytes, "rank", "offload", stream="grads")
    steps = [Step(f"{label} to host", comm, after, free_bytes=given_back)]
    if earlier is not None:
        add = Comm("offload.add grads", "host_update", 3 * nbytes, "rank", "optimizer")
        steps.append(Step(f"{label} added", add, (steps[0].label, earlier.ready)))
    return steps


def update_on_host(
    workload: Workload, shares: Sequence[Share], begin: tuple[str, ...]
) -> tuple[list[Step], tuple[str, ...]]:
    """The optimizer step of ``shares`` on the CPU, once the steps ``begin`` have ended (the backward pass, and whatever
    all ranks agree on), and what has to have ended before the weights may be used: shares go through in order, read
    from drives, updated, written back, and the working copy to where it lives, each beside the others' other parts."""
    offload, element = workload.parallelism.offload, DTYPE_BYTES[workload.training.precision]
    steps: list[Step] = []
    done: list[str] = []

    def add(label: str, name: str, op: str, nbytes: float, after: tuple[str, ...], purpose: str = "offload") -> str:
        stream = "params" if name.startswith("params") else ""
        steps.append(Step(label, Comm(f"offload.{name}", op, nbytes, "rank", purpose, stream=stream), after))
        return label

    for number, share in enumerate(shares):
        needs = (share.ready, *begin)
        states = share.params * host_state_bytes(workload)
        if offload.optimizer == "nvme":
            full = (f"states out {number - NVME_BUFFERS}",) if number >= NVME_BUFFERS else ()
            needs += (add(f"states in {number}", "read states", "from_nvme", states, (*begin, *full)),)
        nbytes = share.params * host_update_bytes(workload)
        last = add(f"update {number}", "adam", "host_update", nbytes, needs, "optimizer")
        if offload.optimizer == "nvme":
            done.append(add(f"states out {number}", "write states", "to_nvme", states, (last,)))
        if offload.parameters == "none":
            done.append(add(f"params in {number}", "params to GPU", "from_host", share.params * element, (last,)))
        elif offload.parameters == "nvme":
            done.append(add(f"params out {number}", "params to drive", "to_nvme", share.params * element, (last,)))
        else:
            done.append(last)
    return steps, tuple(done)


def parameters_to_host(workload: Workload, params: float, after: tuple[str, ...]) -> list[Step]:
    """Where the GPU has updated its shard of ``params`` parameters that live outside it: copy it there."""
    place = workload.parallelism.offload.parameters
    if place == "none":
        return []
    nbytes = params * DTYPE_BYTES[workload.training.precision]
    steps = [Step("params out", Comm("offload.params to host", "to_host", nbytes, "rank", "offload"), after)]
    if place == "nvme":
        comm = Comm("offload.params to drive", "to_nvme", nbytes, "rank", "offload", stream="params")
        steps.append(Step("params to drive", comm, ("params out",)))
    return steps


def fetch_parameters(workload: Workload, label: str, nbytes: float) -> list[Step]:
    """Copy a shard of ``nbytes`` to the GPU, if it lives outside; the last step bears the ``label``, and holds it."""
    place = workload.parallelism.offload.parameters
    if place == "none":
        return []
    comm = Comm("offload.params to GPU", "from_host", nbytes, "rank", "offload", stream="params")
    if place == "cpu":
        return [Step(label, comm, alloc_bytes=nbytes)]
    read = Comm("offload.params from drive", "from_nvme", nbytes, "rank", "offload", stream="params")
    return [Step(f"{label} read", read), Step(label, comm, (f"{label} read",), alloc_bytes=nbytes)]
