"""PyTorch's cross-entropy of logits in fp32: a kernel per operation (aten/src/ATen/native/LossNLL.cpp)."""

from __future__ import annotations

from simulator.losses import vocab_parallel
from simulator.losses.loss import WIDE, Loss, LossOptions, across_ranks, logits_of, loss_kernel
from simulator.operations.nodes import Node, Ops, Tensor
from simulator.operations.shapes import Shapes
from simulator.program import StepPhase


def forward(shapes: Shapes) -> Ops:
    """Return the cast to fp32, the log-softmax, and the choice of the targets'."""
    return (
        loss_kernel(shapes, StepPhase.FORWARD, "cast", "upcast", shapes.element, WIDE),
        *across_ranks(shapes, "max"),
        *across_ranks(shapes, "sum"),
        loss_kernel(shapes, StepPhase.FORWARD, "log_softmax", "loss", WIDE, WIDE),
        *across_ranks(shapes, "target"),
        loss_kernel(shapes, StepPhase.FORWARD, "nll", "loss", 0, 0),
    )


def backward(shapes: Shapes) -> Ops:
    """Return the gradients of the same."""
    return (
        loss_kernel(shapes, StepPhase.BACKWARD, "nll bwd", "zero", 0, WIDE),
        loss_kernel(shapes, StepPhase.BACKWARD, "log_softmax bwd", "loss_bwd", 2 * WIDE, WIDE),
        loss_kernel(shapes, StepPhase.BACKWARD, "cast bwd", "cast", WIDE, shapes.element),
    )


def nodes(shapes: Shapes, projection: Node, options: LossOptions) -> tuple[Node, ...]:
    """Return the loss behind the ``projection``; frameworks that keep no log-softmax take Megatron's kernels."""
    if not options.keeps_log_softmax:
        return vocab_parallel.nodes(shapes, projection, options)
    logits = logits_of(shapes)
    loss = Node(
        forward=forward(shapes),
        input_grad=backward(shapes),
        saved=(Tensor("loss.log_softmax", WIDE * logits),),
        grad_bytes=2 * WIDE * logits,
        forward_bytes=(shapes.element + WIDE) * logits,
    )
    return projection, loss


LOSS = Loss("eager", nodes)
