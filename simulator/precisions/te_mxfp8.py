"""Transformer Engine's MXFP8: a scale in 8 bits for every 32 elements along the sum, on Blackwell.

Open Compute Project, Microscaling Formats (MX) 1.0; github.com/NVIDIA/TransformerEngine,
transformer_engine/common/recipe/__init__.py (``MXFP8BlockScaling``). Blackwell's products take either layout, but a
scale covers elements of a row or of a column, so that both copies are made. What is kept of x has its scales with it.
"""

from __future__ import annotations

from simulator.precisions import te_delayed
from simulator.precisions.recipe import CastKernel

SCALE_BYTES = 1 / 32
#: Two copies, in tensors of 16 bits.
BOTH = (CastKernel("cast both ways", "fp8_cast_transpose", 1, 1 + SCALE_BYTES),)

RECIPE = te_delayed.with_casts(
    BOTH,
    name="te_mxfp8",
    about="Transformer Engine on Blackwell, a scale for every 32 elements of a row or of a column (MXFP8)",
    products={"fwd": "mx", "dgrad": "mx", "wgrad": "mx"},
    multiple=32,
    scale_bytes=SCALE_BYTES,
    casts_each_expert=True,
)
