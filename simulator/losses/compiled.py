"""Cross-entropy under torch.compile, which never writes logits in fp32: it keeps them in working precision and computes
the softmax again. The gradient is written over the logits where projection and loss are compiled together."""

from __future__ import annotations

from dataclasses import replace

from simulator.losses.loss import Loss, LossOptions, across_ranks, is_split, logits_of, loss_kernel
from simulator.operations.nodes import Node, Ops, Tensor
from simulator.operations.shapes import Shapes
from simulator.program import Compute, Memory, StepPhase


def forward(shapes: Shapes) -> Ops:
    """Return the maximum and the sum of exponentials of every row."""
    return (
        loss_kernel(shapes, StepPhase.FORWARD, "max", "reduce", shapes.element, 0),
        *across_ranks(shapes, "max"),
        *across_ranks(shapes, "target"),
        loss_kernel(shapes, StepPhase.FORWARD, "sum_exp", "reduce", shapes.element, 0),
        *across_ranks(shapes, "sum"),
    )


def backward(shapes: Shapes) -> tuple[Compute]:
    """Return the gradient of the logits."""
    return (loss_kernel(shapes, StepPhase.BACKWARD, "bwd", "loss_bwd", shapes.element, shapes.element),)


def nodes(shapes: Shapes, projection: Node, options: LossOptions) -> tuple[Node, ...]:
    """Return the ``projection`` and the loss; the projection's backward pass finds the gradient in place of logits.

    A loss that is compiled apart writes the gradient beside the logits, which end before the projection goes back.
    """
    logits = shapes.element * logits_of(shapes)
    online = options.online_softmax and not is_split(shapes)
    beside = 2 * logits if options.online_softmax else 0.0
    loss = Node(
        forward=_forward_online(shapes) if online else forward(shapes),
        input_grad=_gradient(shapes, options),
        saved=(Tensor("loss.logits", logits),),
        grad_bytes=logits if options.apart else beside,
    )
    return replace(projection, grad_bytes=max(projection.grad_bytes - logits, 0.0)), loss


def _forward_online(shapes: Shapes) -> Ops:
    """Return the one kernel that finds the maximum and the sum of a row.

    Inductor looks for both in a row (torch/_inductor/fx_passes/post_grad.py, ``prepare_softmax_pattern``). Where the
    vocabulary is split, an all-reduce stands between them.
    """
    return (loss_kernel(shapes, StepPhase.FORWARD, "softmax", "loss", shapes.element, 0),)


def _gradient(shapes: Shapes, options: LossOptions) -> Ops:
    """Return the kernels of the gradient of the logits.

    Logits that are an output stay beside their gradient. Autograd makes one of zeros for them first
    (torch/_functorch/_aot_autograd/runtime_wrappers.py, ``materialize_grads``), to which the loss adds its own.
    """
    if options.returns_logits:
        zeros = loss_kernel(shapes, StepPhase.BACKWARD, "zero logits grad", "zero", 0, shapes.element)
        added = loss_kernel(shapes, StepPhase.BACKWARD, "bwd", "loss_bwd", 2 * shapes.element, shapes.element)
        return zeros, _by_element(shapes, added)
    (gradient,) = backward(shapes)
    return (_by_element(shapes, gradient),) if options.online_softmax else (gradient,)


def _by_element(shapes: Shapes, kernel: Compute) -> Compute:
    """Return ``kernel`` as one that works on each logit."""
    assert isinstance(kernel.kernel, Memory)
    return replace(kernel, kernel=replace(kernel.kernel, elements=logits_of(shapes)))


LOSS = Loss("compiled", nodes)
