"""Rotary positions by operations: tables of kernels become an operation on queries and keys."""

from __future__ import annotations

from simulator.frameworks.framework import Traffic, traffic_kernels
from simulator.operations.nodes import Node, Ops
from simulator.operations.shapes import Shapes


def rotated(shapes: Shapes, forward: tuple[Traffic, ...], backward: tuple[Traffic, ...]) -> Node:
    """Return queries and keys turned by the kernels of ``forward``, and their gradients by those of ``backward``."""
    sizes = {
        name: float(shapes.element * shapes.tokens * width)
        for name, width in (("q", shapes.q_width), ("k", shapes.kv_width))
    }

    def turned(phase: str, table: tuple[Traffic, ...]) -> Ops:
        parts = (traffic_kernels(phase, f"attn.rope {name}", table, n, shapes.dtype) for name, n in sizes.items())
        return tuple(op for part in parts for op in part)

    return Node(
        forward=turned("F", forward),
        input_grad=turned("B", backward),
        grad_bytes=2.0 * sum(sizes.values()),
    )
