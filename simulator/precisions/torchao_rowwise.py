"""torchao's Float8Linear with a scale for each row, under torch.compile.

github.com/pytorch/ao 0.18.0, torchao/float8: config.py (``ROWWISE``), float8_ops.py. Only the forward product has row
scales in its kernel. That one is slow without fast sums, which the recipe asks for forward alone. dgrad and wgrad run
unscaled. A further kernel (`RESCALED`) multiplies their output by the scales of both operands
(``addmm_float8_unwrapped``). Scales are powers of two. Casts of rows (`ROWS`) are slow, as they work out the scale for
every element.
"""

from __future__ import annotations

from simulator.precisions.recipe import CastKernel, ProductRecipe

ROWS = CastKernel("cast rows", "fp8_rows", 1, 0.5)
#: The largest magnitude of each column, then a cast with rows and columns changed over.
COLUMNS = (
    CastKernel("amax of columns", "fp8_amax", 1, 0),
    CastKernel("scales", "fp8_scale", 0, 0),
    CastKernel("cast columns", "fp8_turned", 1, 0.5),
)
RESCALED = CastKernel("rescale", "fp8_rescale", 1, 1)

RECIPE = ProductRecipe(
    name="torchao_rowwise",
    about="torchao's Float8Linear, a scale for each row, under torch.compile",
    frameworks=("torchtitan", "pytorch"),
    compiled=True,
    products={"fwd": "rows", "dgrad": "none", "wgrad": "none"},
    experts=False,
    input_forward=(ROWS,),
    input_backward=COLUMNS,
    weight_forward=(ROWS,),
    weight_backward=COLUMNS,
    gradient=(ROWS,),
    gradient_again=COLUMNS,
    behind={"dgrad": (RESCALED,), "wgrad": (RESCALED,)},
    activation_backward=("fp8_amax_made", "fp8_both_rows"),
)
