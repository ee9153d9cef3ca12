"""Apex's cross-entropy, which FlashAttention's package has too: a kernel each way on logits in working precision.

Its kernels are ``cunn_SoftMaxXEntropyForward`` and ``cunn_SoftMaxXEntropyBackward`` (Dao-AILab/flash-attention,
csrc/xentropy/xentropy_kernel.cu). A row is read once: the cache has it when it is read again, as of PyTorch's
log-softmax.
"""

from __future__ import annotations

from simulator.losses.loss import Loss, LossOptions, across_ranks, logits_of, loss_kernel
from simulator.operations.nodes import Node, Tensor
from simulator.operations.shapes import Shapes
from simulator.program import StepPhase


def nodes(shapes: Shapes, projection: Node, options: LossOptions) -> tuple[Node, ...]:
    """Return the ``projection`` and the loss, which keeps the logits and writes their gradient beside them."""
    x, logits = shapes.element, shapes.element * logits_of(shapes)
    return projection, Node(
        forward=(
            loss_kernel(shapes, StepPhase.FORWARD, "xentropy", "loss", x, 0),
            *across_ranks(shapes, "sum"),
            *across_ranks(shapes, "target"),
        ),
        input_grad=(loss_kernel(shapes, StepPhase.BACKWARD, "xentropy bwd", "loss_bwd", x, x),),
        saved=(Tensor("loss.logits", logits),),
        grad_bytes=logits,
    )


LOSS = Loss("fused", nodes)
