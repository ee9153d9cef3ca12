"""Data parallelism through parameter servers: gradients are pushed, weights pulled.

Servers are processes on the hosts of nodes of their own, each with an equal part of every tensor (Li et al., OSDI
2014). What the workers of a node send or fetch goes through the server's NIC of the same rail. Synchronous servers
wait until all replicas have pushed the same gradients, add them up and update in one pass over memory, then weights
are pulled. Some parameters have copies on several ranks: a tied embedding table at both ends of a pipeline, norms under
sequence parallelism. They are summed on the servers too, so that the ranks need not do it among themselves.
Asynchronous servers apply what arrives at once, and the worker pulls what is there (Downpour SGD, Dean et al., NIPS
2012).
"""

from __future__ import annotations

from simulator.config import Workload
from simulator.models import server_update_bytes
from simulator.program import Axis, HostKind, HostOperation, Purpose, Step
from simulator.units import DTYPE_BYTES


def exchange(workload: Workload, label: str, axis: str, count: int, after: tuple[str, ...]) -> list[Step]:
    """Return the steps that push the gradients of ``count`` parameters, update on servers, and pull the weights.

    Ranks of ``axis`` share the parameters. The last step bears the ``label``.
    """
    training, layout = workload.training, workload.parallelism
    together = layout.replicas(axis) if layout.data_parallel == "parameter_server" else 1
    pushed = float(count * DTYPE_BYTES[training.grad_dtype])
    pulled = float(count * DTYPE_BYTES[training.trained_dtype])
    push = HostOperation("ps.push grads", HostKind.PUSH, pushed, Axis.RANK, Purpose.DATA)
    update = HostOperation(
        "ps.update",
        HostKind.SERVER_UPDATE,
        count * server_update_bytes(workload, together),
        axis if together > 1 else Axis.RANK,
        Purpose.OPTIMIZER,
    )
    pull = HostOperation("ps.pull params", HostKind.PULL, pulled, Axis.RANK, Purpose.DATA)
    return [
        Step(f"{label} push", push, after, part=label),
        Step(f"{label} update", update, (f"{label} push",), part=label),
        Step(label, pull, (f"{label} update",), part=label),
    ]
