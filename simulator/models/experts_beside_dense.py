"""Experts beside a dense MLP that works on the same rows, as in Gemma 4 (transformers 5.24, modeling_gemma4.py).

Each has a norm before it and one on its output, and the outputs are summed. The router reads the rows through a norm
without weights and scales of its own; each expert has one more scale, for the probabilities that are its own.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.models.linear import add_gradient
from simulator.models.norms import norm
from simulator.models.shapes import FrameworkShapes
from simulator.operations.experts import PROBABILITY, Experts
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.weights import Weight

#: The tensor that experts read alone, and here beside a dense MLP.
_NORMED, _OWN = "mlp.normed", "moe.normed"


def beside_dense(
    shapes: FrameworkShapes, experts: Experts, dense: tuple[Node, ...], routed: tuple[Node, ...], entering: str
) -> tuple[Node, ...]:
    """Return the operations of a ``dense`` MLP and those ``routed`` to experts, up to the sum of both.

    ``entering`` names the rows before any norm, which experts and router read.
    """
    row = shapes.row_bytes
    return (
        *dense,
        norm(shapes, "mlp.dense_norm", saved="mlp.dense output", residual=False),
        norm(shapes, "mlp.experts_norm", saved=entering, residual=True),
        _router_scales(shapes, experts, entering),
        *(_reading_own_rows(node) for node in routed),
        norm(shapes, "mlp.experts_post_norm", saved="moe.output", residual=False),
        Node(
            forward=(memory("F", "moe.dense add", "residual", 2 * row, row, shapes.dtype),),
            grad_bytes=row,
        ),
    )


def _reading_own_rows(node: Node) -> Node:
    """Return ``node`` with the rows that experts read under a name of their own."""

    def renamed(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(replace(one, name=_OWN) if one.name == _NORMED else one for one in tensors)

    return replace(node, saved=renamed(node.saved), saved_for_weights=renamed(node.saved_for_weights))


def _router_scales(shapes: FrameworkShapes, experts: Experts, entering: str) -> Node:
    """Return the norm before the router with its scales in one kernel, and the scales of experts' probabilities."""
    row, chosen = shapes.row_bytes, float(PROBABILITY * experts.tokens * experts.top_k)
    scales = {"scale": shapes.hidden, "per_expert_scale": experts.experts}
    weights = tuple(
        Weight(f"mlp.router.{name}", (size,), (size,), shapes.dtype, partial_rows=size if shapes.tp > 1 else 0)
        for name, size in scales.items()
    )
    return Node(
        forward=(
            memory("F", "moe.router norm", "rms_norm", row, row, shapes.dtype, shapes.hidden),
            memory("F", "moe.router probability scales", "activation", chosen, chosen, "fp32"),
        ),
        input_grad=(
            memory("B", "moe.router probability scales bwd", "activation_bwd", 2 * chosen, chosen, "fp32"),
            memory("B", "moe.router norm bwd", "rms_norm_bwd", 2 * row, row, shapes.dtype, shapes.hidden),
            memory("B", "moe.router input grad", "residual", 2 * row, row, shapes.dtype),
        ),
        weight_grad=(
            memory(
                "W",
                "moe.router norm wgrad",
                "rms_norm_bwd",
                2 * row,
                shapes.element * shapes.hidden,
                shapes.dtype,
                shapes.hidden,
            ),
            *add_gradient(shapes, "moe.router norm", sum(scales.values())),
        ),
        saved=(Tensor(entering, row), Tensor("moe.router input", row), Tensor("moe.router chosen", chosen)),
        saved_for_weights=(Tensor(entering, row),),
        grad_bytes=2 * row,
        output_grad_bytes=row,
        weights=weights,
    )
