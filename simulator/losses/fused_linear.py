"""Liger's fused linear cross-entropy (liger_kernel/ops/fused_linear_cross_entropy.py).

The forward pass has projection, loss and both gradients of a chunk, so that no logits are kept. The gradients wait for
the backward pass instead.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.losses.chunked import chunk_sizes, cut_product
from simulator.losses.loss import Loss, LossOptions, logits_of
from simulator.operations.nodes import Node, Op, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, Matmul, StepPhase


def liger_chunks(tokens: int, vocab: int, hidden: int) -> int:
    """Return the number of chunks: so many that the logits of one are no larger than the input.

    >>> liger_chunks(8192, 128256, 4096)
    32
    """
    size = -(-tokens // -(-vocab // hidden))
    return -(-tokens // (1 << (size - 1).bit_length()))


def nodes(shapes: Shapes, projection: Node, options: LossOptions) -> tuple[Node, ...]:
    """Return one operation whose backward pass hands on gradients that the forward pass has computed.

    A chunk's kernel reads logits twice, and writes the gradient over them. The product of the weight's gradient adds to
    what the chunks before gave.
    """
    sizes = chunk_sizes(shapes.tokens, liger_chunks(shapes.tokens, shapes.vocab, shapes.hidden))
    products = [op for op in projection.input_grad if _is_product(op)]
    products += [op for op in projection.weight_grad if _is_product(op) and options.trained]
    gradient = projection.weight_grad_bytes if options.trained else 0.0
    input_gradient = float(shapes.element * shapes.tokens * shapes.hidden)
    forward: list[Op] = [op for op in projection.forward if not _is_product(op)]
    forward += [memory(StepPhase.FORWARD, "loss.zero grads", "zero", 0.0, input_gradient + gradient, shapes.dtype)]
    logits = shapes.element * logits_of(shapes)
    for tokens in sizes:
        part = logits * tokens / shapes.tokens
        forward += [cut_product(op, tokens) for op in projection.forward if _is_product(op)]
        forward.append(memory(StepPhase.FORWARD, "loss.cross_entropy", "liger_loss", 2 * part, part, shapes.dtype))
        forward += [_in_forward(cut_product(op, tokens)) for op in products]
    kept = [Tensor("loss.input gradient", input_gradient)]
    if gradient:
        kept.append(Tensor("loss.weight gradient", gradient))
    return (
        replace(
            projection,
            forward=tuple(forward),
            input_grad=tuple(op for op in projection.input_grad if not _is_product(op)),
            weight_grad=tuple(op for op in projection.weight_grad if not _is_product(op)),
            gather=(),
            together=(),
            saved=tuple(kept),
            saved_for_weights=(),
            forward_bytes=logits * sizes[0] / shapes.tokens,
            grad_bytes=0.0,
            output_grad_bytes=0.0,
            weight_grad_bytes=0.0,
        ),
    )


def _is_product(op: Op) -> bool:
    return isinstance(op, Compute) and isinstance(op.kernel, Matmul)


def _in_forward(op: Compute) -> Compute:
    """Return a product of the backward pass as the forward pass runs it; sums of gradients are part of it."""
    assert isinstance(op.kernel, Matmul)
    adds = op.kernel.role == "wgrad"
    return replace(op, phase=StepPhase.FORWARD, kernel=replace(op.kernel, accumulate=adds))


LOSS = Loss("fused_linear", nodes, splits_vocabulary=False, leaves_logits=False)
