"""Rotary positions by operations: tables of kernels become an operation on queries and keys."""

from __future__ import annotations

from simulator.frameworks.framework import Traffic
from simulator.operations.nodes import Node, Ops, memory
from simulator.operations.shapes import Shapes


def rotated(shapes: Shapes, forward: tuple[Traffic, ...], backward: tuple[Traffic, ...]) -> Node:
    """Return queries and keys turned by the kernels of ``forward``, and their gradients by those of ``backward``."""
    sizes = {
        name: float(shapes.element * shapes.tokens * width)
        for name, width in (("q", shapes.q_width), ("k", shapes.kv_width))
    }

    def turned(phase: str, table: tuple[Traffic, ...], suffix: str) -> Ops:
        return tuple(
            memory(phase, f"attn.rope {name}{step}{suffix}", op, read * nbytes, written * nbytes, shapes.dtype)
            for name, nbytes in sizes.items()
            for step, op, read, written in table
        )

    return Node(
        forward=turned("F", forward, ""),
        input_grad=turned("B", backward, " bwd"),
        grad_bytes=2.0 * sum(sizes.values()),
    )
