"""Section `kernels` of a calibration profile: constants of the efficiency models, one per cost class."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from annotated_types import Ge

from simulator.bounds import Fraction, NotNegative, Positive
from simulator.errors import InputError
from simulator.hardware.figures import Amount, Cited, Figure, need_all

#: Types that matrix products are known in; a superset of those that a workload can ask for.
MatrixDtype = Literal["bf16", "fp16", "fp32", "fp8", "fp4"]
MatmulRole = Literal["fwd", "dgrad", "wgrad"]
MatmulSize = Literal["m", "n", "k", "batch"]
Direction = Literal["forward", "backward"]
#: Kinds of kernels that memory traffic bounds, told apart where measured speeds differ: ``norm_bwd`` both gradients of
#: LayerNorm, ``rms_norm`` likewise; ``mask`` filling under a mask; ``activation`` and ``residual`` what works element
#: by element on one tensor and on two, ``gelu`` with the error function; ``bias`` adding one row to all, and
#: ``strided`` work on parts of rows, which are PyTorch's kernels without vector loads; ``upcast`` to a wider type,
#: ``cast`` to a narrower one; ``loss`` the log-softmax over the vocabulary; ``embedding_bwd`` adding rows into the
#: table; ``weigh`` products of which one factor serves many elements, ``combine`` sums over few rows, as the experts
#: of a token give, or Inductor's blocks of a norm; ``accumulate`` adding a gradient to a buffer of a wider type;
#: ``reduce`` sums over rows or all, ``square_sum`` those of squares; ``transposed`` work on a tensor against its order
#: in memory; ``optimizer`` multi-tensor kernels, ``foreach`` and ``fused_bf16`` those of PyTorch's AdamW by the type of
#: its states, ``foreach_copy`` copies within a type; ``bnb_adam``, ``bnb_lion`` and those of 8 bits the optimizers of
#: bitsandbytes and torchao (``ao``), a kernel a tensor; ``split_copy`` and ``chunk_cat`` out of and into the flat
#: buffers of PyTorch's FSDP, ``chunk_upcast`` into one of a wider type; ``liger_loss`` Liger's cross-entropy in Triton;
#: ``zero`` writing only; ``top_k`` the choice of the largest; ``scatter_add``, ``index_add`` atomic sums of rows;
#: ``outer`` products of a row and a column in fp32.
MemoryClass = Literal[
    "norm",
    "norm_bwd",
    "rms_norm",
    "rms_norm_bwd",
    "softmax",
    "softmax_bwd",
    "mask",
    "dropout",
    "dropout_bwd",
    "activation",
    "activation_bwd",
    "gelu",
    "gelu_bwd",
    "residual",
    "bias",
    "strided",
    "rope",
    "embedding",
    "embedding_bwd",
    "weigh",
    "combine",
    "loss",
    "loss_bwd",
    "cast",
    "upcast",
    "optimizer",
    "foreach",
    "foreach_bf16",
    "fused_bf16",
    "foreach_copy",
    "split_copy",
    "chunk_cat",
    "chunk_upcast",
    "bnb_adam",
    "bnb_adam_8bit",
    "bnb_lion",
    "bnb_lion_8bit",
    "ao_adam_8bit",
    "liger_loss",
    "accumulate",
    "reduce",
    "square_sum",
    "transposed",
    "copy",
    "zero",
    "top_k",
    "scatter_add",
    "index_add",
    "outer",
]
#: Kernels around products in 8 and 4 bits.
Fp8Class = Literal[
    "fp8_amax",
    "fp8_scale",
    "fp8_cast",
    "fp8_turned",
    "fp8_both",
    "fp8_amax_made",
    "fp8_rows",
    "fp8_both_rows",
    "fp8_rescale",
    "fp8_cast_transpose",
    "fp8_blocks_transpose",
]
#: Kernels of attention in steps, and around experts' biases, as transformers asks PyTorch for them. ``softmax_fp32`` is
#: over scores in fp32, ``softmax_odd`` over rows of an odd length, which ``join_odd`` makes. ``row_max`` finds the
#: largest of each row. ``index_rows`` adds up rows by an index, and takes as long as the rows of the commonest one.
TransformersClass = Literal[
    "softmax_fp32",
    "softmax_fp32_bwd",
    "softmax_odd",
    "softmax_odd_bwd",
    "join_odd",
    "row_max",
    "index_rows",
]
#: Scales of operands in 8 bits: one for each row, for each block of 128 elements, or for 32 (MXFP8).
Scaling = Literal["rows", "blocks", "mx"]
#: Scales that a product costs no more with: one for each tensor, or none, where another kernel applies them. Products
#: in 4 bits are always measured with a scale for 16 elements.
UNSCALED = ("tensor", "none", "sixteens")
FittedRange = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class GroupedModel(Cited):
    """Particulars of grouped products."""

    tiles: tuple[str, ...]
    """those of ``tile_efficiency`` that such kernels are made for"""
    narrow_up_to: int | None = None
    """rows or columns of a group, on the mean, up to which the last of ``tiles`` is taken, and beyond the first
    (PyTorch on Hopper: aten/src/ATen/native/cuda/GroupMM.cu); None: any, by what each would take"""
    speed: dict[MatmulRole, Fraction]
    """relative to single products of the type and layout"""
    start_s: NotNegative
    """before the first tile, beside ``start_s`` of all: the groups' sizes are read and turned into a schedule"""
    group_s: NotNegative = 0.0
    """for each group, whose operands SMs must find"""

    def __post_init__(self) -> None:
        need_all("kernels.matmul.grouped.speed", self.speed, get_args(MatmulRole))


