"""Phi-3 as Hugging Face's transformers 5 runs it: one product of queries, keys and values, and one of gate and up.

What a product gives is cut into views. Kernels that read one have no vector loads. Their gradients are put into zeros
of the whole width and added up, but for gate and up, which a join puts side by side.

github.com/huggingface/transformers 5.17, src/transformers/models/phi3/modeling_phi3.py. The order of kernels was read
from a profiler on an H200 (step ``hf1_phi3_mini_l16_s4k``).
"""

from __future__ import annotations

from dataclasses import replace

from simulator.frameworks.framework import ActivationKernels, Traffic
from simulator.frameworks.rotation import rotated
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes

#: ``up * act(gate)`` of two views. Elements bound kernels on these, so that two operands take as long as one. The
#: gradient of SiLU computes more, and takes what its bytes do.
GATED_BY_HALVES = ActivationKernels(
    forward=(Traffic("", "rope", 1, 1), Traffic(" gate", "rope", 1, 1)),
    backward=(
        Traffic(" gate", "rope", 1, 1),
        Traffic(" up", "residual", 2, 1),
        Traffic("", "rope", 2, 1),
        Traffic(" join", "copy", 2, 2),
    ),
    kept=("gate",),
)
#: ``torch.cat([turned, q_pass], dim=-1)``: a part of a head may stay as it is. Of no such part a copy is left.
PASS: tuple[Traffic, ...] = (Traffic(" pass", "rope", 1, 1),)
#: The gradient of the part that stays: zeros of the whole size, which are added.
PASS_BACKWARD: tuple[Traffic, ...] = (
    Traffic(" pass zero", "zero", 0, 1),
    Traffic(" pass add", "residual", 2, 1),
)


def is_phi3(shapes: Shapes) -> bool:
    """Return True for Phi-3, which joined products mean."""
    return shapes.joined_products


def positions(shapes: Shapes, forward: tuple[Traffic, ...], backward: tuple[Traffic, ...]) -> Node:
    """Return queries and keys turned by kernels of Llama, with what Phi-3 has around these."""
    *turned, transposed = backward
    node = rotated(shapes, (*forward, *PASS), (*turned, *PASS_BACKWARD, transposed))
    return replace(node, input_grad=(*node.input_grad, *_joined_gradients(shapes)))


def before_attention(shapes: Shapes) -> Node:
    """Return the copy of the context to rows of tokens, counted before attention, which keeps what it gave itself.

    Attention writes heads as its queries lie. Llama's lie by token, Phi-3's, which ``cat`` has written, by head.
    """
    nbytes = float(shapes.element * shapes.tokens * shapes.context_width)
    copied = memory("F", "attn.context transpose", "rope", nbytes, nbytes, shapes.dtype)
    return Node(forward=(copied,), saved=(Tensor("attn.context by head", nbytes),))


def _joined_gradients(shapes: Shapes) -> Ops:
    """Return the kernels that put gradients of queries, keys and values into that of the product which gave them."""
    q, kv = (float(shapes.element * shapes.tokens * width) for width in (shapes.q_width, shapes.kv_width))
    ops: Ops = ()
    for name, nbytes in (("v", kv), ("k", kv), ("q", q)):
        ops += (
            memory("B", f"attn.qkv zero {name}", "zero", 0, q + 2 * kv, shapes.dtype),
            memory("B", f"attn.qkv part {name}", "rope", nbytes, nbytes, shapes.dtype),
        )
        if name != "v":
            ops += (memory("B", f"attn.qkv add {name}", "residual", 2 * (q + 2 * kv), q + 2 * kv, shapes.dtype),)
    return ops
