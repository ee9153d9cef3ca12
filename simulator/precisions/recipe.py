"""Everything that a recipe of training in 8 or 4 bits decides, as one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class CastKernel(NamedTuple):
    """A kernel of a cast: its name, cost class ``op``, and traffic.

    ``read`` and ``written`` are in tensors of the operand's size in working precision: 8 bits of 16 are half a tensor,
    4 bits a quarter.
    """

    name: str
    op: str
    read: float
    written: float


#: How operands of a product are scaled: by tensor, rows, blocks of 128, every 32 elements (mx) or every 16 (sixteens).
#: By none where another kernel applies the scales. Profiles have a speed of rows, blocks and mx.
OperandScales = Literal["tensor", "rows", "blocks", "mx", "sixteens", "none"]

#: Kernels one after another.
CastKernels = tuple[CastKernel, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ProductRecipe:
    """A recipe for the products of linear layers: y = x W^T forward, dx = dy W and dW = dy^T x backward.

    Hopper's matrix units take 8-bit operands in one layout, and Blackwell's 4-bit ones. Backward products therefore
    need x, W and dy with rows and columns changed over.
    """

    name: str
    """the name in workload files"""
    about: str
    """one line that describes it"""
    frameworks: tuple[str, ...]
    """those that have it"""
    bits: Literal[8, 4] = 8
    """of an operand's element"""
    compiled: bool = False
    """its kernels are those that torch.compile makes, and it is simulated with these alone"""

    products: Mapping[str, OperandScales]
    """role of a product in so few bits (fwd, dgrad, wgrad) -> how its operands are scaled; others stay in working
    precision"""
    experts: bool
    """the grouped products of experts are so too"""
    casts_each_expert: bool = False
    """an expert's rows, and its weight, are cast by kernels of their own, which one call launches for all experts"""
    pads_experts: bool = False
    """rows of an expert are padded to the next multiple, and cut again behind the experts, where its dispatcher has not
    padded them"""
    multiple: int = 16
    """products whose sizes are no multiples of it stay in working precision"""

    input_forward: CastKernels
    """of x, before the forward product"""
    input_backward: CastKernels = ()
    """of x, before the product for dW"""
    weight_forward: CastKernels
    """of W, before the forward product"""
    weight_backward: CastKernels = ()
    """of W, before the product for dx"""
    gradient: CastKernels
    """of dy, before the product for dx"""
    gradient_again: CastKernels = ()
    """of dy, before the product for dW"""
    behind: Mapping[str, CastKernels] = field(default_factory=dict)
    """role of a product -> kernels on its output"""
    weights_once: bool = False
    """weights are cast for the first micro-batch of a step, and their copies kept for the others"""
    scale_bytes: float = 0.0
    """of scales, for each element of a copy; 0 where they are too few to count"""
    weight_copies: int = 0
    """copies that stay beside W"""
    keeps_input_copy: bool = False
    """a copy of x is kept until the backward pass; false: x itself, in working precision, but for x that a norm or an
    activation makes, which the backward pass makes again"""
    activation_backward: tuple[str, str] | None = None
    """cost classes of the two kernels that stand for the backward pass of an activation: one finds scales for its
    gradients and for its output, one writes all of these in 8 bits"""
    gathers: tuple[str, ...] = ("bf16",)
    """types that ZeRO-3 can gather its weights in, the usual one first"""

    @property
    def dtype(self) -> Literal["fp8", "fp4"]:
        """Type of the operands."""
        return "fp8" if self.bits == 8 else "fp4"

    @property
    def copy_bytes(self) -> float:
        """Bytes of an element of a copy in so few bits, with its part of a scale."""
        return self.bits / 8 + self.scale_bytes

    @property
    def key(self) -> str:
        """Dotted key of workload files that chooses it."""
        return f"training.{self.dtype}.recipe"
