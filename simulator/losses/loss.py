"""Facts of a way to compute the cross-entropy: operations of the projection to the vocabulary and of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.operations.nodes import Node, Ops, comm, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, StepPhase
from simulator.units import FP32_BYTES


@dataclass(frozen=True)
class LossOptions:
    """How a job computes its loss: choices of its workload, and facts of its framework.

    ``by_row``: class of kernels that take the same number for a whole row. ``keeps_log_softmax``: an eager loss keeps
    the logarithm of the softmax, not the softmax, which is worked on in place.

    Of losses that work chunk by chunk, ``chunks`` are those that the tokens of a micro-batch are cut into.
    ``recompute``: each is computed again in the backward pass. ``compile``: the loss of each is compiled.
    ``trained``: the projection has a weight gradient. ``returns_logits``: they are an output of what is compiled, whose
    gradient autograd fills with zeros. ``online_softmax``: one kernel finds the maximum and the sum of a row.
    ``apart``: a compiled loss is compiled without the projection. ``gathers_logits``: each rank has all logits before
    an eager loss, where the vocabulary is split.
    """

    by_row: str
    keeps_log_softmax: bool
    chunks: int
    recompute: bool
    compile: bool
    trained: bool
    returns_logits: bool
    online_softmax: bool
    apart: bool
    gathers_logits: bool


@dataclass(frozen=True)
class Loss:
    """One way to compute the cross-entropy.

    ``nodes`` are given the projection to the vocabulary and return it with the loss behind it, or as one with it.
    ``splits_vocabulary``: ranks can each have a part of the vocabulary. ``takes_options``: it works chunk by chunk.
    ``leaves_logits``: those of a whole micro-batch are there behind it. ``needs_rows``: where a framework gathers
    logits, each rank has whole rows of them from then on.
    """

    name: str
    nodes: Callable[[Shapes, Node, LossOptions], tuple[Node, ...]]
    splits_vocabulary: bool = True
    takes_options: bool = False
    leaves_logits: bool = True
    needs_rows: bool = False


def is_split(shapes: Shapes) -> bool:
    """True where each rank has a part of the vocabulary."""
    return shapes.tp > 1 and shapes.vocab_parallel


def logits_of(shapes: Shapes) -> float:
    """Return the number of logits of a micro-batch on this rank."""
    return float(shapes.tokens * shapes.vocab)


def loss_kernel(shapes: Shapes, phase: StepPhase, name: str, op: str, read: int, write: int) -> Compute:
    """Return a kernel that reads and writes so many bytes for every logit."""
    logits = logits_of(shapes)
    return memory(phase, f"loss.{name}", op, read * logits, write * logits, "fp32", shapes.vocab)


def across_ranks(shapes: Shapes, what: str) -> Ops:
    """Return the all-reduce of a number in fp32 for every token, where the vocabulary is split."""
    return (comm("all_reduce", f"loss {what}", FP32_BYTES * shapes.tokens),) if is_split(shapes) else ()


def less_largest(shapes: Shapes, by_row: str) -> Ops:
    """Return the kernels that cast logits to fp32 and take the largest of a row off, over all ranks' vocabulary.

    Kernels that take the same number from a whole row are of the class ``by_row``.
    """
    return (
        loss_kernel(shapes, StepPhase.FORWARD, "cast", "upcast", shapes.element, FP32_BYTES),
        loss_kernel(shapes, StepPhase.FORWARD, "max", "reduce", FP32_BYTES, 0),
        *across_ranks(shapes, "max"),
        loss_kernel(shapes, StepPhase.FORWARD, "subtract", by_row, FP32_BYTES, FP32_BYTES),
    )


def summed_exponentials(shapes: Shapes) -> Ops:
    """Return the kernels that make exponentials of logits in fp32, and the sum of each row over all ranks."""
    return (
        loss_kernel(shapes, StepPhase.FORWARD, "exp", "activation", FP32_BYTES, FP32_BYTES),
        loss_kernel(shapes, StepPhase.FORWARD, "sum", "reduce", FP32_BYTES, 0),
        *across_ranks(shapes, "sum"),
    )
