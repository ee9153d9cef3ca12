"""Muon (kellerjordan.github.io/posts/muon): momentum whose matrices are made orthogonal by Newton-Schulz iterations.

The iterations need whole matrices. Ranks that share states deal these out among themselves, the largest first, and each
works on its own. With ZeRO 1 and 2 states are shared so from the start, as in Megatron-Core's layer-wise distributed
optimizer. With ZeRO 3 every matrix is cut over all ranks. Shards of the momentum then go to the rank of their matrix,
and shards of the update come back (github.com/microsoft/dion, dion/muon.py).
Tensor-parallel ranks each treat their part of a matrix as one (Megatron-LM's ``--muon-tp-mode blockwise``). Weights of
several products that stand in one tensor, such as those of queries, keys and values, are one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simulator.optimizers.update import (
    ElementwiseOp,
    Implementation,
    Kernels,
    UpdatedTensor,
    UpdateRule,
    UpdateTypes,
    each_tensor,
    full_states,
    tensor_kernels,
)
from simulator.program import Compute, Matmul, StepPhase
from simulator.units import DTYPE_BYTES

#: torch/optim/_muon.py, ``_single_tensor_muon``: momentum, and Nesterov's update, before the iterations.
BEFORE = (ElementwiseOp("momentum", "mg", "m", "residual"), ElementwiseOp("nesterov", "mg", "t", "residual"))
#: ``DEFAULT_NS_STEPS``.
ITERATIONS = 5
ITERATED = "bf16"


def _dealt(parameters: Sequence[UpdatedTensor]) -> list[UpdatedTensor]:
    """Return the tensors whose matrices the busiest rank makes orthogonal, of those that ranks share."""
    mine: list[UpdatedTensor] = []
    for ranks in sorted({round(1 / parameter.share) for parameter in parameters}):
        shared = [parameter for parameter in parameters if round(1 / parameter.share) == ranks]
        mine += sorted(shared, key=lambda parameter: -parameter.elements)[::ranks]
    return mine


def _orthogonalized(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> Kernels:
    """Return ``_zeropower_via_newtonschulz`` of the matrices that this rank has.

    A matrix that is taller than wide is a transposed view until the first iteration has written it anew.
    ``addmm`` copies what it adds to into its result, which the product then adds to.
    """
    mine = _dealt(parameters)
    sizes = [(parameter, min(parameter.shape[-2:]), max(parameter.shape[-2:])) for parameter in mine]
    element = DTYPE_BYTES[ITERATED]
    count = float(sum(parameter.matrices * short * long for parameter, short, long in sizes))
    launches = len(mine)

    def kernels(name: str, op: str, read: float, written: float, times: int = 1) -> Compute:
        return tensor_kernels(name, op, read * count, written * count, count, times * launches)

    ops: list[Compute] = []
    if types.state != ITERATED:
        ops.append(kernels("cast", "cast", DTYPE_BYTES[types.state], element))
    ops.append(kernels("norm", "square_sum", element, 0))
    ops.append(kernels("normalise", "strided", element, element))
    tall = [(parameter, short, long) for parameter, short, long in sizes if parameter.shape[-2] > parameter.shape[-1]]
    transposed = float(sum(parameter.matrices * short * long for parameter, short, long in tall))
    grams = float(sum(parameter.matrices * short * short for parameter, short, long in sizes))
    if tall:
        nbytes = element * transposed
        ops.append(tensor_kernels("transpose", "transposed", nbytes, nbytes, transposed, len(tall)))
    copied = element * (ITERATIONS * (count + grams) - transposed)
    ops.append(tensor_kernels("addmm copies", "copy", copied, copied, 0.0, 2 * ITERATIONS * launches - len(tall)))
    for parameter, short, long in sizes:
        ops += list(_products(parameter.matrices, short, long)) * ITERATIONS
    return tuple(ops)


def _products(matrices: int, short: int, long: int) -> Iterator[Compute]:
    """Yield the products of one iteration on so many matrices of ``short`` rows and ``long`` columns."""
    for name, n, k, role, adds in (
        ("gram", short, long, "fwd", False),
        ("gram squared", short, short, "dgrad", True),
        ("update", long, short, "dgrad", True),
    ):
        kernel = Matmul(short, n, k, matrices, ITERATED, role, accumulate=adds)
        yield Compute(f"optimizer.{name}", kernel, StepPhase.OPTIMIZER)


def _applied(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> Kernels:
    """Return weight decay and the sum with the update in bf16, which stands transposed where the matrix is tall."""
    tall = [parameter for parameter in parameters if parameter.shape[-2] > parameter.shape[-1]]
    wide = [parameter for parameter in parameters if parameter.shape[-2] <= parameter.shape[-1]]
    weight, element = DTYPE_BYTES[types.weight], DTYPE_BYTES[ITERATED]
    sums = []
    for op, some in (("residual", wide), ("transposed", tall)):
        if some:
            count = sum(parameter.elements for parameter in some)
            sums.append(tensor_kernels("add", op, (weight + element) * count, weight * count, count, len(some)))
    return (*each_tensor((ElementwiseOp("decay", "w", "w", "activation"),))(parameters, types), *sums)


def workspace_bytes(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> float:
    """Return the bytes of the largest matrix as update, as iterate before and after a product, and of two grams."""
    return max((_matrix_bytes(parameter, types) for parameter in parameters), default=0.0)


def _matrix_bytes(parameter: UpdatedTensor, types: UpdateTypes) -> float:
    short, long = min(parameter.shape[-2:]), max(parameter.shape[-2:])
    element = DTYPE_BYTES[ITERATED]
    iterated = 2 * element * (short * long + short * short)
    return parameter.matrices * float(DTYPE_BYTES[types.state] * short * long + iterated)


OPTIMIZER = UpdateRule(
    "muon",
    {
        "for_loop": Implementation(
            (each_tensor(BEFORE), _orthogonalized, _applied),
            full_states(1),
            workspace_bytes,
        )
    },
    matrices_only=True,
    needs_whole=True,
    multiplies_in=ITERATED,
)
