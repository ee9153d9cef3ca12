"""A calibration profile: what one kind of GPU, its host and its links do, and where each figure comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, model_validator

from simulator.config import catalog
from simulator.config.cited import Amount, Cited, Figure, Fraction, NotNegative, Positive
from simulator.config.files import AsTuple, Section, Whole, as_mapping, parse_yaml, read_text, validated
from simulator.config.likeness import completed
from simulator.config.transport import Transport
from simulator.errors import InputError

#: Types that matrix products are known in; a superset of those that a workload can ask for.
MatrixDtype = Literal["bf16", "fp16", "fp32", "fp8"]
Role = Literal["fwd", "dgrad", "wgrad"]
Size = Literal["m", "n", "k", "batch"]
Direction = Literal["forward", "backward"]
#: Kinds of kernels that memory traffic bounds, told apart where measured speeds differ: ``norm_bwd`` both gradients of
#: LayerNorm, ``rms_norm`` likewise; ``mask`` filling under a mask; ``activation`` and ``residual`` what works element
#: by element on one tensor and on two, ``gelu`` with the error function; ``bias`` adding one row to all, and
#: ``strided`` work on parts of rows, which are PyTorch's kernels without vector loads; ``upcast`` to a wider type,
#: ``cast`` to a narrower one; ``loss`` the log-softmax over the vocabulary; ``embedding_bwd`` adding rows into the
#: table; ``accumulate`` adding a gradient to a buffer of a wider type; ``reduce`` sums over rows or all; ``optimizer``
#: multi-tensor kernels, ``foreach`` those of PyTorch's AdamW by the type of its states, ``foreach_copy`` copies within
#: a type; ``split_copy`` and ``chunk_cat`` out of and into the flat buffers of PyTorch's FSDP, ``chunk_upcast`` into
#: one of a wider type; ``zero`` writing only.
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
    "loss",
    "loss_bwd",
    "cast",
    "upcast",
    "optimizer",
    "foreach",
    "foreach_bf16",
    "foreach_copy",
    "split_copy",
    "chunk_cat",
    "chunk_upcast",
    "accumulate",
    "reduce",
    "copy",
    "zero",
]
Implementation = Literal["eager", "fused", "compiled"]
#: What the host issues, as far as it takes differently long; other: elementwise, copies, reductions.
LaunchClass = Literal["matmul", "attention", "norm", "other"]
#: What the host does around several ops.
AroundOps = Literal[
    "autograd",
    "split",
    "checkpoint",
    "forward_grouped",
    "backward_grouped",
    "tp_all_reduce",
    "exchange",
    "bucket",
    "gather",
    "reduce",
]

#: What differs in what it draws and in how far the clock matters to it.
LoadClass = Literal["matmul", "attention", "arithmetic", "memory", "communication"]

Range = Annotated[tuple[Whole, Whole], AsTuple]


class GpuSpec(Section):
    """The GPU itself."""

    vendor: Literal["nvidia", "amd"] = "nvidia"
    """whose: collectives run on its library, NCCL or RCCL, and these do not talk to each other"""
    sms: Annotated[Whole, Field(gt=0)]
    """streaming multiprocessors"""
    peak_flops_per_s: dict[MatrixDtype, Figure]
    """dense matrix FLOP/s by type; fp32 is TF32"""
    memory_bandwidth_Bps: Figure
    """bytes/s of the device memory"""
    memory_bytes: Figure
    """what the device reports, not the GB on its label"""
    blas_workspace_bytes: Annotated[int, Field(ge=0)] = 8_519_680
    """what PyTorch's allocator keeps for products of one thread: 32 MiB on GPUs of compute capability 9 and 10, 128 MiB
    on gfx94, else as given (aten/src/ATen/cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``)"""


class GroupedModel(Cited):
    """What is particular to grouped products."""

    tiles: Annotated[tuple[str, ...], AsTuple]
    """those of ``tile_efficiency`` that such kernels are made for"""
    speed: dict[Role, Fraction]
    """relative to single products of the type and layout"""
    start_s: NotNegative
    """before the first tile, beside ``start_s`` of all: the groups' sizes are read and turned into a schedule"""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _need_all("kernels.matmul.grouped.speed", self.speed, get_args(Role))
        return self


