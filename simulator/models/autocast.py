"""Products of weights in fp32 under torch.autocast, which computes them in 16 bits.

A weight is cast where its product first reads it, and the cast is kept until the forward pass has ended
(aten/src/ATen/autocast_mode.cpp, ``cached_cast``). An input in fp32 is cast by each product that reads it. Autograd
keeps what the product has read, and casts the gradients back.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Tensor, memory
from simulator.units import FP32_BYTES


def cast_operands(shapes: FrameworkShapes, node: Node, name: str, n: int, k: int, *, wide: bool, bias: bool) -> Node:
    """Return the product ``node`` (tokens x k times k x n) with casts of its weight and its bias.

    Its input is cast if ``wide``, unless the kernel that makes it does so.
    """
    sizes = {f"{name} weight": n * k} | ({f"{name} bias": n} if bias else {})
    kept = tuple(Tensor(what, float(shapes.element * size)) for what, size in sizes.items())
    forward = [
        memory("F", f"{what} cast", "cast", FP32_BYTES * size, shapes.element * size, shapes.dtype)
        for what, size in sizes.items()
    ]
    back = tuple(
        memory("W", f"{what} grad cast", "upcast", shapes.element * size, FP32_BYTES * size, shapes.dtype)
        for what, size in sizes.items()
    )
    inputs, input_grad, grad_bytes = node.saved, node.input_grad, node.grad_bytes
    if wide and not shapes.framework.fuses_pointwise:
        size = shapes.tokens * k
        inputs = (Tensor(f"{name} input", float(shapes.element * size)),)
        forward.append(
            memory("F", f"{name} input cast", "cast", FP32_BYTES * size, shapes.element * size, shapes.dtype)
        )
        up = memory("B", f"{name} input grad cast", "upcast", shapes.element * size, FP32_BYTES * size, shapes.dtype)
        input_grad = (*input_grad, up)
        grad_bytes += FP32_BYTES * size
    return replace(
        node,
        forward=(*forward, *node.forward),
        input_grad=input_grad,
        weight_grad=(*node.weight_grad, *back),
        saved=(*inputs, *kept),
        saved_for_weights=inputs,
        grad_bytes=grad_bytes,
    )
