"""Adafactor (arXiv 1804.04235): of a matrix the second moment is kept by rows and columns."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.optimizers.update import (
    ElementwiseOp,
    Implementation,
    Kernels,
    UpdatedTensor,
    UpdateRule,
    UpdateTypes,
    each_tensor,
    full_states,
    temporaries,
    tensor_kernels,
)
from simulator.units import DTYPE_BYTES

#: torch/optim/_adafactor.py, ``_single_tensor_adafactor``, without weight decay; ``t`` is the estimate of the variance,
#: which becomes the update in place.
_BEFORE = (ElementwiseOp("weight norm", "w", "", "square_sum"),)
_AFTER = (
    ElementwiseOp("clamp", "t", "t", "activation"),
    ElementwiseOp("rsqrt", "t", "t", "activation"),
    ElementwiseOp("update", "tg", "t", "residual"),
    ElementwiseOp("update norm", "t", "", "square_sum"),
    ElementwiseOp("add", "wt", "w", "residual"),
)
MATRIX = (
    *_BEFORE,
    ElementwiseOp("rows", "g", "", "square_sum"),
    ElementwiseOp("columns", "g", "", "square_sum"),
    ElementwiseOp("outer product", "", "t", "square_sum"),
    ElementwiseOp("mean", "t", "t", "strided"),
    *_AFTER,
)
VECTOR = (
    *_BEFORE,
    ElementwiseOp("square", "g", "t", "activation"),
    ElementwiseOp("variance", "vt", "v", "residual"),
    ElementwiseOp("copy", "v", "t", "copy"),
    *_AFTER,
)
#: Kernels on rows and columns of a matrix: two squares, two means over the other side, two states, a mean and a clamp.
FACTOR_KERNELS = 8


def _kernels(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> Kernels:
    matrices = [parameter for parameter in parameters if parameter.is_matrix]
    vectors = [parameter for parameter in parameters if not parameter.is_matrix]
    factors: Kernels = ()
    if matrices:
        count = FACTOR_KERNELS * sum(map(_factors, matrices)) / 2
        nbytes = DTYPE_BYTES[types.state] * count
        factors = (tensor_kernels("factors", "activation", nbytes, nbytes, count, FACTOR_KERNELS * len(matrices)),)
    return (*each_tensor(MATRIX)(matrices, types), *factors, *each_tensor(VECTOR)(vectors, types))


def _factors(parameter: UpdatedTensor) -> int:
    """Return the rows and columns of all matrices of a tensor."""
    return parameter.matrices * sum(parameter.shape[-2:])


def state_bytes(parameter: UpdatedTensor, types: UpdateTypes) -> float:
    """Return the bytes of a value for every row and column, of vectors for every element."""
    if not parameter.is_matrix:
        return full_states(1)(parameter, types)
    return float(DTYPE_BYTES[types.state] * _factors(parameter))


OPTIMIZER = UpdateRule(
    "adafactor",
    {"for_loop": Implementation((_kernels,), state_bytes, temporaries(1))},
    needs_whole=True,
)
