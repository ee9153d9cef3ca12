"""torchao's Float8Linear with a scale for each tensor, found anew each time (dynamic scaling), under torch.compile.

github.com/pytorch/ao 0.18.0, torchao/float8: config.py, float8_linear.py, float8_ops.py, fsdp_utils.py. The kernels are
those of the code that Inductor writes (torch 2.11) for a layer of torchtitan's Llama 3. Forward products sum in 14 bits
of fraction (``use_fast_accum``), backward products in 32.
"""

from __future__ import annotations

from simulator.precisions.recipe import CastKernel, ProductRecipe

#: The largest magnitude: sums of blocks, then one more small kernel that makes the scale.
AMAX = (CastKernel("amax", "fp8_amax", 1, 0), CastKernel("scale", "fp8_scale", 0, 0))
CAST = CastKernel("cast", "fp8_cast", 1, 0.5)
#: Rows and columns changed over.
TURNED = CastKernel("cast turned", "fp8_turned", 1, 0.5)
#: As it is and turned, by one kernel.
BOTH = CastKernel("cast both ways", "fp8_both", 1, 1)

RECIPE = ProductRecipe(
    name="torchao_tensorwise",
    about="torchao's Float8Linear, one scale for a tensor, under torch.compile; weights can be gathered in 8 bits",
    frameworks=("torchtitan", "pytorch"),
    compiled=True,
    products={"fwd": "tensor", "dgrad": "tensor", "wgrad": "tensor"},
    experts=False,
    input_forward=(*AMAX, CAST),
    input_backward=(*AMAX, TURNED),
    weight_forward=(*AMAX, CAST),
    # The scale is kept.
    weight_backward=(TURNED,),
    gradient=(*AMAX, BOTH),
    activation_backward=("fp8_amax_made", "fp8_both"),
    gathers=("bf16", "fp8"),
)
