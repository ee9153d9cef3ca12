"""PyTorch's cross-entropy of logits that are a DTensor over the vocabulary: a kernel per operation.

torch/distributed/tensor/parallel/loss.py: ``_log_softmax``, ``_nll_loss_and_log_softmax_backward``. The backward pass
makes a tensor of zeros, the exponentials, their sum, and the product with the loss's gradient.
"""

from __future__ import annotations

from simulator.losses.loss import (
    Loss,
    LossOptions,
    across_ranks,
    less_largest,
    logits_of,
    loss_kernel,
    summed_exponentials,
)
from simulator.operations.nodes import Node, Tensor
from simulator.operations.shapes import Shapes
from simulator.program import StepPhase
from simulator.units import FP32_BYTES


def nodes(shapes: Shapes, projection: Node, options: LossOptions) -> tuple[Node, ...]:
    """Return the loss behind the ``projection``; the logarithm of the softmax is kept."""
    x, logits, by_row = shapes.element, logits_of(shapes), options.by_row
    loss = Node(
        forward=(
            *less_largest(shapes, by_row),
            *summed_exponentials(shapes),
            loss_kernel(shapes, StepPhase.FORWARD, "log_softmax", by_row, FP32_BYTES, FP32_BYTES),
            *across_ranks(shapes, "target"),
        ),
        input_grad=(
            loss_kernel(shapes, StepPhase.BACKWARD, "nll bwd", "zero", 0, FP32_BYTES),
            loss_kernel(shapes, StepPhase.BACKWARD, "exp bwd", "activation", FP32_BYTES, FP32_BYTES),
            loss_kernel(shapes, StepPhase.BACKWARD, "add bwd", "residual", 2 * FP32_BYTES, FP32_BYTES),
            loss_kernel(shapes, StepPhase.BACKWARD, "scale bwd", by_row, FP32_BYTES, FP32_BYTES),
            loss_kernel(shapes, StepPhase.BACKWARD, "cast bwd", "cast", FP32_BYTES, x),
        ),
        saved=(Tensor("loss.log_softmax", FP32_BYTES * logits),),
        grad_bytes=3 * FP32_BYTES * logits,
        forward_bytes=(x + 2 * FP32_BYTES) * logits,
    )
    return projection, loss


LOSS = Loss("loss_parallel", nodes)
