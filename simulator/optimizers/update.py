"""Parts of an update of weights: tensors, the types of operands, and elementwise operations.

Multi-tensor kernels run an operation over all tensors at once; else each tensor has a kernel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulator.program import Compute, Memory, StepPhase
from simulator.units import DTYPE_BYTES

Kernels = tuple[Compute, ...]


@dataclass(frozen=True)
class UpdatedTensor:
    """One tensor that an optimizer updates, as one rank holds it.

    ``shape`` is the rank's own. Of a tensor whose states several ranks share, this rank updates the part ``share``.
    """

    shape: tuple[int, ...]
    share: float = 1.0

    @property
    def elements(self) -> float:
        """Elements that this rank updates."""
        return math.prod(self.shape) * self.share

    @property
    def is_matrix(self) -> bool:
        """True for a matrix, and for several in one tensor, as experts have them."""
        return len(self.shape) > 1

    @property
    def matrices(self) -> int:
        """Number of matrices that the tensor holds."""
        return math.prod(self.shape[:-2])


@dataclass(frozen=True)
class UpdateTypes:
    """Types of what an update reads and writes.

    ``weight`` is the type of the weights that it works on, which are the master weights where there are such.
    ``read_only`` are states that it reads and leaves as they are.
    """

    weight: str
    gradient: str
    state: str
    read_only: str = ""

    def operand_bytes(self, operands: str) -> int:
        """Return the bytes of an element of all ``operands``, a letter each (see `ElementwiseOp`)."""
        types = {"w": self.weight, "g": self.gradient}
        return sum(DTYPE_BYTES[types.get(operand, self.state)] for operand in operands)


class ElementwiseOp(NamedTuple):
    """One elementwise operation: operands read and written, and the class of its kernels.

    Operands are letters: ``w`` the weights, ``g`` the gradients, ``m`` and ``v`` the states. ``t`` is a temporary
    tensor in the type of the states.
    """

    name: str
    read: str
    written: str
    op: str = ""


#: Kernels of a part of an update; bytes of the states of one tensor; bytes that a step needs beside them.
UpdateKernels = Callable[[Sequence[UpdatedTensor], UpdateTypes], Kernels]
TensorStateBytes = Callable[[UpdatedTensor, UpdateTypes], float]
WorkspaceBytes = Callable[[Sequence[UpdatedTensor], UpdateTypes], float]


@dataclass(frozen=True)
class Implementation:
    """How a library runs an optimizer.

    ``rounds`` return the kernels of one step. Where there are three, the first and the last work on this rank's share,
    and the second on whole matrices. Ranks that share states exchange them between two rounds.
    ``state_bytes`` of one tensor, and ``workspace_bytes`` of a step over all of them, count what this rank holds.
    ``state_dtypes`` lists the types that states may have, the usual one first.
    ``on_host``: a CPU updates the weights. ``pages``: states can live in memory that pages to the host.
    """

    rounds: tuple[UpdateKernels, ...]
    state_bytes: TensorStateBytes
    workspace_bytes: WorkspaceBytes
    state_dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    on_host: bool = False
    pages: bool = False


@dataclass(frozen=True)
class UpdateRule:
    """A rule by which weights are updated, and the libraries that run it, the usual one first.

    ``matrices_only``: it updates nothing but matrices. ``needs_whole``: it works on whole matrices. ``multiplies_in``:
    the type of its matrix products, empty where it has none.
    """

    name: str
    implementations: Mapping[str, Implementation]
    matrices_only: bool = False
    needs_whole: bool = False
    multiplies_in: str = ""


def total_elements(parameters: Iterable[UpdatedTensor]) -> float:
    """Return the elements of ``parameters`` that this rank updates."""
    return sum(parameter.elements for parameter in parameters)


def largest(parameters: Iterable[UpdatedTensor]) -> float:
    """Return the elements of the largest of ``parameters``."""
    return max((parameter.elements for parameter in parameters), default=0.0)


def full_states(count: int) -> TensorStateBytes:
    """Return a count of bytes for ``count`` states, each as large as the tensor."""

    def state_bytes(parameter: UpdatedTensor, types: UpdateTypes) -> float:
        return count * DTYPE_BYTES[types.state] * parameter.elements

    return state_bytes


def no_bytes(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> float:
    """Return 0: nothing is needed beside operands and states."""
    return 0.0


def temporaries(count: int) -> WorkspaceBytes:
    """Return a count of bytes for ``count`` temporary tensors of the size of the tensor that is being updated."""

    def workspace_bytes(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> float:
        return count * DTYPE_BYTES[types.state] * largest(parameters)

    return workspace_bytes


def over_all(operations: Sequence[ElementwiseOp], op: Callable[[UpdateTypes], str]) -> UpdateKernels:
    """Return the round that runs ``operations`` over all tensors at once, by multi-tensor kernels of class ``op``."""

    def kernels(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> Kernels:
        count = total_elements(parameters)
        return tuple(
            Compute(
                f"optimizer.{step.name}",
                Memory(op(types), *_operand_bytes(step, types, count), dtype="fp32"),
                StepPhase.OPTIMIZER,
            )
            for step in writable(operations, types)
            if count
        )

    return kernels


def each_tensor(operations: Sequence[ElementwiseOp]) -> UpdateKernels:
    """Return the round that runs ``operations`` over one tensor after another."""

    def kernels(parameters: Sequence[UpdatedTensor], types: UpdateTypes) -> Kernels:
        count = total_elements(parameters)
        return tuple(
            tensor_kernels(step.name, step.op, *_operand_bytes(step, types, count), count, len(parameters))
            for step in writable(operations, types)
            if count
        )

    return kernels


def writable(operations: Iterable[ElementwiseOp], types: UpdateTypes) -> Iterable[ElementwiseOp]:
    """Yield ``operations`` without those, and the operands, that write states that are read only."""
    for step in operations:
        if not types.read_only or step.written != types.read_only:
            yield step._replace(written=step.written.replace(types.read_only, "")) if types.read_only else step


def tensor_kernels(name: str, op: str, read: float, written: float, elements: float, launches: int) -> Compute:
    """Return kernels of class ``op`` that run on one tensor after another, in ``launches``.

    ``read`` and ``written`` are the bytes of all of them, ``elements`` the elements that they work on.
    """
    kernel = Memory(op, read, written, dtype="fp32", elements=elements, launches=launches)
    return Compute(f"optimizer.{name}", kernel, StepPhase.OPTIMIZER)


def _operand_bytes(step: ElementwiseOp, types: UpdateTypes, count: float) -> tuple[float, float]:
    return types.operand_bytes(step.read) * count, types.operand_bytes(step.written) * count
