"""Adam and AdamW (arXiv 1412.6980, 1711.05101), by the libraries that run them.

Libraries leave Adam's weight decay at 0, and then have no operation for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.optimizers.update import (
    ElementwiseOp,
    Implementation,
    UpdatedTensor,
    UpdateRule,
    UpdateTypes,
    each_tensor,
    full_states,
    no_bytes,
    over_all,
    temporaries,
    total_elements,
)
from simulator.units import DTYPE_BYTES

#: torch/optim/adam.py, ``_multi_tensor_adam``.
FOREACH = (
    ElementwiseOp("decay", "w", "w"),
    ElementwiseOp("lerp", "mg", "m"),
    ElementwiseOp("square decay", "v", "v"),
    ElementwiseOp("addcmul", "vgg", "v"),
    ElementwiseOp("sqrt", "v", "t"),
    ElementwiseOp("bias correction", "t", "t"),
    ElementwiseOp("eps", "t", "t"),
    ElementwiseOp("addcdiv", "wmt", "w"),
)
#: One kernel for all of it: aten/src/ATen/native/cuda/fused_adam_utils.cuh of PyTorch, csrc/multi_tensor_adam.cu of
#: Apex, transformer_engine/common/multi_tensor/adam.cu.
FUSED = (ElementwiseOp("adam", "wgmv", "wmv"),)
#: torch/optim/adam.py, ``_single_tensor_adam``. A tensor that is an operand twice is read once.
FOR_LOOP = (
    ElementwiseOp("decay", "w", "w", "activation"),
    ElementwiseOp("lerp", "mg", "m", "residual"),
    ElementwiseOp("square decay", "v", "v", "activation"),
    ElementwiseOp("addcmul", "vg", "v", "residual"),
    ElementwiseOp("sqrt", "v", "t", "activation"),
    ElementwiseOp("bias correction", "t", "t", "activation"),
    ElementwiseOp("eps", "t", "t", "activation"),
    ElementwiseOp("addcdiv", "wmt", "w", "residual"),
)
#: csrc/kernels.cu of bitsandbytes, ``kOptimizer32bit2State``, a launch a tensor.
BITSANDBYTES = (ElementwiseOp("adam", "wgmv", "wmv", "bnb_adam"),)


def _foreach_class(types: UpdateTypes) -> str:
    return "foreach" if DTYPE_BYTES[types.state] == DTYPE_BYTES["fp32"] else "foreach_bf16"


def _fused_class(types: UpdateTypes) -> str:
    wide = max(DTYPE_BYTES[types.weight], DTYPE_BYTES[types.state]) == DTYPE_BYTES["fp32"]
    return "optimizer" if wide else "fused_bf16"


def _root_of_second_moment(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> float:
    """Return the bytes of ``exp_avg_sq_sqrt``, which all tensors have at once."""
    return DTYPE_BYTES[types.state] * total_elements(parameters)


def _implementations(skipped: tuple[str, ...]) -> dict[str, Implementation]:
    """Return how libraries run Adam, without the operations that are ``skipped``."""

    def left(operations: tuple[ElementwiseOp, ...]) -> tuple[ElementwiseOp, ...]:
        return tuple(step for step in operations if step.name not in skipped)

    fused = Implementation((over_all(FUSED, _fused_class),), full_states(2), no_bytes)
    loop = (each_tensor(left(FOR_LOOP)),)
    return {
        "fused": fused,
        "foreach": Implementation((over_all(left(FOREACH), _foreach_class),), full_states(2), _root_of_second_moment),
        "for_loop": Implementation(loop, full_states(2), temporaries(2)),
        "apex": fused,
        "bitsandbytes": Implementation((each_tensor(BITSANDBYTES),), full_states(2), no_bytes, ("fp32",), pages=True),
        # DeepSpeed's; what it moves is `simulator.models.host_update_bytes`.
        "cpu": Implementation((), full_states(2), no_bytes, on_host=True),
    }


ADAM = UpdateRule("adam", _implementations(skipped=("decay",)))
ADAMW = UpdateRule("adamw", _implementations(skipped=()))
