"""Updates of the weights of ranks: their operations, the agreement that they need, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.config import Workload
from simulator.models import (
    Seat,
    made_gradient_bytes,
    optimizer_ops,
    optimizer_workspace_bytes,
    replicated_gradient_ops,
)
from simulator.operations.weights import Weight
from simulator.program import Axis, Block, Comm


@dataclass(frozen=True)
class UpdateStep:
    """The end of a step of a rank with some weights.

    ``block``: what its GPU runs; None where that is nothing. ``late``: communication by which model-parallel ranks
    agree, where no rank waits for it. ``freed_bytes``: gradients that the step made. ``workspace_bytes``: of the GPU.
    """

    block: Block | None
    late: tuple[Comm, ...]
    freed_bytes: float
    workspace_bytes: float

    @classmethod
    def from_weights(cls, workload: Workload, weights: Sequence[Weight], seat: Seat) -> UpdateStep:
        """Return the update of ``weights`` of a rank at ``seat``.

        Servers that update take gradients as they are, and need no agreement.
        """
        layout, ops = workload.parallelism, optimizer_ops(workload, weights)
        if layout.server_count:
            return cls(Block("optimizer", ops) if ops else None, (), 0.0, 0.0)
        ops = (*replicated_gradient_ops(workload, weights, seat), *ops)
        agreeing = () if layout.optimizer_sync else (Axis.MP, Axis.EMP)
        late = tuple([op for op in ops if isinstance(op, Comm) and op.axis in agreeing])
        here = tuple([op for op in ops if op not in late])
        on_gpu = layout.offload.optimizer == "none"
        return cls(
            Block("optimizer", here) if here else None,
            late,
            made_gradient_bytes(workload, weights),
            optimizer_workspace_bytes(workload, weights) if on_gpu else 0.0,
        )
