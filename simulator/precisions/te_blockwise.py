"""Transformer Engine's block scaling, which is DeepSeek-V3's: 1 x 128 of activations, 128 x 128 of weights.

arXiv 2412.19437, section 3.3; github.com/NVIDIA/TransformerEngine, transformer_engine/common/recipe/__init__.py
(``Float8BlockScaling``). A scale covers 128 elements along the sum, so that x and dy are cast once for each layout. The
product for dW has blocks of 1 x 128 on both sides. Products sum in 32 bits after every block.
"""

from __future__ import annotations

from simulator.precisions import te_delayed
from simulator.precisions.recipe import CastKernel

BOTH = (CastKernel("cast blocks both ways", "fp8_blocks_transpose", 1, 1),)

RECIPE = te_delayed.with_casts(
    BOTH,
    name="te_blockwise",
    about="Transformer Engine and DeepSeek-V3, a scale for 1 x 128 of activations and 128 x 128 of weights",
    products={"fwd": "blocks", "dgrad": "blocks", "wgrad": "blocks"},
    multiple=128,
    casts_each_expert=True,
)