class MatmulModel(Cited):
    """Constants of `simulator.costs.matmul`, fitted together."""

    tile_efficiency: dict[Annotated[str, Field(pattern=r"^\d+x\d+$")], Fraction]
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
    overlap_exponent: Annotated[float, Field(ge=1)]
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
    power_exponent: Annotated[float, Field(ge=1)]
    """p of (burst^p + limited^p)^(1/p): how gradually the clock gives way near that limit"""
    layout_speed: dict[MatrixDtype, dict[Role, Figure]]
    """speed of forward, data and weight gradient by type, relative to the peak of the type and the tile's efficiency"""
    grouped: GroupedModel
    fitted_range: dict[MatrixDtype, dict[Size, Range]] = Field(default_factory=dict)
    """smallest and largest sizes that were measured, by type; types that were not are missing"""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.tile_efficiency:
            raise InputError("needs at least one tile", key="kernels.matmul.tile_efficiency")
        for dtype, sizes in self.fitted_range.items():
            _need_all(f"kernels.matmul.fitted_range.{dtype}", sizes, get_args(Size))
        for dtype, speeds in self.layout_speed.items():
            _need_all(f"kernels.matmul.layout_speed.{dtype}", speeds, get_args(Role))
        _need_all("kernels.matmul.tile_efficiency", self.tile_efficiency, self.grouped.tiles)
        return self


class AttentionCurve(Cited):
    """Share of the peak of a flash attention kernel, by the keys L that a query sees on average."""

    limit: Fraction
    """for long sequences"""
    half_length: NotNegative
    """L at which half of the limit is reached: limit * L / (L + half_length)"""
    fitted_range: Range | None = None
    """shortest and longest sequence that was measured"""


class RowCurve(Section):
    """Seconds of a kernel by its bytes: start_s + bytes / (share * peak bandwidth)."""

    share: Fraction
    """of the peak memory bandwidth"""
    start_s: NotNegative
    """an empty kernel"""


class AttentionModel(Section):
    """Curves by head dimension; both constants go linearly between two of them and stay beyond the ends."""

    forward: dict[Whole, AttentionCurve]
    backward: dict[Whole, AttentionCurve]
    tail: dict[Direction, Amount]
    """how long the last thread blocks run while SMs fall idle, in times of the longest block"""
    start_s: Figure
    """an empty kernel"""
    around: RowCurve | None = None
    """the kernels before and after a backward one, by their bytes; without it they are in its curves"""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name, curves in (("forward", self.forward), ("backward", self.backward)):
            if not curves:
                raise InputError("needs at least one head dimension", key=f"kernels.attention.{name}")
        _need_all("kernels.attention.tail", self.tail, get_args(Direction))
        return self


class ColumnSums(Section):
    """What PyTorch's sums over columns take beside their bytes (`simulator.costs.memory.slices`)."""

    value_s: NotNegative
    """adding one value more in every thread"""
    slice_s: NotNegative
    """adding the sums of one slice more in the end"""


class MemoryCurve(RowCurve, Cited):
    """One class of kernels, at any size of row."""

    by_width: dict[Whole, RowCurve] = Field(default_factory=dict)
    """of kernels that work on whole rows, by elements of a row: linear in its logarithm between two, constant beyond"""
    columns: ColumnSums | None = None
    """of sums over columns of matrices of known width"""
    fitted_range: Range | None = None
    """fewest and most bytes that were measured"""


class MemoryModel(Section):
    """Kernels bound by memory traffic."""

    eager: dict[MemoryClass, MemoryCurve]
    """PyTorch's own kernels"""
    fused: dict[MemoryClass, MemoryCurve]
    """what the implementations fused and compiled launch instead (Megatron-LM, TransformerEngine, Apex, Inductor),
    where that differs"""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _need_all("kernels.memory.eager", self.eager, get_args(MemoryClass))
        return self


class Kernels(Section):
    """The efficiency models, one per cost class."""

    matmul: MatmulModel
    attention: AttentionModel
    memory: MemoryModel
    gap_s: Figure | None = None
    """from the end of a kernel to the start of the next in its stream, in seconds: a part of what all of them are
    priced at, which a profiler does not count"""


