"""Kernels that do several operations at once.

They are written by hand (Megatron-Core, Transformer Engine, Apex), or made by Inductor of the same operations.

github.com/NVIDIA/Megatron-LM, megatron/core/transformer/moe: router.py, token_dispatcher.py.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.frameworks.framework import ActivationKernels, AdapterKernels, ExpertHooks, Traffic
from simulator.operations.dropout import drop_kernel, dropout
from simulator.operations.experts import PROBABILITY, Experts
from simulator.operations.nodes import Node, Ops, Tensor, fuse, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, Matmul, StepPhase
from simulator.units import DTYPE_BYTES

#: Bytes of an entry of the maps between tokens and their sorted copies (int32).
SHORT_INDEX = 4
#: Queries, or keys, turned in one kernel.
ROTATION = (Traffic("", "rope", 1, 1),)


def activation(z: Shapes) -> ActivationKernels:
    """Return a kernel each way; a gated one reads both halves, and backward writes the gradients of both."""
    if z.gated:
        return ActivationKernels((Traffic("", "activation", 2, 1),), (Traffic("", "activation_bwd", 3, 2),))
    return ActivationKernels((Traffic("", "activation", 1, 1),), (Traffic("", "activation_bwd", 2, 1),))


def residual(z: Shapes, block: str) -> Node:
    """Return dropout and sum in one kernel, with the bias before them."""
    add = memory("F", f"{block}.residual", "residual", 2 * z.row_bytes, z.row_bytes, z.dtype)
    if not z.dropout:
        return Node(forward=(add,), grad_bytes=z.row_bytes)
    name, elements = f"{block}.dropout", z.rows * z.hidden
    kernel = replace(fuse("F", drop_kernel(z, name, elements), add, z.row_bytes, keep=False), name=add.name)
    return dropout(z, name, elements, mask=f"{name} mask", fused_with=kernel)


def embedding_mask(z: Shapes, nbytes: float) -> tuple[Ops, Ops]:
    """Return the kernel that sets rows of words of other ranks to zero in place."""
    foreign = nbytes * (z.tp - 1) / z.tp
    return (memory("F", "embedding.mask", "embedding", 0, foreign, z.dtype),), ()


def router(z: Shapes, x: Experts) -> Node:
    """Return the product with the router's weight, softmax (or sigmoid), and the choice of ``top_k`` experts."""
    scores = float(DTYPE_BYTES[x.router_dtype] * x.tokens * x.experts)
    probs = float(PROBABILITY * x.tokens * x.experts)
    chosen = float((PROBABILITY + SHORT_INDEX) * x.tokens * x.top_k)
    return router_with(
        z,
        x,
        choice=(
            memory("F", "moe.router softmax", "softmax", scores, probs, "fp32"),
            memory("F", "moe.router top-k", "softmax", probs, chosen, "fp32"),
        ),
        choice_grad=(
            memory("B", "moe.router top-k bwd", "softmax_bwd", chosen, probs, "fp32"),
            memory("B", "moe.router softmax bwd", "softmax_bwd", 2 * probs, scores, "fp32"),
        ),
    )


def router_with(z: Shapes, x: Experts, *, choice: Ops, choice_grad: Ops) -> Node:
    """Return the product with the router's weight, and the kernels that choose experts by its scores, each way."""
    element = DTYPE_BYTES[x.router_dtype]
    full = float(z.element * x.tokens * z.hidden)
    scores = float(element * x.tokens * x.experts)
    probs = float(PROBABILITY * x.tokens * x.experts)

    def product(phase: str, role: str, m: int, n: int, k: int) -> Compute:
        name = "moe.router" if role == "fwd" else f"moe.router {role}"
        return Compute(name, Matmul(m, n, k, dtype=x.router_dtype, role=role), StepPhase(phase))

    def cast(phase: str, name: str, read: float, write: float) -> Ops:
        op = "upcast" if write > read else "cast"
        return (memory(phase, name, op, read, write, "fp32"),) if element != z.element else ()

    wide = float(element * x.tokens * z.hidden)
    paths = 2 if x.shared_ffn else 1
    return Node(
        forward=(
            *cast("F", "moe.router cast", full, wide),
            product("F", "fwd", x.tokens, x.experts, z.hidden),
            *choice,
        ),
        input_grad=(
            *choice_grad,
            product("B", "dgrad", x.tokens, z.hidden, x.experts),
            *cast("B", "moe.router cast bwd", wide, full),
            # The input goes to the router, to the experts and to the shared ones: their gradients are summed.
            *(memory("B", "moe.input grad", "residual", 2 * full, full, z.dtype) for _ in range(paths)),
        ),
        weight_grad=(
            *cast("W", "moe.router cast again", full, wide),
            product("W", "wgrad", x.experts, z.hidden, x.tokens),
        ),
        saved=(Tensor("mlp.normed", z.row_bytes), Tensor("moe.router probs", probs)),
        saved_for_weights=(Tensor("mlp.normed", z.row_bytes),),
        grad_bytes=wide + 2 * full + 2 * probs,
        output_grad_bytes=scores,
        weight_grad_bytes=wide + element * x.experts * z.hidden,
    )


def permute(z: Shapes, x: Experts) -> tuple[Ops, Ops]:
    """Return a kernel each way that copies the rows of tokens into the order of the experts."""
    rows, copies = (float(z.element * tokens * z.hidden) for tokens in (x.tokens, x.sent))
    return (
        (memory("F", "moe.permute", "copy", rows, copies, z.dtype),),
        (memory("B", "moe.permute bwd", "copy", copies, rows, z.dtype),),
    )


def unpermute(z: Shapes, x: Experts) -> tuple[Ops, Ops]:
    """Return a kernel each way that sums the copies of every token."""
    rows, copies = (float(z.element * tokens * z.hidden) for tokens in (x.tokens, x.sent))
    return (
        (memory("F", "moe.unpermute", "copy", copies, rows, z.dtype),),
        (memory("B", "moe.unpermute bwd", "copy", rows, copies, z.dtype),),
    )


def row_map(z: Shapes, x: Experts) -> tuple[Tensor, ...]:
    """Return the map between tokens and their sorted copies."""
    return (Tensor("moe.row map", float(SHORT_INDEX * (x.sent + x.received))),)


#: Inductor joins sums with what stands before and after them: another tensor read and written by that.
ADAPTERS = AdapterKernels(
    added=(Traffic(" add", "residual", 1, 1),),
    added_backward=(Traffic(" scale", "activation", 0, 1),),
    input_summed=Traffic(" input grad", "residual", 1, 0),
)
EXPERTS = ExpertHooks(
    router=router,
    sort=lambda x: (),
    permute=permute,
    unpermute=unpermute,
    kept_by_dispatch=row_map,
    kept_by_combine=lambda z, x: (),
    # Copies are weighed in the activation (Megatron-Core's fused weighted SwiGLU): what follows is linear, so that the
    # experts' outputs need not be kept.
    weighs_in_activation=True,
    host_waits_for_counts=True,
)
