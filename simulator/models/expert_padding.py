"""Padding of experts: products in 8 or 4 bits take multiples of so many rows, which are cut off again.

github.com/NVIDIA/Megatron-LM, core_v0.15, megatron/core/transformer/moe/experts.py (``TEGroupedMLP.forward``:
``quantization_padding`` and ``quantization_unpadding``); github.com/NVIDIA/TransformerEngine,
transformer_engine/pytorch/module/fp8_padding.py. Routed tokens are hardly ever such multiples. HybridEP's kernel that
permutes pads them itself (``pad_multiple`` in fused_a2a.py).
"""

from __future__ import annotations

from simulator.models.low_precision import is_in_low_precision
from simulator.models.shapes import FrameworkShapes
from simulator.operations.experts import PROBABILITY, Experts
from simulator.operations.nodes import Node, memory

#: Dispatchers that pad on their way.
PADDING_DISPATCHERS = ("hybridep",)


def padding(shapes: FrameworkShapes, experts: Experts) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return what copies rows and their probabilities into padded places, and what copies outputs back.

    Both are empty where nothing is padded: in 16 bits, where tokens have places of fixed size, and where the dispatcher
    pads. The few rows that are added take no time.
    """
    recipe = shapes.product_recipe
    if recipe is None or not recipe.pads_experts or not experts.counted:
        return (), ()
    if experts.ep > 1 and experts.dispatcher in PADDING_DISPATCHERS:
        return (), ()
    if not is_in_low_precision(recipe, "moe.fc1", experts.ffn, shapes.hidden):
        return (), ()
    rows = float(shapes.element * experts.worked_on * shapes.hidden)
    probabilities = float(PROBABILITY * experts.worked_on)
    padded = Node(
        forward=(
            memory("F", "moe.pad", "copy", rows, rows, shapes.dtype),
            memory("F", "moe.pad probs", "copy", probabilities, probabilities, "fp32"),
        ),
        input_grad=(
            memory("B", "moe.pad probs bwd", "copy", probabilities, probabilities, "fp32"),
            memory("B", "moe.pad bwd", "copy", rows, rows, shapes.dtype),
        ),
        grad_bytes=2 * rows,
    )
    cut = Node(
        forward=(memory("F", "moe.unpad", "copy", rows, rows, shapes.dtype),),
        input_grad=(memory("B", "moe.unpad bwd", "copy", rows, rows, shapes.dtype),),
        grad_bytes=2 * rows,
    )
    return (padded,), (cut,)
