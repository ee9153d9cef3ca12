"""The loss that balances experts in Megatron-Core's routers, with fused kernels and with PyTorch's own.

github.com/NVIDIA/Megatron-LM, core_v0.15, megatron/core/transformer/moe: router.py (``_apply_aux_loss``,
``attach_and_log_load_balancing_loss``), moe_utils.py (``compute_routing_scores_for_aux_loss``,
``switch_load_balancing_loss_func``, ``MoEAuxLossAutoScaler``). The loss is a product of how many tokens each expert got
and how much probability. Both are of a micro-batch, or of each of its sequences, which are as many numbers.
"""

from __future__ import annotations

from simulator.operations.experts import CHOICE, INDEX, PROBABILITY, Experts
from simulator.operations.nodes import Ops, comm, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute


def _kernel(phase: str, name: str, op: str, read: float = 0.0, written: float = 0.0) -> Compute:
    return memory(phase, f"moe.balance {name}", op, read, written, "fp32")


def _numbers(phase: str, *names: str) -> Ops:
    """Return kernels on a number for each expert, or on one: they take a start, and their bytes no time."""
    return tuple(_kernel(phase, name, "activation") for name in names)


def _counts(shapes: Shapes, experts: Experts) -> Ops:
    """Return the sum of tokens by expert, over the ranks that share a layer's rows."""
    by_expert = float(INDEX * experts.experts)
    count = _kernel("F", "counts", "reduce", float(CHOICE * experts.tokens * experts.experts), by_expert)
    return (count, comm("all_reduce", "moe.balance", by_expert)) if shapes.tp > 1 else (count,)


def map_of_choices(experts: Experts, whose: str) -> Ops:
    """Return PyTorch's kernels that write a map of tokens to chosen experts into zeros as wide as all experts."""
    scores = float(PROBABILITY * experts.tokens * experts.experts)
    choices = float(CHOICE * experts.tokens * experts.experts)
    sizes = (
        ("map zero", "zero", 0.0, scores),
        ("map whole", "copy", scores, scores),
        ("map", "strided", scores, scores),
        ("map cast", "cast", scores, choices),
    )
    return tuple(memory("F", f"moe.{whose} {name}", op, read, written, "fp32") for name, op, read, written in sizes)


def fused(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return the kernels of Transformer Engine each way: scores with a map of choices, and the loss of all tokens.

    PyTorch's divide the loss to log it, and add it to what is logged; backward they make its gradient.
    """
    if not experts.balanced:
        return (), ()
    scores = float(PROBABILITY * experts.tokens * experts.experts)
    forward = (
        _kernel("F", "scores", "softmax", scores, scores),
        *_counts(shapes, experts),
        _kernel("F", "loss", "reduce", scores),
        *_numbers("F", "log", "log sum"),
    )
    backward = (
        *_numbers("B", "ones", "scale"),
        _kernel("B", "loss bwd", "zero", 0.0, scores),
        _kernel("B", "scores bwd", "softmax_bwd", 2 * scores, scores),
        _kernel("B", "sum", "residual", 2 * scores, scores),
    )
    return forward, backward


def by_operations(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return PyTorch's kernels each way: a softmax, a second choice of experts, its map, sums and their product."""
    if not experts.balanced:
        return (), ()
    scores = float(PROBABILITY * experts.tokens * experts.experts)
    chosen = float((PROBABILITY + INDEX) * experts.tokens * experts.top_k)
    forward = (
        _kernel("F", "scores", "softmax", scores, scores),
        _kernel("F", "top-k", "softmax", scores, chosen),  # a row is read at once, as by a softmax; its time is assumed
        *map_of_choices(experts, "balance"),
        *_counts(shapes, experts),
        _kernel("F", "probabilities", "reduce", scores),
        *_numbers("F", "product", "loss", "scale", "log", "log sum"),
    )
    backward = (
        *_numbers("B", "ones", "main scale", "scale", "product"),
        _kernel("B", "scores bwd", "softmax_bwd", 2 * scores, scores),
        _kernel("B", "sum", "residual", 2 * scores, scores),
    )
    return forward, backward