@dataclass(frozen=True, kw_only=True)
class CudaCoreModel(Cited):
    """Products of fp32 on CUDA cores, which PyTorch takes unless it is asked for TF32."""

    sustained_flops_per_s: Positive
    """what the power limit allows a GPU that is busy with real data for long"""
    layout_speed: dict[MatmulRole, Positive]
    """speed of forward, data and weight gradient, relative to the peak and the tile's efficiency"""

    def __post_init__(self) -> None:
        need_all("kernels.matmul.cuda_cores.layout_speed", self.layout_speed, get_args(MatmulRole))


@dataclass(frozen=True, kw_only=True)
class UnalignedModel(Cited):
    """Particulars of products in 16 bits with rows that are no multiple of 16 bytes long.

    cuBLAS has no kernels of its own for these. It takes CUTLASS's of an older architecture, which load element by
    element.
    """

    speed: dict[MatmulRole, Fraction]
    """of the peak"""

    def __post_init__(self) -> None:
        need_all("kernels.matmul.unaligned.speed", self.speed, get_args(MatmulRole))


@dataclass(frozen=True, kw_only=True)
class ScaledModel(Cited):
    """Speed of products in 8 bits whose operands have a scale for each row, or for each block."""

    speed: dict[MatmulRole, Fraction]
    """relative to products of the layout with one scale for each operand"""

    def __post_init__(self) -> None:
        need_all("kernels.matmul.scaled.speed", self.speed, get_args(MatmulRole))


