"""PyTorch's cross-entropy: a kernel per operation (aten/src/ATen/native/LossNLL.cpp), of logits cast to fp32."""

from __future__ import annotations

from dataclasses import replace

from simulator.losses import vocab_parallel
from simulator.losses.loss import Loss, LossOptions, across_ranks, is_split, logits_of, loss_kernel
from simulator.operations.nodes import Node, Ops, Tensor, comm
from simulator.operations.shapes import Shapes
from simulator.program import StepPhase
from simulator.units import FP32_BYTES


def forward(shapes: Shapes, width: int = FP32_BYTES) -> Ops:
    """Return the cast of logits to ``width`` bytes, the log-softmax, and the choice of the targets'."""
    cast = loss_kernel(shapes, StepPhase.FORWARD, "cast", "upcast", shapes.element, width)
    return (
        *((cast,) if width != shapes.element else ()),
        *across_ranks(shapes, "max"),
        *across_ranks(shapes, "sum"),
        loss_kernel(shapes, StepPhase.FORWARD, "log_softmax", "loss", width, width),
        *across_ranks(shapes, "target"),
        loss_kernel(shapes, StepPhase.FORWARD, "nll", "loss", 0, 0),
    )


def backward(shapes: Shapes, width: int = FP32_BYTES) -> Ops:
    """Return the gradients of the same."""
    cast = loss_kernel(shapes, StepPhase.BACKWARD, "cast bwd", "cast", width, shapes.element)
    return (
        loss_kernel(shapes, StepPhase.BACKWARD, "nll bwd", "zero", 0, width),
        loss_kernel(shapes, StepPhase.BACKWARD, "log_softmax bwd", "loss_bwd", 2 * width, width),
        *((cast,) if width != shapes.element else ()),
    )


def metrics(shapes: Shapes, number: int) -> Node:
    """Return ``number`` metrics, each of which is the cross-entropy once more without gradients.

    Composer computes metrics after the backward pass of each micro-batch, from logits that stay until then
    (mosaicml/composer, trainer/trainer.py, ``_eval_train_metrics``). Here metrics follow the loss, and take as long.
    Their logits in fp32 are not counted as memory: in Composer the activations are gone by then.
    """
    return Node(forward=forward(shapes) * number)


def whole_rows(shapes: Shapes) -> Shapes:
    """Return the shapes of a rank that has the logits of the whole vocabulary, of which it had a part."""
    return replace(shapes, vocab=shapes.vocab * shapes.tp, vocab_parallel=False)


def nodes(shapes: Shapes, projection: Node, options: LossOptions) -> tuple[Node, ...]:
    """Return the loss behind the ``projection``; frameworks that keep no log-softmax take Megatron's kernels."""
    if options.gathers_logits and is_split(shapes):
        return projection, _gathered_loss(shapes, FP32_BYTES)
    if not options.keeps_log_softmax:
        return vocab_parallel.nodes(shapes, projection, options)
    return projection, _loss(shapes, FP32_BYTES)


def narrow_nodes(shapes: Shapes, projection: Node, options: LossOptions) -> tuple[Node, ...]:
    """Return the loss of logits as the ``projection`` leaves them, outside of torch.autocast."""
    if options.gathers_logits and is_split(shapes):
        return projection, _gathered_loss(shapes, shapes.element)
    return projection, _loss(shapes, shapes.element)


def _gathered_loss(shapes: Shapes, width: int) -> Node:
    """Return the loss behind a gathering of the logits of all ranks, each of which computes the whole of it.

    The projection is a ``ColwiseParallel`` whose output is ``Replicate``: each rank has its columns of the gradient.
    """
    whole = whole_rows(shapes)
    loss, nbytes = _loss(whole, width), shapes.element * logits_of(whole)
    gather = comm("all_gather", "logits", nbytes)
    return replace(loss, forward=(gather, *loss.forward), forward_bytes=loss.forward_bytes + nbytes)


def _loss(shapes: Shapes, width: int) -> Node:
    logits = logits_of(shapes)
    cast_bytes = width if width != shapes.element else 0
    return Node(
        forward=forward(shapes, width),
        input_grad=backward(shapes, width),
        saved=(Tensor("loss.log_softmax", width * logits),),
        grad_bytes=2 * width * logits,
        forward_bytes=(shapes.element + cast_bytes) * logits,
    )


LOSS = Loss("eager", nodes, needs_rows=True)
NARROW = Loss("eager_narrow", narrow_nodes, needs_rows=True)
