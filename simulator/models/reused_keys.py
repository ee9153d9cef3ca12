"""Attention to keys and values of another layer, as in the last layers of Gemma 4's E2B and E4B.

A layer has queries of its own alone (transformers 5.24, modeling_gemma4.py, ``is_kv_shared_layer``). Keys and values
stay with the layer that made them, and autograd adds up their gradients as layer after layer gives its own.
"""

from __future__ import annotations

from simulator.models.linear import linear
from simulator.models.norms import head_norms
from simulator.models.pointwise import rotation_kernels
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Tensor, memory


def queries_alone(shapes: FrameworkShapes) -> tuple[Node, ...]:
    """Return the operations from the normed rows to queries with positions."""
    width, bias = shapes.q_width, "qkv" in shapes.biases
    product = linear(
        shapes, "attn", "q", width, shapes.hidden, split="column", saved="attn.normed", bias=bias, wide=True
    )
    nbytes = float(shapes.element * shapes.tokens * width)
    turned = Node(
        forward=rotation_kernels(shapes, "F", "q", nbytes),
        input_grad=rotation_kernels(shapes, "B", "q", nbytes),
        grad_bytes=2.0 * nbytes,
    )
    return (product, *head_norms(shapes), *((turned,) if shapes.position == "rope" else ()))


def summed_key_gradients(shapes: FrameworkShapes) -> Node:
    """Return the sums of the gradients of keys and of values with those of layers behind."""
    sizes = {"k": shapes.kv_width, "v": shapes.v_width}
    nbytes = {name: float(shapes.element * shapes.tokens * width) for name, width in sizes.items()}
    return Node(
        input_grad=tuple(
            memory("B", f"attn.{name} grad of layers", "residual", 2 * size, size, shapes.dtype)
            for name, size in nbytes.items()
        ),
        grad_bytes=2 * sum(nbytes.values()),
    )


def lent_keys(shapes: FrameworkShapes) -> tuple[Tensor, ...]:
    """Return keys and values that stay for other layers, whatever of this layer runs again."""
    if not shapes.lends_keys:
        return ()
    sizes = {"k": shapes.kv_width, "v": shapes.v_width}
    return tuple(Tensor(f"attn.{name}", float(shapes.element * shapes.tokens * width)) for name, width in sizes.items())
