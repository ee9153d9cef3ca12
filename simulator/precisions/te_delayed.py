"""Transformer Engine's delayed scaling: a scale for each tensor, from magnitudes of earlier steps.

github.com/NVIDIA/TransformerEngine, transformer_engine/common/recipe/__init__.py (``DelayedScaling``), pytorch/module:
layernorm_linear.py, linear.py. The kernel that casts finds the magnitude for later steps on its way, and writes both
layouts that Hopper's products need. Of x the one for dW is kept, in 8 bits. Weights are cast in the first micro-batch
of a step (``is_first_microbatch``), and both copies stay. Forward products have fast sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator.precisions.recipe import CastKernel, CastKernels, ProductRecipe

BOTH = (CastKernel("cast both ways", "fp8_cast_transpose", 1, 1),)

RECIPE = ProductRecipe(
    name="te_delayed",
    about="Transformer Engine, one scale for a tensor, from the magnitudes of steps before",
    frameworks=("megatron_core",),
    products={"fwd": "tensor", "dgrad": "tensor", "wgrad": "tensor"},
    experts=True,
    pads_experts=True,
    input_forward=BOTH,
    weight_forward=BOTH,
    gradient=BOTH,
    weights_once=True,
    weight_copies=2,
    keeps_input_copy=True,
)


def with_casts(casts: CastKernels, **changes: Any) -> ProductRecipe:
    """Return this recipe where x, W and dy are cast by other kernels, which are the same of all three."""
    return replace(RECIPE, input_forward=casts, weight_forward=casts, gradient=casts, **changes)