class LaunchCosts(Cited):
    """Seconds that the host takes to issue one op, autograd's and the modules' part of it included."""

    forward_s: dict[LaunchClass, Positive]
    backward_s: dict[LaunchClass, Positive]
    """per kernel: a linear layer launches two products"""
    optimizer_s: Positive
    """a step of a fused optimizer"""
    collective_s: Positive
    p2p_s: Positive
    """a send or a receive, with what a pipeline's runtime does for it"""
    around_s: dict[AroundOps, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """the start of a backward pass; per product of a backward pass that is split in two; per recomputed layer; a
    grouped product of experts, with the sorting of tokens around it; an all-reduce of tensor parallelism, with the two
    linear layers written by hand that it stands for; a collective of experts, for which the host cuts and joins
    tensors; a bucket of DDP; a unit of FSDP that is gathered, one whose gradients are reduced. Not listed: nothing, or
    what other products and collectives take"""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for key, given in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            _need_all(f"host.launch_s.{key}", given, get_args(LaunchClass))
        return self


class Host(Section):
    """The CPU that feeds the GPU."""

    launch_s: dict[Implementation, LaunchCosts]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _need_all("host.launch_s", self.launch_s, get_args(Implementation))
        return self


class Interference(Cited):
    """What NCCL's kernels take from others on their GPU, waiting for their peers or moving bytes."""

    sms: Annotated[Whole, Field(ge=0)]
    """streaming multiprocessors that it holds; 0: none"""
    matmul_sms: Annotated[Whole, Field(ge=0)]
    """those that matrix products lose: their thread blocks run in clusters of two, which need two free neighbours"""
    memory_speed: dict[Literal["norm", "other"], Fraction]
    """speed of kernels that memory bounds while bytes move; norms are bound by arithmetic too"""
    waiting_speed: dict[Literal["norm", "other"], Fraction]
    """their speed while peers are waited for"""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _need_all("interference.memory_speed", self.memory_speed, ("norm", "other"))
        _need_all("interference.waiting_speed", self.waiting_speed, ("norm", "other"))
        return self


class Load(Section):
    """What a class of kernels draws, and how its speed follows the clock of the SMs (the GPU's, below)."""

    watts: Positive
    """of a GPU that does nothing else, at ``clock_hz``"""
    clock_hz: Positive
    """where the power limit then leaves the clock, or the highest one"""
    priced_at_hz: Positive
    """clock that the class's times hold at"""
    speed_exponent: NotNegative
    """speed goes with this power of the clock: caches and memory have clocks of their own"""


class Power(Cited):
    """The power limit as a budget: clocks fall until the mean over a step keeps to it."""

    limit_w: Positive
    """what a GPU draws that the limit holds back, mean over seconds"""
    idle_w: NotNegative
    """at the highest clock with nothing to do"""
    highest_clock_hz: Positive
    exponent: Positive
    """what is drawn above ``idle_w`` goes with this power of the clock"""
    loads: dict[LoadClass, Load]
    """arithmetic: streams that arithmetic bounds too (norms, GELU); communication: while NCCL moves bytes"""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _need_all("power.loads", self.loads, get_args(LoadClass))
        if self.idle_w >= self.limit_w:
            raise InputError("is not below the limit", key="power.idle_w", found=self.idle_w, allowed=self.limit_w)
        return self


class Provenance(Section):
    """The machine that was measured."""

    gpu: str
    """as the driver names it"""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    commands: Annotated[tuple[str, ...], AsTuple]
    """what measured it"""
    driver: str = ""
    cuda: str = ""
    nccl: str = ""
    torch: str = ""
    nvls: bool | None = None
    """whether NVLink SHARP was at hand"""
    power_limit_w: Positive | None = None
    highest_sm_mhz: Positive | None = None
    median_sm_mhz: Positive | None = None
    """SM clock at which kernels were measured, most under the power limit"""


class Residual(Section):
    """How far fitted times are off, relative to measured ones."""

    n: Annotated[Whole, Field(gt=0)]
    """cases"""
    mean: NotNegative
    """mean absolute error"""
    max: NotNegative
    """largest absolute error"""
    bias: float
    """mean signed error; above 0: too slow"""


class Residuals(Section):
    """Of what the constants were fitted to, and of what was held out: every second size."""

    fitted: Residual | None = None
    held_out: Residual | None = None


class Profile(Section):
    """A versioned calibration of one kind of GPU. Raises `InputError` where a figure cites no source of the file."""

    schema_version: Literal[1]
    name: str
    gpu: str
    """name of the GPU, as cluster files give it"""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    """day of the last change, YYYY-MM-DD"""
    kind: Literal["measured", "published", "datasheet"]
    """what most of it rests on"""
    like: str | None = None
    """a whole profile, by name or path, of a GPU like this one: what the file lacks is assumed to be as there, by the
    rule of `simulator.config.likeness` [null: nothing is lacking]"""
    sources: dict[str, str]
    """key -> citation: project, file and commit; paper and figure; or card, software and date of a measurement"""
    provenance: Provenance | None = None
    """the machine that was measured by us, if any was"""
    gpu_spec: GpuSpec
    kernels: Kernels
    host: Host
    interference: Interference
    power: Power | None = None
    """None: kernels take in a step what they take alone"""
    transports: dict[str, Transport]
    """how links of a kind carry collectives"""
    residuals: dict[str, Residuals] = Field(default_factory=dict)
    """by class of kernels or transfers, and by group within a class"""

    @property
    def source(self) -> str:
        """All citations in one line."""
        return "; ".join(self.sources.values())

    def cited(self) -> Iterator[tuple[str, Cited]]:
        """Every part with an origin, with its dotted key, in the order of the file."""
        yield from _cited("", self)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key, figure in self.cited():
            if figure.source not in self.sources:
                raise InputError(
                    "is not one of the file's sources",
                    key=f"{key}.source",
                    found=figure.source,
                    allowed=", ".join(self.sources),
                )
        peaks, sustained = self.gpu_spec.peak_flops_per_s, self.kernels.matmul.sustained_flops_per_s
        _need_all("kernels.matmul.sustained_flops_per_s", sustained, peaks)
        _need_all("kernels.matmul.layout_speed", self.kernels.matmul.layout_speed, peaks)
        _need_all("gpu_spec.peak_flops_per_s", peaks, [*sustained, *self.kernels.matmul.fitted_range])
        return self


def load_profile(
    reference: str | Path, *, base: Path | None = None, file: object = None, key: str | None = None
) -> Profile:
    """A profile by shipped name or by path; ``base``, ``file`` and ``key`` say where the reference stands.

    Raises `InputError`.
    """
    return catalog.load("profile", reference, _parsed, base=base, file=file, key=key)


@lru_cache(maxsize=32)
def _parsed(text: str, path: Path) -> Profile:
    data = _mapping(text, path)
    if data.get("like") is not None:
        data = completed(data, _like(data, path).model_dump(exclude_none=True), path)
    return validated(Profile, data, path)


@lru_cache(maxsize=32)
def _mapping(text: str, path: Path) -> Mapping[str, Any]:
    return MappingProxyType(as_mapping(parse_yaml(text, path), path))


class _Short(Section):
    """What has to be right before the rest can be taken over."""

    gpu_spec: GpuSpec
    like: str


def _like(data: Mapping[str, Any], path: Path) -> Profile:
    """The whole profile that ``data``, of the file at ``path``, is completed from."""
    asked = validated(_Short, {key: data.get(key) for key in _Short.model_fields}, path)
    found = catalog.find("profile", asked.like, base=path.parent, file=path, key="like")
    text = read_text(found)
    if _mapping(text, found).get("like") is not None:
        raise InputError("is no whole profile, but like another itself", file=path, key="like", found=asked.like)
    return _parsed(text, found)


def check_gpu(profile: Profile, gpu: str, *, file: object = None, key: str | None = None) -> None:
    """Raise `InputError` where ``profile`` is not one of the cluster's ``gpu``; ``file`` and ``key`` chose it."""
    catalog.check_gpu(
        "profile", profile.name, profile.gpu, gpu, lambda name: load_profile(name).gpu, file=file, key=key
    )


def check_one_vendor(profiles: Mapping[str, Profile], *, file: object = None, key: str | None = None) -> None:
    """Raise `InputError` where ``profiles``, those of the types of GPU that work together, are of several vendors."""
    types: dict[str, list[str]] = {}
    for gpu, profile in profiles.items():
        types.setdefault(profile.gpu_spec.vendor, []).append(gpu)
    if len(types) > 1:
        raise InputError(
            "NCCL and RCCL do not talk to each other: GPUs of one job, and of one collective, are of one vendor",
            file=file,
            key=key,
            found="; ".join(f"{vendor}: {', '.join(of)}" for vendor, of in types.items()),
            fix="nodes of one of them, such as by placement",
        )


def check_precision(profile: Profile, precision: str, *, file: object = None) -> None:
    """Raise `InputError` where the GPU multiplies no matrices of a workload's ``precision``; ``file`` chose it."""
    if precision not in (known := list(profile.gpu_spec.peak_flops_per_s)):
        raise InputError(
            f"{profile.gpu} has no matrix units for it",
            file=file,
            key="training.precision",
            found=precision,
            allowed=", ".join(known),
            fix=f"precision: {known[0]}",
        )


def _need_all(key: str, given: Iterable[str], needed: Iterable[str]) -> None:
    present = list(given)
    missing = [name for name in needed if name not in present]
    if missing:
        raise InputError(f"lacks {', '.join(missing)}", key=key, found=", ".join(present))


def _cited(key: str, node: object) -> Iterator[tuple[str, Cited]]:
    if isinstance(node, Cited):
        yield key, node
    if isinstance(node, BaseModel):
        for name in type(node).model_fields:
            yield from _cited(f"{key}.{name}".lstrip("."), getattr(node, name))
    elif isinstance(node, dict):
        for name, value in node.items():
            yield from _cited(f"{key}.{name}", value)
