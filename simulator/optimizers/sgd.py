"""Stochastic gradient descent, plain and with momentum (torch/optim/sgd.py), without weight decay."""

from __future__ import annotations

from simulator.optimizers.update import (
    ElementwiseOp,
    Implementation,
    UpdateRule,
    UpdateTypes,
    each_tensor,
    full_states,
    no_bytes,
    over_all,
)
from simulator.units import DTYPE_BYTES

PLAIN = (ElementwiseOp("update", "wg", "w", "residual"),)
MOMENTUM = (
    ElementwiseOp("momentum decay", "m", "m", "activation"),
    ElementwiseOp("momentum", "mg", "m", "residual"),
    ElementwiseOp("update", "wm", "w", "residual"),
)
#: aten/src/ATen/native/cuda/FusedSgdKernel.cu.
FUSED_PLAIN = (ElementwiseOp("sgd", "wg", "w"),)
FUSED_MOMENTUM = (ElementwiseOp("sgd", "wgm", "wm"),)


def _foreach_class(types: UpdateTypes) -> str:
    return "foreach" if DTYPE_BYTES[types.weight] == DTYPE_BYTES["fp32"] else "foreach_bf16"


def _fused_class(types: UpdateTypes) -> str:
    return "optimizer" if DTYPE_BYTES[types.weight] == DTYPE_BYTES["fp32"] else "fused_bf16"


def _implementations(
    operations: tuple[ElementwiseOp, ...], fused: tuple[ElementwiseOp, ...], states: int
) -> dict[str, Implementation]:
    kept = full_states(states)
    return {
        "foreach": Implementation((over_all(operations, _foreach_class),), kept, no_bytes),
        "fused": Implementation((over_all(fused, _fused_class),), kept, no_bytes),
        "for_loop": Implementation((each_tensor(operations),), kept, no_bytes),
    }


PLAIN_SGD = UpdateRule("sgd", _implementations(PLAIN, FUSED_PLAIN, 0))
MOMENTUM_SGD = UpdateRule("sgd_momentum", _implementations(MOMENTUM, FUSED_MOMENTUM, 1))
