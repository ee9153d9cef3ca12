"""LoRA (arXiv 2106.09685): y = x W + s (x A) B."""

from __future__ import annotations

from simulator.adapters.kind import AdaptedProduct, AdapterKind
from simulator.frameworks.framework import traffic_kernels
from simulator.operations.nodes import Node, Op


def nodes(product: AdaptedProduct) -> tuple[Node, ...]:
    """Return the products with A and B, and the sum behind them."""
    return (*product.factors(), scaled_sum(product))


def scaled_sum(product: AdaptedProduct) -> Node:
    """Return the scaling of what adapters give, and its sum with the product that they stand beside."""
    shapes, kernels, nbytes = product.shapes, product.software.adapters, 0.0
    forward: list[Op] = []
    input_grad: list[Op] = []
    for one in product.targets:
        each = float(shapes.element * one.rows * one.outer)
        nbytes += each
        added = (*kernels.copied, *kernels.added) if product.storage == "nf4" else kernels.added
        forward += traffic_kernels("F", one.name, added, each, shapes.dtype)
        input_grad += traffic_kernels("B", one.name, kernels.added_backward, each, shapes.dtype)
    return Node(
        forward=tuple(forward),
        input_grad=tuple(input_grad),
        forward_bytes=2 * nbytes,
        grad_bytes=2 * nbytes,
    )


KIND = AdapterKind("lora", "LoRA", nodes)
