"""Megatron's cross-entropy over a vocabulary that ranks share (megatron/core/tensor_parallel/cross_entropy.py).

Ranks exchange three numbers for every token: the maximum, the target's logit, and the sum of exponentials (arXiv
1909.08053, section 3). Logits are cast to fp32 and worked on in place, and the softmax is kept (arXiv 2205.05198,
section 4.3: 4 s b v / t bytes).
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
    """Return the loss behind the ``projection``.

    Kernels that take the same number from a whole row, or divide it by one, are of the class ``by_row`` of the options.
    """
    x, logits, by_row = shapes.element, logits_of(shapes), options.by_row
    loss = Node(
        forward=(
            *less_largest(shapes, by_row),
            *across_ranks(shapes, "target"),
            *summed_exponentials(shapes),
            loss_kernel(shapes, StepPhase.FORWARD, "normalise", by_row, FP32_BYTES, FP32_BYTES),
        ),
        input_grad=(
            loss_kernel(shapes, StepPhase.BACKWARD, "bwd", by_row, FP32_BYTES, FP32_BYTES),
            loss_kernel(shapes, StepPhase.BACKWARD, "cast bwd", "cast", FP32_BYTES, x),
        ),
        saved=(Tensor("loss.softmax", FP32_BYTES * logits),),
        grad_bytes=x * logits,
        forward_bytes=x * logits,
    )
    return projection, loss


LOSS = Loss("vocab_parallel", nodes)
