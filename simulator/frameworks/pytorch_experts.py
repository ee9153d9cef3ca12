"""Experts in plain PyTorch: a kernel per operation, and a host that waits for the counts of tokens.

Choices are sorted by expert, rows gathered in that order, and rows of several ranks put together expert by expert. On
the way back outputs are gathered in the order of tokens, weighed, and summed per token. All of it is as in torchtitan
(torchtitan/models/moe). Gradients of a permutation are gathered by its inverse. `calibration.train.experts` runs these
very operations.
"""

from __future__ import annotations

from simulator.frameworks.framework import ExpertHooks
from simulator.operations.experts import INDEX, PROBABILITY, Experts
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, Matmul, StepPhase
from simulator.units import DTYPE_BYTES

#: Radix sort of 64-bit keys, 8 bits a pass; keys and values are read and written (CUB's ``DeviceRadixSort``).
SORT_PASSES = 8


def router(shapes: Shapes, experts: Experts) -> Node:
    """Return the router: product in ``router_dtype``, softmax, probabilities of the choices. Cast inputs are kept."""
    wide = DTYPE_BYTES[experts.router_dtype]
    rows, params = float(experts.tokens * shapes.hidden), float(experts.experts * shapes.hidden)
    probs, chosen = (
        float(PROBABILITY * experts.tokens * experts.experts),
        float(PROBABILITY * experts.tokens * experts.top_k),
    )
    cast = wide != shapes.element

    def product(phase: str, role: str, m: int, n: int, k: int) -> Compute:
        name = "moe.router" if role == "fwd" else f"moe.router {role}"
        return Compute(name, Matmul(m, n, k, dtype=experts.router_dtype, role=role), StepPhase(phase))

    def casts(phase: str, name: str, *sizes: float, back: bool = False) -> Ops:
        read, written = (wide, shapes.element) if back else (shapes.element, wide)
        op = "cast" if back else "upcast"
        return tuple(memory(phase, name, op, read * one, written * one, "fp32") for one in sizes if cast)

    add = memory("B", "moe.input grad", "residual", 2 * shapes.element * rows, shapes.element * rows, shapes.dtype)
    scores = float(wide * experts.tokens * experts.experts)
    inputs = (Tensor("moe.router input", wide * rows) if cast else Tensor("mlp.normed", shapes.row_bytes),)
    return Node(
        forward=(
            *casts("F", "moe.router cast", rows, params),
            product("F", "fwd", experts.tokens, experts.experts, shapes.hidden),
            memory("F", "moe.router softmax", "softmax", scores, probs, "fp32"),
            memory("F", "moe.router choice", "copy", chosen, chosen, "fp32"),
        ),
        input_grad=(
            memory("B", "moe.router choice zero grad", "zero", 0, probs, "fp32"),
            memory("B", "moe.router choice bwd", "copy", chosen, chosen, "fp32"),
            memory("B", "moe.router softmax bwd", "softmax_bwd", 2 * probs, scores, "fp32"),
            product("B", "dgrad", experts.tokens, shapes.hidden, experts.experts),
            *casts("B", "moe.router cast bwd", rows, back=True),
            *((add,) * (2 if experts.shared_ffn else 1)),
        ),
        weight_grad=(
            product("W", "wgrad", experts.experts, shapes.hidden, experts.tokens),
            *casts("W", "moe.router wgrad cast", params, back=True),
        ),
        saved=(*inputs, Tensor("moe.router probs", probs)),
        saved_for_weights=inputs,
        grad_bytes=(wide + 2 * shapes.element) * rows + 2 * probs,
        output_grad_bytes=scores,
        weight_grad_bytes=wide * params,
    )


def sort(experts: Experts) -> Ops:
    """Return the kernels that make of choices their order by expert, its inverse, the token of each row, and counts."""
    entries = float(INDEX * experts.sent)

    def kernel(name: str, op: str, read: float, written: float) -> Ops:
        return (memory("F", f"moe.{name}", op, read, written, "fp32"),)

    return (
        *kernel("sort indices", "zero", 0, entries),
        *kernel("sort histogram", "reduce", entries, 0),
        *(kernel("sort", "copy", 2 * entries, 2 * entries) * SORT_PASSES),
        *kernel("inverse order", "copy", 2 * entries, entries),
        *kernel("counts zero", "zero", 0, INDEX * experts.experts),
        *kernel("counts", "reduce", 2 * entries, INDEX * experts.experts),
        *kernel("tokens of rows", "copy", entries, entries),
    )


def permuted(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return the gathering of rows in the order of the experts, and of their gradients back, summed per token."""
    token_bytes, sent_bytes = (
        float(shapes.element * experts.tokens * shapes.hidden),
        float(shapes.element * experts.sent * shapes.hidden),
    )
    return (
        (memory("F", "moe.permute", "embedding", sent_bytes, sent_bytes, shapes.dtype),),
        (
            memory("B", "moe.permute bwd", "embedding", sent_bytes, sent_bytes, shapes.dtype),
            memory("B", "moe.permute sum", "combine", sent_bytes, token_bytes, shapes.dtype),
        ),
    )


def unpermuted(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return the gathering of experts' outputs in the order of tokens, weighed and summed per token."""
    token_bytes, sent_bytes = (
        float(shapes.element * experts.tokens * shapes.hidden),
        float(shapes.element * experts.sent * shapes.hidden),
    )
    weights = float(experts.sent)
    return (
        (
            memory("F", "moe.unpermute", "embedding", sent_bytes, sent_bytes, shapes.dtype),
            memory("F", "moe.weights cast", "cast", PROBABILITY * weights, shapes.element * weights, shapes.dtype),
            memory("F", "moe.weigh", "weigh", sent_bytes, sent_bytes, shapes.dtype),
            memory("F", "moe.sum", "combine", sent_bytes, token_bytes, shapes.dtype),
        ),
        (
            memory("B", "moe.weigh bwd", "weigh", token_bytes, sent_bytes, shapes.dtype),
            memory("B", "moe.weights product", "weigh", token_bytes + sent_bytes, sent_bytes, shapes.dtype),
            memory("B", "moe.weights sum", "reduce", sent_bytes, shapes.element * weights, shapes.dtype),
            memory(
                "B", "moe.weights cast bwd", "upcast", shapes.element * weights, PROBABILITY * weights, shapes.dtype
            ),
            memory("B", "moe.unpermute bwd", "embedding", sent_bytes, sent_bytes, shapes.dtype),
        ),
    )


def kept(shapes: Shapes, experts: Experts) -> tuple[Tensor, ...]:
    """Return the kept tensors: experts' outputs, to be weighed, and the order of rows with its inverse."""
    return (
        Tensor("moe.out", float(shapes.element * experts.sent * shapes.hidden)),
        Tensor("moe.order", 2.0 * INDEX * experts.sent),
        Tensor("moe.weights", float((PROBABILITY + shapes.element) * experts.sent)),
    )


EXPERTS = ExpertHooks(
    router=router,
    sort=sort,
    permute=permuted,
    unpermute=unpermuted,
    kept_by_dispatch=lambda shapes, experts: (),
    kept_by_combine=kept,
    weighs_in_activation=False,
    host_waits_for_counts=True,
)
