"""Cross-entropies with a kernel each way on logits in working precision.

``fused`` is Apex's, which FlashAttention's package has too: ``cunn_SoftMaxXEntropyForward`` and
``cunn_SoftMaxXEntropyBackward`` (Dao-AILab/flash-attention, csrc/xentropy/xentropy_kernel.cu). A row is read once: the
cache has it when it is read again, as of PyTorch's log-softmax.

``te_fused`` is Transformer Engine's, which Megatron-Core takes with ``cross_entropy_loss_fusion`` and
``cross_entropy_fusion_impl: te``. Its kernels of Triton follow Liger's and write the gradient over the logits in the
forward pass (NVIDIA/TransformerEngine, transformer_engine/pytorch/triton/cross_entropy.py, commit 1b2b4a8 of 2025). Its
main branch has since moved the gradient to a tensor of its own.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.losses.loss import Loss, LossOptions, across_ranks, is_split, logits_of, loss_kernel
from simulator.operations.nodes import Node, Tensor, comm
from simulator.operations.shapes import Shapes
from simulator.program import StepPhase
from simulator.units import FP32_BYTES

#: What Transformer Engine's ranks tell each other of a row: its maximum, its sum of exponentials, the target's logit.
_NUMBERS_OF_A_ROW = 3


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
    """Return the ``projection`` and the loss whose forward pass leaves the gradient in place of the logits.

    ``online_softmax_kernel`` reads the logits, ``cross_entropy_kernel`` reads them and writes their gradient. In the
    backward pass ``element_mul_kernel`` multiplies that by the gradient of each token's loss. It is left out where that
    is the number 1, which losses that Megatron masks and adds up by token never have.
    """
    x, logits = shapes.element, shapes.element * logits_of(shapes)
    numbers = FP32_BYTES * _NUMBERS_OF_A_ROW * shapes.tokens * shapes.tp
    gather = (comm("all_gather", "loss rows", numbers),) if is_split(shapes) else ()
    loss = Node(
        forward=(
            loss_kernel(shapes, StepPhase.FORWARD, "online softmax", "liger_loss", x, 0),
            *gather,
            loss_kernel(shapes, StepPhase.FORWARD, "cross entropy", "liger_loss", x, x),
        ),
        input_grad=(loss_kernel(shapes, StepPhase.BACKWARD, "multiply", "activation", x, x),),
        saved=(Tensor("loss.logits grad", logits),),
    )
    return replace(projection, grad_bytes=max(projection.grad_bytes - logits, 0.0)), loss


LOSS = Loss("fused", nodes)
IN_PLACE = Loss("te_fused", in_place, leaves_logits=False)
