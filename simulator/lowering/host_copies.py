"""Copies between a GPU, the memory of its host and the drives there, of gradients and of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.config import Workload
from simulator.lowering.lanes import REDUCTION, Lanes
from simulator.program import HOST_LANES, Axis, HostKind, HostOperation, Purpose, Step

#: The stream of copies of gradients.
_GRADIENTS = "grads"


@dataclass(frozen=True)
class HostGradients:
    """``params`` parameters of which this rank's gradients are on the host once step ``ready`` has ended."""

    params: float
    ready: str


def host_computation(workload: Workload, name: str, nbytes: float) -> HostOperation:
    """Return work of the CPU on ``nbytes`` of its memory, by the threads of the rank's process."""
    threads = workload.training.optimizer.threads or 0
    name = f"offload.{name}"
    return HostOperation(name, HostKind.HOST_UPDATE, nbytes, Axis.RANK, Purpose.OPTIMIZER, threads=threads)


def host_copy(name: str, op: HostKind, nbytes: float, stream: str = "") -> HostOperation:
    """Return a copy of ``nbytes`` of offloaded tensors."""
    return HostOperation(f"offload.{name}", op, nbytes, Axis.RANK, Purpose.OFFLOAD, stream=stream)


def gradients_to_host(
    workload: Workload, label: str, share: float, after: tuple[str, ...], freed_bytes: float = 0.0, earlier: str = ""
) -> list[Step]:
    """Copy the reduced gradients of ``share`` parameters to the host, and give back ``freed_bytes`` on the GPU.

    The CPU adds them to those of another micro-batch that are there once step ``earlier`` has ended, if any.
    """
    nbytes = share * workload.host_gradient_bytes
    comm = host_copy("grads to host", HostKind.TO_HOST, nbytes, _GRADIENTS)
    steps = [Step(f"{label} to host", comm, after, free_bytes=freed_bytes)]
    if earlier:
        add = host_computation(workload, "add grads", 3 * nbytes)
        steps.append(Step(f"{label} added", add, (steps[0].label, earlier)))
    return steps


def host_gradients(lanes: Lanes, grad_bytes: int) -> list[HostGradients]:
    """Return the gradients of ``grad_bytes`` an element that reductions have brought to the host.

    Those of several micro-batches, added up, are one entry, in the place of the first.
    """
    #: Label of a copy -> labels of the addition, and of the step that brought the other gradients.
    added_to: dict[str, tuple[str, str]] = {}
    for step in lanes.get(HOST_LANES[HostKind.HOST_UPDATE], ()):
        copied, earlier = step.after
        added_to[copied] = step.label, earlier
    entries: dict[int, HostGradients] = {}
    place_of: dict[str, int] = {}
    for step in lanes.get(host_copy("", HostKind.TO_HOST, 0.0, _GRADIENTS).lane, ()):
        if not step.label.startswith(REDUCTION):
            continue
        assert isinstance(step.op, HostOperation)
        ready, earlier = added_to.get(step.label, (step.label, ""))
        place = place_of[earlier] if earlier else len(entries)
        place_of[ready] = place
        entries[place] = HostGradients(step.op.nbytes / grad_bytes, ready)
    return list(entries.values())


def fetch_parameters(workload: Workload, label: str, nbytes: float) -> list[Step]:
    """Copy a shard of ``nbytes`` to the GPU, if it lives outside; the last step bears the ``label``, and holds it."""
    place = workload.parallelism.offload.parameters
    if place == "none":
        return []
    comm = host_copy("params to GPU", HostKind.FROM_HOST, nbytes, "params")
    if place == "cpu":
        return [Step(label, comm, alloc_bytes=nbytes)]
    read = host_copy("params from drive", HostKind.FROM_NVME, nbytes, "params")
    return [Step(f"{label} read", read), Step(label, comm, (f"{label} read",), alloc_bytes=nbytes)]