@dataclass(frozen=True, kw_only=True)
class MatmulModel(Cited):
    """Constants of `simulator.costs.matmul`, fitted together."""

    tile_efficiency: dict[str, Fraction]
    """share of the peak inside a tile's loop over k, by tile (256x128 means 128x256 too)"""
    large_tile_preference: NotNegative
    """how much the library favours large tiles when it chooses; 0: it takes the fastest"""
    wave_start_s: Positive
    """filling the pipeline of a tile"""
    store_Bps_per_sm: Positive
    """writing a tile"""
    load_Bps_per_sm: Positive
    """reading a tile of the output that is added to"""
    memory_fraction: Fraction
    """share of the peak memory bandwidth that is reached"""
    overlap_exponent: Annotated[float, Ge(1)]
    """q of (compute^q + memory^q)^(1/q); infinite: perfect overlap, 1: none"""
    start_s: Positive
    """an empty kernel"""
    split_start_s: NotNegative
    """starting the sum over slices of k"""
    split_sum_Bps: Positive
    """summing slices of k"""
    min_k_per_split: Positive
    """shortest slice of k"""
    sustained_flops_per_s: dict[MatrixDtype, Figure]
    """what the power limit allows a GPU that is busy with real data for long"""
    power_exponent: Annotated[float, Ge(1)]
    """p of (burst^p + limited^p)^(1/p): how gradually the clock gives way near that limit"""
    layout_speed: dict[MatrixDtype, dict[MatmulRole, Figure]]
    """speed of forward, data and weight gradient by type, relative to the peak of the type and the tile's efficiency"""
    grouped: GroupedModel
    unaligned: UnalignedModel | None = None
    """without it products of such sizes cost what others do"""
    cuda_cores: CudaCoreModel | None = None
    """without it CUDA cores reach the share of their peak that TF32 reaches of its own, in all layouts alike"""
    scaled: dict[Scaling, ScaledModel] = field(default_factory=dict)
    """products in 8 bits by the scales of their operands, where that is not one for a whole tensor"""
    fitted_range: dict[MatrixDtype, dict[MatmulSize, FittedRange]] = field(default_factory=dict)
    """smallest and largest sizes that were measured, by type; types that were not are missing"""

    def __post_init__(self) -> None:
        if not self.tile_efficiency:
            raise InputError("needs at least one tile", key="kernels.matmul.tile_efficiency")
        for tile in self.tile_efficiency:
            if not re.fullmatch(r"\d+x\d+", tile):
                raise InputError(
                    "is no size of a tile", key="kernels.matmul.tile_efficiency", found=tile, allowed="such as 256x128"
                )
        for dtype, sizes in self.fitted_range.items():
            need_all(f"kernels.matmul.fitted_range.{dtype}", sizes, get_args(MatmulSize))
        for dtype, speeds in self.layout_speed.items():
            need_all(f"kernels.matmul.layout_speed.{dtype}", speeds, get_args(MatmulRole))
        need_all("kernels.matmul.tile_efficiency", self.tile_efficiency, self.grouped.tiles)


@dataclass(frozen=True, kw_only=True)
class AttentionCurve(Cited):
    """Share of the peak of a flash attention kernel, by the keys L that a query sees on average."""

    limit: Fraction
    """for long sequences"""
    half_length: NotNegative
    """L at which half of the limit is reached: limit * L / (L + half_length)"""
    fitted_range: FittedRange | None = None
    """shortest and longest sequence that was measured"""


@dataclass(frozen=True, kw_only=True)
class RowCurve:
    """Seconds of a kernel by its bytes: start_s + bytes / (share * peak bandwidth)."""

    share: Fraction
    """of the peak memory bandwidth"""
    start_s: NotNegative
    """an empty kernel"""


@dataclass(frozen=True, kw_only=True)
class AroundCurve(RowCurve, Cited):
    """Kernels around another, by their bytes."""


@dataclass(frozen=True, kw_only=True)
class DropoutCosts(Cited):
    """Seconds, on all SMs together, of a random number for each score: its making and its use."""

    forward_s: NotNegative
    backward_s: NotNegative


@dataclass(frozen=True, kw_only=True)
class BiasCosts(Cited):
    """Seconds, on all SMs together, of adding a bias to each score, at one head dimension."""

    forward_s: NotNegative
    backward_s: NotNegative


@dataclass(frozen=True, kw_only=True)
class Fp32Attention(Cited):
    """PyTorch's fused kernels of fp32, by head dimension: shares of the peak of CUDA cores. TF32 is not told apart."""

    forward: dict[int, Fraction]
    backward: dict[int, Fraction]
    fitted_range: FittedRange | None = None
    """shortest and longest sequence that was measured"""


