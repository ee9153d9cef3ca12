"""Transformer Engine's current scaling: a scale for each tensor, found before it is cast.

github.com/NVIDIA/TransformerEngine, transformer_engine/common/recipe/__init__.py (``Float8CurrentScaling``). One kernel
more than delayed scaling has, which reads the tensor for its magnitude.
"""

from __future__ import annotations

from simulator.precisions import te_delayed
from simulator.precisions.recipe import CastKernel

FOUND = (
    CastKernel("amax", "fp8_amax", 1, 0),
    CastKernel("scale", "fp8_scale", 0, 0),
    *te_delayed.BOTH,
)

RECIPE = te_delayed.with_casts(
    FOUND,
    name="te_current",
    about="Transformer Engine, one scale for a tensor, found before each cast",
    casts_each_expert=True,
)
