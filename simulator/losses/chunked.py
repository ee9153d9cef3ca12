"""Cross-entropy of chunks of tokens, one after another.

torchtune's ``CEWithChunkedOutputLoss`` (torchtune/modules/loss/ce_chunked_output_loss.py) makes the logits of all
chunks, and then casts and reduces each. Log-softmaxes of all chunks are kept.
TRL's ``chunked_nll``, of 256 tokens (trl/trainer/sft_trainer.py), computes projection and loss of a chunk again in the
backward pass, and keeps none.
Autograd adds the gradients of the weight up, the first two out of place: three of them are alive then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from simulator.losses import compiled, eager
from simulator.losses.loss import Loss, LossOptions, logits_of
from simulator.operations.nodes import Node, Op, Ops, Tensor, memory, run_again
from simulator.operations.shapes import Shapes
from simulator.program import Compute, Matmul, Memory, StepPhase
from simulator.units import FP32_BYTES


def chunk_sizes(tokens: int, chunks: int) -> list[int]:
    """Return the tokens of each chunk, as ``torch.chunk`` cuts them.

    >>> chunk_sizes(10, 4), chunk_sizes(2, 8)
    ([3, 3, 3, 1], [1, 1])
    """
    size = -(-tokens // min(chunks, tokens))
    return [min(size, tokens - start) for start in range(0, tokens, size)]


def cut_product(op: Op, tokens: int) -> Compute:
    """Return a product of the projection for ``tokens`` of its tokens."""
    assert isinstance(op, Compute)
    assert isinstance(op.kernel, Matmul)
    sums_tokens = op.kernel.role == "wgrad"
    return replace(op, kernel=replace(op.kernel, k=tokens) if sums_tokens else replace(op.kernel, m=tokens))


def cut_products(ops: Iterable[Op], sizes: list[int]) -> Ops:
    """Return ``ops`` of the projection with every product of all tokens as one per chunk."""
    cut: list[Op] = []
    for op in ops:
        if isinstance(op, Compute) and isinstance(op.kernel, Matmul):
            cut += [cut_product(op, tokens) for tokens in sizes]
        else:
            cut.append(op)
    return tuple(cut)


def nodes(shapes: Shapes, projection: Node, options: LossOptions) -> tuple[Node, ...]:
    """Return projection and loss, chunk by chunk."""
    sizes = chunk_sizes(shapes.tokens, options.chunks)
    kernels = compiled if options.compile else eager
    forward = cut_products(projection.forward, sizes)
    loss_forward, loss_backward = (
        _each(kernels.forward(shapes), sizes),
        _each(kernels.backward(shapes), sizes),
    )
    again = _again(forward, loss_forward, len(sizes)) if options.recompute else ()
    gradient = projection.weight_grad_bytes if options.trained else 0.0
    sums = (
        memory(StepPhase.WEIGHT_GRADIENT, "head.logits wgrad sum", "residual", 2 * gradient, gradient, shapes.dtype),
    )
    full = shapes.element * shapes.tokens * shapes.hidden
    cut = replace(
        projection,
        forward=forward,
        input_grad=(
            *cut_products(projection.input_grad, sizes),
            memory(StepPhase.BACKWARD, "head.normed grad", "copy", full, full, shapes.dtype),
        ),
        weight_grad=(
            *cut_products(projection.weight_grad, sizes),
            *(sums * (len(sizes) - 1) if gradient else ()),
        ),
        grad_bytes=0.0,
        output_grad_bytes=projection.output_grad_bytes if options.trained else 0.0,  # else the loss counts them
    )
    saved, forward_bytes, grad_bytes = _alive(shapes, options, sizes[0] / shapes.tokens, gradient)
    loss = Node(
        forward=loss_forward,
        input_grad=(*again, *loss_backward),
        saved=saved,
        grad_bytes=grad_bytes + full,
        forward_bytes=forward_bytes,
    )
    return cut, loss


def _again(forward: Ops, loss_forward: Ops, chunks: int) -> Ops:
    """Return what the backward pass computes again: a checkpoint for each chunk, which its product carries."""
    products = [op for op in forward if isinstance(op, Compute) and isinstance(op.kernel, Matmul)][:chunks]
    carriers = {id(op) for op in products}
    return tuple(run_again(op, carries_checkpoint=id(op) in carriers) for op in (*forward, *loss_forward))


def _each(ops: Ops, sizes: list[int]) -> Ops:
    """Return the kernels of ``ops`` once for each chunk, which has its share of their bytes."""
    tokens = sum(sizes)
    parts: list[Op] = []
    for op in ops:
        assert isinstance(op, Compute)
        assert isinstance(op.kernel, Memory)
        whole = op.kernel
        for size in sizes:
            read, written = whole.read_bytes * size / tokens, whole.write_bytes * size / tokens
            parts.append(replace(op, kernel=replace(whole, read_bytes=read, write_bytes=written)))
    return tuple(parts)


def _alive(
    shapes: Shapes, options: LossOptions, share: float, gradient: float
) -> tuple[tuple[Tensor, ...], float, float]:
    """Return the kept tensors, and the bytes beside them at the fullest moment of the forward and of the backward pass.

    ``share`` is that of a chunk, ``gradient`` the bytes of a weight gradient. Backward passes of losses run before
    those of projections, which were called first, unless both are computed again together.
    """
    logits = logits_of(shapes)
    narrow, wide = shapes.element * logits, FP32_BYTES * logits
    sums = 3 * gradient
    if options.recompute:
        tensors = 2 * narrow * share if options.compile else 3 * wide * share  # of a chunk in its backward pass
        forward = narrow * share if options.compile else (narrow + 2 * wide) * share
        return (), forward, max(gradient + tensors, sums)
    left = narrow * max(1 - 2 * share, 0.0)  # gradients of logits, when the second weight gradient is added
    if options.compile:
        return (Tensor("loss.logits", narrow),), 0.0, max(narrow * share, left + sums - narrow)
    return (Tensor("loss.log_softmax", wide),), narrow + wide * share, max(2 * wide * share, left + sums - wide)


LOSS = Loss("chunked", nodes, splits_vocabulary=False, takes_options=True, leaves_logits=False)
