"""Kernels that do several operations at once.

They are written by hand (Megatron-Core, Transformer Engine, Apex), or made by Inductor of the same operations.

github.com/NVIDIA/Megatron-LM, megatron/core/transformer/moe: router.py, token_dispatcher.py.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.frameworks import balancing
from simulator.frameworks.framework import ActivationKernels, AdapterKernels, ExpertHooks, Traffic
from simulator.operations.dropout import drop_kernel, dropout
from simulator.operations.experts import PROBABILITY, Experts
from simulator.operations.nodes import Node, Ops, Tensor, fuse, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, Matmul, StepPhase
from simulator.units import DTYPE_BYTES

#: Bytes of an entry of the maps between tokens and their sorted copies (int32).
SHORT_INDEX = 4
#: Queries, or keys, turned in one kernel; gradients are turned back by one.
ROTATION = ((Traffic("", "rope", 1, 1),), (Traffic("", "rope", 1, 1),))


def activation(shapes: Shapes) -> ActivationKernels:
    """Return a kernel each way; a gated one reads both halves, and backward writes the gradients of both."""
    if shapes.gated:
        return ActivationKernels((Traffic("", "activation", 2, 1),), (Traffic("", "activation_bwd", 3, 2),))
    return ActivationKernels((Traffic("", "activation", 1, 1),), (Traffic("", "activation_bwd", 2, 1),))


def residual(shapes: Shapes, block: str) -> Node:
    """Return dropout and sum in one kernel, with the bias before them."""
    add = memory("F", f"{block}.residual", "residual", 2 * shapes.row_bytes, shapes.row_bytes, shapes.dtype)
    if not shapes.dropout:
        return Node(forward=(add,), grad_bytes=shapes.row_bytes)
    name, elements = f"{block}.dropout", shapes.rows * shapes.hidden
    kernel = replace(fuse("F", drop_kernel(shapes, name, elements), add, shapes.row_bytes, keep=False), name=add.name)
    return dropout(shapes, name, elements, mask=f"{name} mask", fused_with=kernel)


def embedding_mask(shapes: Shapes, nbytes: float) -> tuple[Ops, Ops]:
    """Return the kernel that sets rows of words of other ranks to zero in place."""
    foreign = nbytes * (shapes.tp - 1) / shapes.tp
    return (memory("F", "embedding.mask", "embedding", 0, foreign, shapes.dtype),), ()


def router(shapes: Shapes, experts: Experts) -> Node:
    """Return the product with the router's weight, softmax (or sigmoid), and the choice of ``top_k`` experts."""
    scores = float(DTYPE_BYTES[experts.router_dtype] * experts.tokens * experts.experts)
    probs = float(PROBABILITY * experts.tokens * experts.experts)
    chosen = float((PROBABILITY + SHORT_INDEX) * experts.tokens * experts.top_k)
    balance, balance_grad = balancing.fused(shapes, experts)
    return router_with(
        shapes,
        experts,
        choice=(
            memory("F", "moe.router softmax", "softmax", scores, probs, "fp32"),
            memory("F", "moe.router top-k", "softmax", probs, chosen, "fp32"),
            *balance,
        ),
        choice_grad=(
            *balance_grad,
            memory("B", "moe.router top-k bwd", "softmax_bwd", chosen, probs, "fp32"),
            memory("B", "moe.router softmax bwd", "softmax_bwd", 2 * probs, scores, "fp32"),
        ),
    )


def router_with(shapes: Shapes, experts: Experts, *, choice: Ops, choice_grad: Ops) -> Node:
    """Return the product with the router's weight, and the kernels that choose experts by its scores, each way."""
    element = DTYPE_BYTES[experts.router_dtype]
    full = float(shapes.element * experts.tokens * shapes.hidden)
    scores = float(element * experts.tokens * experts.experts)
    probs = float(PROBABILITY * experts.tokens * experts.experts)

    def product(phase: str, role: str, m: int, n: int, k: int) -> Compute:
        name = "moe.router" if role == "fwd" else f"moe.router {role}"
        return Compute(name, Matmul(m, n, k, dtype=experts.router_dtype, role=role), StepPhase(phase))

    def cast(phase: str, name: str, read: float, write: float) -> Ops:
        op = "upcast" if write > read else "cast"
        return (memory(phase, name, op, read, write, "fp32"),) if element != shapes.element else ()

    wide = float(element * experts.tokens * shapes.hidden)
    paths = 2 if experts.shared_ffn else 1
    return Node(
        forward=(
            *cast("F", "moe.router cast", full, wide),
            product("F", "fwd", experts.tokens, experts.experts, shapes.hidden),
            *choice,
        ),
        input_grad=(
            *choice_grad,
            product("B", "dgrad", experts.tokens, shapes.hidden, experts.experts),
            *cast("B", "moe.router cast bwd", wide, full),
            # The input goes to the router, to the experts and to the shared ones: their gradients are summed.
            *(memory("B", "moe.input grad", "residual", 2 * full, full, shapes.dtype) for _ in range(paths)),
        ),
        weight_grad=(
            *cast("W", "moe.router cast again", full, wide),
            product("W", "wgrad", experts.experts, shapes.hidden, experts.tokens),
        ),
        saved=(Tensor("mlp.normed", shapes.row_bytes), Tensor("moe.router probs", probs)),
        saved_for_weights=(Tensor("mlp.normed", shapes.row_bytes),),
        grad_bytes=wide + 2 * full + 2 * probs,
        output_grad_bytes=scores,
        weight_grad_bytes=wide + element * experts.experts * shapes.hidden,
    )


def permute(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return a kernel each way that copies the rows of tokens into the order of the experts."""
    rows, copies = (float(shapes.element * tokens * shapes.hidden) for tokens in (experts.tokens, experts.sent))
    return (
        (memory("F", "moe.permute", "copy", rows, copies, shapes.dtype),),
        (memory("B", "moe.permute bwd", "copy", copies, rows, shapes.dtype),),
    )


def unpermute(shapes: Shapes, experts: Experts) -> tuple[Ops, Ops]:
    """Return a kernel each way that sums the copies of every token."""
    rows, copies = (float(shapes.element * tokens * shapes.hidden) for tokens in (experts.tokens, experts.sent))
    return (
        (memory("F", "moe.unpermute", "copy", copies, rows, shapes.dtype),),
        (memory("B", "moe.unpermute bwd", "copy", rows, copies, shapes.dtype),),
    )


def row_map(shapes: Shapes, experts: Experts) -> tuple[Tensor, ...]:
    """Return the map between tokens and their sorted copies."""
    return (Tensor("moe.row map", float(SHORT_INDEX * (experts.sent + experts.received))),)


#: Inductor joins sums with what stands before and after them: another tensor read and written by that.
ADAPTERS = AdapterKernels(
    added=(Traffic(" add", "residual", 1, 1),),
    added_backward=(Traffic(" scale", "activation", 0, 1),),
    input_summed=Traffic(" input grad", "residual", 1, 0),
)
EXPERTS = ExpertHooks(
    router=router,
    sort=lambda experts: (),
    permute=permute,
    unpermute=unpermute,
    kept_by_dispatch=row_map,
    kept_by_combine=lambda shapes, experts: (),
    # Copies are weighed in the activation (Megatron-Core's fused weighted SwiGLU): what follows is linear, so that the
    # experts' outputs need not be kept.
    weighs_in_activation=True,
    host_waits_for_counts=True,
)
