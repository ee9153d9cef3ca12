"""Differentiable operations, as autograd sees them: what each launches, and what it keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from simulator.operations.weights import Weight
from simulator.program import Axis, Beside, Collective, CollectiveKind, Comm, Compute, Memory, Purpose, StepPhase

Op = Compute | Collective | Beside
Ops = tuple[Op, ...]


@dataclass(frozen=True)
class Tensor:
    """An activation that is kept; two operations that keep the same one name it alike, and it is held once."""

    name: str
    nbytes: float


@dataclass(frozen=True)
class Node:
    """One operation with its gradients.

    ``gather`` fetches what only the weight gradient needs: the other ranks' shards of the saved input. The unsplit
    backward pass issues it first, as Megatron does to overlap it; the split one issues it with the weight gradient.
    ``together`` is the unsplit backward pass where it is not these three in a row.

    ``saved`` is kept from forward to backward, and ``forward_bytes`` are alive while the forward runs. ``grad_bytes``
    are alive while the backward runs: gradients of output and input, gathered copies, and a weight gradient that is not
    accumulated in place. A weight gradient that is a pass of its own needs ``saved`` and ``output_grad_bytes`` until
    then, and ``weight_grad_bytes`` while it runs. ``placeholders``, one per shape, are kept for good once the first
    backward has run (see `linear`).

    ``weights`` are those that the operation reads; ``weight_grad`` completes their gradients. Of ``saved``, the weight
    gradient alone needs ``saved_for_weights``.
    """

    forward: Ops = ()
    input_grad: Ops = ()
    weight_grad: Ops = ()
    gather: Ops = ()
    together: Ops = ()
    saved: tuple[Tensor, ...] = ()
    forward_bytes: float = 0.0
    grad_bytes: float = 0.0
    output_grad_bytes: float = 0.0
    weight_grad_bytes: float = 0.0
    placeholders: tuple[Tensor, ...] = ()
    weights: tuple[Weight, ...] = ()
    saved_for_weights: tuple[Tensor, ...] = ()

    @property
    def backward(self) -> Ops:
        """The unsplit backward pass."""
        return self.together or (*self.gather, *self.input_grad, *self.weight_grad)


def unique(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor once, in order of first mention."""
    return tuple({tensor.name: tensor for tensor in tensors}.values())


def memory(
    phase: str, name: str, op: str, read: float, write: float, dtype: str, width: int = 0, *, parts: int = 0
) -> Compute:
    """A memory-bound kernel; ``read`` and ``write`` in bytes, ``width`` in elements of a row, ``parts`` as `Memory`."""
    return Compute(name, Memory(op, float(read), float(write), dtype=dtype, width=width, parts=parts), StepPhase(phase))


def comm(op: str, block: str, nbytes: float) -> Collective:
    """A tensor-parallel collective that belongs to ``block``."""
    return Collective(f"tp.{op} {block}", CollectiveKind(op), float(nbytes), Axis.TP, Purpose.TENSOR)


def fuse(phase: str, first: Op, second: Op, shared_bytes: float, *, keep: bool) -> Compute:
    """One memory-bound kernel for two: the tensor between them is not read again, nor written unless it is kept."""
    assert isinstance(first, Compute)
    assert isinstance(second, Compute)
    a, b = _memory_kernel(first), _memory_kernel(second)
    return memory(
        phase,
        f"{first.name} + {second.name}",
        b.op,
        a.read_bytes + b.read_bytes - shared_bytes,
        a.write_bytes + b.write_bytes - (0 if keep else shared_bytes),
        b.dtype,
        b.width,
    )


def _memory_kernel(op: Compute) -> Memory:
    assert isinstance(op.kernel, Memory)
    return op.kernel


def run_again(op: Op, *, carries_checkpoint: bool = False) -> Op:
    """Return ``op`` of a forward pass as its recomputation runs it."""
    match op:
        case Compute():
            return replace(op, phase=StepPhase.RECOMPUTE, carries_checkpoint=carries_checkpoint)
        case Beside():
            return replace(op, kernels=tuple(replace(kernel, phase=StepPhase.RECOMPUTE) for kernel in op.kernels))
        case Comm():
            return op
