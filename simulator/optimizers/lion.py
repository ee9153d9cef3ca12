"""Lion (arXiv 2302.06675): one state, and the sign of a mean of it and the gradient as the update."""

from __future__ import annotations

from simulator.optimizers.adamw_8bit import blockwise, quantized_states
from simulator.optimizers.update import (
    ElementwiseOp,
    Implementation,
    UpdateRule,
    each_tensor,
    full_states,
    no_bytes,
    temporaries,
)

#: csrc/kernels.cu of bitsandbytes, ``kOptimizer32bit1State``, a launch a tensor.
BITSANDBYTES = (ElementwiseOp("lion", "wgm", "wm", "bnb_lion"),)
#: github.com/lucidrains/lion-pytorch, lion_pytorch/lion_pytorch.py, ``update_fn``.
FOR_LOOP = (
    ElementwiseOp("decay", "w", "w", "activation"),
    ElementwiseOp("copy", "m", "t", "copy"),
    ElementwiseOp("momentum share", "t", "t", "activation"),
    ElementwiseOp("gradient share", "tg", "t", "residual"),
    ElementwiseOp("sign", "t", "t", "activation"),
    ElementwiseOp("update", "wt", "w", "residual"),
    ElementwiseOp("momentum decay", "m", "m", "activation"),
    ElementwiseOp("momentum", "mg", "m", "residual"),
)

OPTIMIZER = UpdateRule(
    "lion",
    {
        "bitsandbytes": Implementation((each_tensor(BITSANDBYTES),), full_states(1), no_bytes, ("fp32",), pages=True),
        "for_loop": Implementation((each_tensor(FOR_LOOP),), full_states(1), temporaries(2)),
    },
)
IN_8_BITS = UpdateRule(
    "lion_8bit",
    {
        "bitsandbytes": Implementation(
            # csrc/kernels.cu, kOptimizerStatic8bit1StateBlockwise
            (blockwise("lion", 1, "bnb_lion_8bit", "bnb_lion"),),
            quantized_states(1),
            no_bytes,
            ("int8",),
            pages=True,
        )
    },
)
