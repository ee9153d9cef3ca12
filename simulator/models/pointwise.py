"""Operations that work element by element: dropout, residual sums, activations, rotary positions."""

from __future__ import annotations

from dataclasses import replace

from simulator.operations.nodes import Node, Ops, Tensor, fuse, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute


def dropout(z: Shapes, name: str, elements: int, *, mask: str, fused_with: Compute | None = None) -> Node:
    """Dropout that keeps a mask of one byte per element; ``fused_with``: the kernel that does it on the way."""
    nbytes = z.element * elements
    return Node(
        forward=(fused_with or drop_kernel(z, name, elements),),
        input_grad=(memory("B", f"{name} bwd", "dropout_bwd", nbytes + elements, nbytes, z.dtype),),
        saved=(Tensor(mask, float(elements)),),
        grad_bytes=2.0 * nbytes,
    )


def drop_kernel(z: Shapes, name: str, elements: int) -> Compute:
    """Dropout as a kernel of its own."""
    nbytes = z.element * elements
    return memory("F", name, "dropout", nbytes, nbytes + elements, z.dtype)


def residual(z: Shapes, block: str) -> Node:
    """Dropout of a block's output, and the sum with its input; bias, dropout and sum are one kernel unless eager.

    The sum's gradient passes through, so that without dropout nothing runs in the backward pass.
    """
    add = memory("F", f"{block}.residual", "residual", 2 * z.row_bytes, z.row_bytes, z.dtype)
    if not z.dropout:
        return Node(forward=(add,), grad_bytes=z.row_bytes)
    name, elements = f"{block}.dropout", z.rows * z.hidden
    if z.eager:
        drop = dropout(z, name, elements, mask=f"{name} mask")
        return replace(drop, forward=(*drop.forward, add))
    kernel = replace(fuse("F", drop_kernel(z, name, elements), add, z.row_bytes, keep=False), name=add.name)
    return dropout(z, name, elements, mask=f"{name} mask", fused_with=kernel)


#: (label, tensors read, tensors written) of each kernel, and of what class it is where they differ.
Traffic = tuple[tuple[str, float, float], ...]
Kernels = tuple[tuple[str, str, float, float], ...]
# In tensors of tokens x ffn. Gated activations read gate and up from the first product's output; eager ones take a
# kernel for the activation and one for the gate, and join the two gradients for the backward product. Gate and up are
# halves of the rows of one tensor: what reads them, and no other, is strided.
EAGER_GATED_FORWARD: Kernels = (("", "strided", 1, 1), (" gate", "strided", 2, 1))
EAGER_GATED_BACKWARD: Kernels = (
    (" gate", "strided", 2, 1),
    (" up", "residual", 2, 1),
    ("", "strided", 2, 1),
    (" join", "copy", 2, 2),
)


def activation(z: Shapes, block: str, elements: int) -> Node:
    """GELU, ReLU (which keeps its output, that is the next product's input), SwiGLU or GeGLU, with ``elements`` of
    output, between the two products of ``block``."""
    nbytes = float(z.element * elements)
    name = f"{block}.{z.activation}"
    forward: Kernels
    backward: Kernels
    if not z.gated:
        kind = "gelu" if z.activation == "gelu" and z.eager else "activation"
        forward, backward = (("", kind, 1, 1),), (("", f"{kind}_bwd", 2, 1),)
        saved: tuple[Tensor, ...] = (Tensor(f"{block}.act" if z.activation == "relu" else f"{block}.pre", nbytes),)
    elif z.eager:
        forward, backward = EAGER_GATED_FORWARD, EAGER_GATED_BACKWARD
        saved = (Tensor(f"{block}.pre", 2 * nbytes), Tensor(f"{block}.gate", nbytes))
    else:
        forward, backward = (("", "activation", 2, 1),), (("", "activation_bwd", 3, 2),)
        saved = (Tensor(f"{block}.pre", 2 * nbytes),)
    return Node(
        forward=tuple(memory("F", name + x, op, r * nbytes, w * nbytes, z.dtype) for x, op, r, w in forward),
        input_grad=tuple(
            memory("B", f"{name}{x} bwd", op, r * nbytes, w * nbytes, z.dtype) for x, op, r, w in backward
        ),
        saved=saved,
        grad_bytes=(3 if z.gated else 2) * nbytes,
    )


FUSED_ROPE: Traffic = (("", 1, 1),)
EAGER_ROPE: Traffic = ((" cos", 1, 1), (" negate", 0.5, 0.5), (" join", 1, 1), (" sin", 1, 1), (" add", 2, 1))


def rope(z: Shapes) -> Node:
    """Rotary position embedding of queries and keys: one kernel each, or eager's five (x cos, -x of one half, the join
    of both halves, x sin, and the sum). Its gradient is the inverse rotation and needs no activation."""
    q, k = (z.element * z.tokens * width for width in (z.q_width, z.kv_width))

    def rotate(phase: str, suffix: str) -> Ops:
        return tuple(
            memory(phase, f"attn.rope {name}{step}{suffix}", "rope", read * nbytes, written * nbytes, z.dtype)
            for name, nbytes in (("q", q), ("k", k))
            for step, read, written in (EAGER_ROPE if z.eager else FUSED_ROPE)
        )

    return Node(forward=rotate("F", ""), input_grad=rotate("B", " bwd"), grad_bytes=2.0 * (q + k))