@dataclass(frozen=True, kw_only=True)
class AttentionModel:
    """Curves by head dimension; both constants go linearly between two of them and stay beyond the ends."""

    forward: dict[int, AttentionCurve]
    backward: dict[int, AttentionCurve]
    tail: dict[Direction, Amount]
    """how long the last thread blocks run while SMs fall idle, in times of the longest block"""
    start_s: Figure
    """an empty kernel"""
    around: AroundCurve | None = None
    """the kernels before and after a backward one, by their bytes; without it they are in its curves"""
    dropout: DropoutCosts | None = None
    """of dropped probabilities; without it they cost nothing"""
    fp32: Fp32Attention | None = None
    """PyTorch's fused kernels of fp32; without it they reach the shares that kernels of other types do"""
    bias: dict[int, BiasCosts] = field(default_factory=dict)
    """of scores that a bias is added to, by head dimension; without it they cost what others do"""

    def __post_init__(self) -> None:
        for name, curves in (("forward", self.forward), ("backward", self.backward)):
            if not curves:
                raise InputError("needs at least one head dimension", key=f"kernels.attention.{name}")
        need_all("kernels.attention.tail", self.tail, get_args(Direction))


@dataclass(frozen=True, kw_only=True)
class ColumnSums:
    """Seconds of PyTorch's sums over columns beside those of their bytes (`simulator.costs.memory.slices`)."""

    value_s: NotNegative
    """adding one value more in every thread"""
    slice_s: NotNegative
    """adding the sums of one slice more in the end"""


@dataclass(frozen=True, kw_only=True)
class MemoryCurve(RowCurve, Cited):
    """One class of kernels, at any size of row."""

    by_width: dict[int, RowCurve] = field(default_factory=dict)
    """of kernels that work on whole rows, by elements of a row: linear in its logarithm between two, constant beyond"""
    columns: ColumnSums | None = None
    """of sums over columns of matrices of known width"""
    element_s: NotNegative | None = None
    """per element written, where finding its operands takes longer than moving them"""
    fitted_range: FittedRange | None = None
    """fewest and most bytes that were measured"""


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Kernels bound by memory traffic."""

    eager: dict[MemoryClass, MemoryCurve]
    """PyTorch's own kernels"""
    fused: dict[MemoryClass, MemoryCurve]
    """what other software launches instead (Megatron-LM, TransformerEngine, Apex, Inductor),
    where that differs"""
    inductor: dict[MemoryClass, MemoryCurve] = field(default_factory=dict)
    """what Inductor makes, where it was measured and differs from both"""
    local_modules: dict[MemoryClass, MemoryCurve] = field(default_factory=dict)
    """PyTorch's kernels on fp32 and on heads out of order, as local modules of Megatron-Core launch them, where they
    were measured"""
    fp8: dict[Fp8Class, MemoryCurve] = field(default_factory=dict)
    """casts of operands of products in 8 bits"""
    transformers: dict[TransformersClass, MemoryCurve] = field(default_factory=dict)
    """PyTorch's kernels that transformers' attention in steps and its experts with biases launch"""

    def __post_init__(self) -> None:
        need_all("kernels.memory.eager", self.eager, get_args(MemoryClass))
        if self.transformers:
            need_all("kernels.memory.transformers", self.transformers, get_args(TransformersClass))


@dataclass(frozen=True, kw_only=True)
class KernelModels:
    """The efficiency models, one per cost class."""

    matmul: MatmulModel
    attention: AttentionModel
    attention_flash2: AttentionModel | None = None
    """FlashAttention 2's kernels where ``attention`` is of newer ones, cuDNN's on Hopper"""
    attention_triton: AttentionModel | None = None
    """FlashAttention's first kernels in Triton, of 2022"""
    memory: MemoryModel
    gap_s: Figure | None = None
    """from the end of a kernel to the start of the next in its stream, in seconds: a part of what all of them are
    priced at, which a profiler does not count"""
