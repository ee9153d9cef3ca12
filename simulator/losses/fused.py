"""Cross-entropies with a kernel each way on logits in working precision.

``fused`` is Apex's, which FlashAttention's package has too: ``cunn_SoftMaxXEntropyForward`` and
``cunn_SoftMaxXEntropyBackward`` (Dao-AILab/flash-attention, csrc/xentropy/xentropy_kernel.cu). A row is read once: the
cache has it when it is read again, as of PyTorch's log-softmax.

``te_fused`` is Transformer Engine's, which Megatron-Core takes with ``cross_entropy_loss_fusion`` and
``cross_entropy_fusion_impl: te``: kernels of Triton that write the gradient over the logits
(NVIDIA/TransformerEngine, transformer_engine/pytorch/triton/cross_entropy.py).
"""

from __future__ import annotations

from dataclasses import replace

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


def in_place(shapes: Shapes, projection: Node, options: LossOptions) -> tuple[Node, ...]:
    """Return the same with the gradient in place of the logits, where the projection's backward pass finds it."""
    projection, loss = nodes(shapes, projection, options)
    logits = shapes.element * logits_of(shapes)
    return replace(projection, grad_bytes=max(projection.grad_bytes - logits, 0.0)), replace(loss, grad_bytes=0.0)


LOSS = Loss("fused", nodes)
IN_PLACE = Loss("te_fused", in_place)
