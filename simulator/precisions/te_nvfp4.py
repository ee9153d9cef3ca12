"""Transformer Engine's NVFP4: 4 bits, with a scale for every 16 elements along the sum, and one for the tensor.

arXiv 2509.25149; github.com/NVIDIA/TransformerEngine, transformer_engine/common/recipe/__init__.py
(``NVFP4BlockScaling``) and common/hadamard_transform. Blackwell's products take 4 bits in one layout only, so that both
copies are made. One kernel finds the magnitudes of the tensor and of its random Hadamard transform. Another one casts
rows, and columns after the transform (row_cast_col_hadamard_transform_cast_fusion.cu). Weights have blocks of 16 x 16
and no transform, by kernels that move the same bytes. All three products are in 4 bits, in every layer, as in
Megatron-Bridge's ``bf16_with_nvfp4_mixed``. What is kept of x is the copy for the product for dW.
"""

from __future__ import annotations

from simulator.precisions import te_delayed
from simulator.precisions.recipe import CastKernel

SCALE_BYTES = 1 / 16
BOTH = (
    CastKernel("amax", "fp4_amax", 1, 0),
    # Two copies, in tensors of 16 bits.
    CastKernel("cast both ways", "fp4_cast_transpose", 1, 1 / 2 + SCALE_BYTES),
)

RECIPE = te_delayed.with_casts(
    BOTH,
    name="te_nvfp4",
    about="Transformer Engine on Blackwell, 4 bits, a scale for every 16 elements of a row or of a column (NVFP4)",
    bits=4,
    products={"fwd": "sixteens", "dgrad": "sixteens", "wgrad": "sixteens"},
    multiple=32,
    scale_bytes=SCALE_BYTES,
)
