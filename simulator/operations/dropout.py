"""Dropout as a kernel of its own, and as a part of another."""

from __future__ import annotations

from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute


def dropout(shapes: Shapes, name: str, elements: int, *, mask: str, fused_with: Compute | None = None) -> Node:
    """Dropout that keeps a mask of one byte per element; ``fused_with``: the kernel that does it on the way."""
    nbytes = shapes.element * elements
    return Node(
        forward=(fused_with or drop_kernel(shapes, name, elements),),
        input_grad=(memory("B", f"{name} bwd", "dropout_bwd", nbytes + elements, nbytes, shapes.dtype),),
        saved=(Tensor(mask, float(elements)),),
        grad_bytes=2.0 * nbytes,
    )


def drop_kernel(shapes: Shapes, name: str, elements: int) -> Compute:
    """Dropout as a kernel of its own."""
    nbytes = shapes.element * elements
    return memory("F", name, "dropout", nbytes, nbytes + elements, shapes.dtype)
