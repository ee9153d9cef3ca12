"""Kernels of DeepSpeed's ZeRO around gradients and updates, one PyTorch operation after another.

github.com/deepspeedai/DeepSpeed 0.19.8, deepspeed/runtime: zero/stage_1_and_2.py, zero/stage3.py, utils.py
(``has_inf_or_nan``).
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.frameworks.framework import GradientKernels, ReducedGradients
from simulator.operations.nodes import Op
from simulator.operations.weights import Weight
from simulator.program import Compute, Memory, StepPhase

#: Eight are ``isfinite`` of the highest and of the lowest value: equal to itself, magnitude, unlike infinity, and both
#: of these. The rest join the two answers, negate that, and add it to those of earlier tensors.
KERNELS_ON_NUMBERS = 11
#: Norms are taken in fp64 (``get_norm_dtype``).
WIDE, MASTER = 8.0, 4.0
#: Modules of a layer of transformers without weights: the layer, its attention, its MLP and the activation.
MODULES_WITHOUT_WEIGHTS = 4


def kernels(gradients: ReducedGradients) -> GradientKernels:
    """Return the search for infinities, the norm in fp64, the flat copy in fp32, and the clipping of that.

    ZeRO-1 and 2 take the highest and the lowest value of every tensor. ZeRO-3 looks at all values at once.
    """
    count, nbytes = gradients.elements, gradients.element_bytes * gradients.elements
    check = _search_at_once(nbytes, count) if gradients.zero == 3 else _search(gradients.tensors, nbytes)
    each = gradients.tensors
    return GradientKernels(
        check=(*(_alone(gradients) if gradients.alone else ()), *check),
        norm=(
            _kernel("norm cast", "upcast", nbytes, WIDE * count, each),
            _kernel("norm", "reduce", WIDE * count, WIDE * each, each),
        ),
        ready=(
            _kernel("flatten", "copy", nbytes, nbytes),
            _kernel("gradients to fp32", "upcast", nbytes, MASTER * count),
        ),
        clip=(_kernel("clip", "strided", MASTER * count, MASTER * count),),
    )


def _search(tensors: int, nbytes: float) -> tuple[Op, ...]:
    """Return the kernels of ``has_inf_or_nan`` on every tensor."""
    numbers = KERNELS_ON_NUMBERS * tensors
    return (
        _kernel("highest", "reduce", nbytes, 4.0 * tensors, tensors),
        _kernel("lowest", "reduce", nbytes, 4.0 * tensors, tensors),
        _kernel("finite", "activation", 4.0 * numbers, 4.0 * numbers, numbers),
    )


def _search_at_once(nbytes: float, count: float) -> tuple[Op, ...]:
    """Return the kernels of ``isinf`` and ``isnan`` on all gradients, of which each makes a truth value per element."""
    return (
        _kernel("magnitude", "activation", nbytes, nbytes),
        _kernel("infinite", "activation", nbytes, count),
        _kernel("any infinite", "reduce", count, 1.0),
        _kernel("not a number", "activation", nbytes, count),
        _kernel("any not a number", "reduce", count, 1.0),
    )


def _alone(gradients: ReducedGradients) -> tuple[Op, ...]:
    """Return the copies that a single rank makes too: into a bucket, which is scaled, and to where they stay.

    ZeRO-3 joins them once more, as parts of ranks.
    """
    count, nbytes = gradients.passes * gradients.elements, gradients.element_bytes
    moved, tensors = float(count * nbytes), gradients.passes * gradients.tensors
    join = (_kernel("join", "copy", moved, moved),) if gradients.zero == 3 else ()
    return (
        _kernel("copy to bucket", "copy", moved, moved, tensors),
        *join,
        _kernel("scale", "activation", moved, moved),
        _kernel("copy from bucket", "copy", moved, moved, tensors),
    )


def hooked_modules(weights: Sequence[Weight]) -> int:
    """Return the modules of a unit with these weights: one for each that is no bias, and those without weights."""
    return sum(not weight.name.endswith("bias") for weight in weights) + MODULES_WITHOUT_WEIGHTS


def _kernel(name: str, op: str, read: float, written: float, launches: int = 1) -> Op:
    return Compute(f"optimizer.{name}", Memory(op, read, written, launches=launches), StepPhase.OPTIMIZER)
