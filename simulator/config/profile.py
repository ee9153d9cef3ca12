"""A calibration profile: what one kind of GPU, its host and its links do, and where each figure comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from simulator.config import catalog
from simulator.config.figures import Cited, Figure, Fraction, NotNegative, Positive, need_all
from simulator.config.host import Host
from simulator.config.kernels import Kernels, MatrixDtype
from simulator.config.power import Power
from simulator.config.profile_completion import completed
from simulator.config.section import AsTuple, Section, Whole, validated
from simulator.config.transport import Transport
from simulator.errors import InputError
from simulator.input_files import as_mapping, parse_yaml, read_text


class GpuSpec(Section):
    """The GPU itself."""

    vendor: Literal["nvidia", "amd"] = "nvidia"
    """whose: collectives run on its library, NCCL or RCCL, and these do not talk to each other"""
    sms: Annotated[Whole, Field(gt=0)]
    """streaming multiprocessors"""
    threads_per_sm: Annotated[Whole, Field(gt=0)] = 2048
    """resident at most: 1536 on GPUs of compute capability 8.6, 8.9 and 12.0, 1024 on 7.5 (CUDA C++ Programming Guide,
    table of technical specifications)"""
    peak_flops_per_s: dict[MatrixDtype, Figure]
    """dense matrix FLOP/s by type; fp32 is TF32"""
    memory_bandwidth_Bps: Figure
    """bytes/s of the device memory"""
    memory_bytes: Figure
    """what the device reports, not the GB on its label"""
    blas_workspace_bytes: Annotated[int, Field(ge=0)] = 8_519_680
    """what PyTorch's allocator keeps for products of one thread: 32 MiB on GPUs of compute capability 9 and 10, 128 MiB
    on gfx94, else as given (aten/src/ATen/cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``)"""


class MemorySpeeds(Cited):
    """Of kernels that memory bounds, relative to what they reach alone."""

    norm: Fraction
    """bound by arithmetic too"""
    other: Fraction


class MemoryShares(Cited):
    """Share of its memory's time that kernels of each class leave to communication."""

    matmul: Fraction
    attention: Fraction
    norm: Fraction
    other: Fraction


class Held(Section):
    """SMs that NCCL's kernels hold."""

    collective: Annotated[Whole, Field(ge=0)]
    """0: not known, and communication takes nothing from kernels"""
    p2p: Annotated[Whole, Field(ge=0)]
    """by sends and receives alone"""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if self.p2p and not self.collective:
            raise InputError(
                "sends and receives hold SMs where collectives hold none",
                key="interference.sms.p2p",
                found=self.p2p,
                allowed="0, as interference.sms.collective is",
                fix="collective: 24, what they hold of an H100, or p2p: 0: communication takes nothing from kernels",
            )
        return self


class Interference(Cited):
    """What NCCL's kernels take from others on their GPU, waiting for their peers or moving bytes."""

    sms: Held
    """streaming multiprocessors that it holds, a thread block each for NCCL's channels"""
    matmul_sms: Annotated[Whole, Field(ge=0)]
    """those that matrix products lose: their thread blocks run in clusters of two, which need two free neighbours"""
    memory_speed: MemorySpeeds
    """while bytes move"""
    waiting_speed: MemorySpeeds
    """while peers are waited for"""
    leaves: MemoryShares
    """what kernels leave to communication, which is slowed where it would take more; 1: all"""


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
    host_forward_s: Positive | None = None
    host_backward_s: Positive | None = None
    """what the host whose costs ``host`` holds took for the probe beside them, the forward and backward passes of a
    small model (`calibration.narrow.PROBE`): how fast it was"""


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
    rule of `simulator.config.profile_completion` [null: nothing is lacking]"""
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
    def _leaves_sms(self) -> Self:
        """Whatever communication holds, kernels have an SM left."""
        sms, held = self.gpu_spec.sms, self.interference.sms
        for key, number in (
            ("sms.collective", held.collective),
            ("sms.p2p", held.p2p),
            ("matmul_sms", self.interference.matmul_sms),
        ):
            if number and number >= sms:
                allowed = f"less than gpu_spec.sms, {sms}"
                raise InputError("as many SMs as there are", key=f"interference.{key}", found=number, allowed=allowed)
        return self

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
        need_all("kernels.matmul.sustained_flops_per_s", sustained, peaks)
        need_all("kernels.matmul.layout_speed", self.kernels.matmul.layout_speed, peaks)
        need_all("gpu_spec.peak_flops_per_s", peaks, [*sustained, *self.kernels.matmul.fitted_range])
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


def load_profiles(names: Mapping[str, str], attention_kernel: str) -> dict[str, Profile]:
    """Type of GPU -> the profile of that name or path, whose attention is that of ``attention_kernel`` (newest, flash2)
    where it has both. Raises `InputError`."""
    profiles = {gpu: load_profile(name) for gpu, name in names.items()}
    if attention_kernel == "newest":
        return profiles
    return {gpu: _with_older_attention(profile) for gpu, profile in profiles.items()}


def _with_older_attention(profile: Profile) -> Profile:
    older = profile.kernels.attention_flash2
    if older is None:
        return profile
    return profile.model_copy(update={"kernels": profile.kernels.model_copy(update={"attention": older})})


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
    """Raise `InputError` where the profile prices no products of a workload's ``precision``; ``file`` chose it."""
    if precision not in (known := list(profile.gpu_spec.peak_flops_per_s)):
        raise InputError(
            f"{profile.gpu} has no matrix units for it, or its profile nothing to price them by",
            file=file,
            key="training.precision",
            found=precision,
            allowed=", ".join(known),
            fix=f"precision: {known[0]}",
        )


def _cited(key: str, node: object) -> Iterator[tuple[str, Cited]]:
    if isinstance(node, Cited):
        yield key, node
    if isinstance(node, BaseModel):
        for name in type(node).model_fields:
            yield from _cited(f"{key}.{name}".lstrip("."), getattr(node, name))
    elif isinstance(node, dict):
        for name, value in node.items():
            yield from _cited(f"{key}.{name}", value)
