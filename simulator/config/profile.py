"""Calibration profiles: their files read, completed and chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from simulator.config import catalog
from simulator.config.profile_completion import completed
from simulator.config.section import AsSection, Section, as_data
from simulator.config.training import Training
from simulator.config.validation import validated
from simulator.errors import InputError
from simulator.hardware.figures import Figure
from simulator.hardware.gpu import GpuSpec
from simulator.hardware.kernels import UNSCALED, AttentionModel
from simulator.hardware.profile import Profile
from simulator.input_files import as_mapping, parse_yaml, read_text
from simulator.optimizers import OPTIMIZERS
from simulator.optimizers.update import UpdateRule
from simulator.precisions import SCALES_IN_WORDS, ProductRecipe


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
        data = completed(data, as_data(_like(data, path), nulls=False), partial(_other, path), path)
    return validated(Profile, data, path)


@lru_cache(maxsize=32)
def _mapping(text: str, path: Path) -> Mapping[str, Any]:
    return MappingProxyType(as_mapping(parse_yaml(text, path), path))


class _Start(Section):
    """Keys of a short profile that have to be right before the rest can be taken over."""

    gpu_spec: Annotated[GpuSpec, AsSection()]
    like: str


def _like(data: Mapping[str, Any], path: Path) -> Profile:
    """Return the whole profile that ``data``, of the file at ``path``, is completed from."""
    start = validated(_Start, {key: data.get(key) for key in _Start.model_fields}, path)
    whole = catalog.find("profile", start.like, base=path.parent, file=path, key="like")
    text = read_text(whole)
    if _mapping(text, whole).get("like") is not None:
        raise InputError("is no whole profile, but like another itself", file=path, key="like", found=start.like)
    return _parsed(text, whole)


def _other(path: Path, name: str, key: str) -> Mapping[str, Any]:
    """Return the file of the profile ``name``, which the file at ``path`` has as its ``key``. Raises `InputError`."""
    other = catalog.find("profile", name, base=path.parent, file=path, key=key)
    return _mapping(read_text(other), other)


def load_profiles(names: Mapping[str, str], training: Training) -> dict[str, Profile]:
    """Return the profile of each type of GPU, as kernels of ``training`` run on it.

    ``names``: name or path of the profile of each type. Attention is that of ``training.attention_kernel`` where the
    profile has both. Without ``training.tf32`` products of fp32 run on CUDA cores. Raises `InputError`.
    """
    profiles = {gpu: load_profile(name) for gpu, name in names.items()}
    if training.attention_kernel != "newest":
        profiles = {gpu: _with_attention(profile, training.attention_kernel) for gpu, profile in profiles.items()}
    if not training.tf32:
        profiles = {gpu: _without_tf32(profile) for gpu, profile in profiles.items()}
    return profiles


def _without_tf32(profile: Profile) -> Profile:
    """Return the profile with products of fp32 on CUDA cores.

    Where nobody has measured them they are assumed to reach the share of their peak that TF32's products reach. Their
    operands lie in any order: all layouts are as fast as TF32's forward product.
    """
    rate, spec, matmul = profile.gpu_spec.fp32_flops_per_s, profile.gpu_spec, profile.kernels.matmul
    if rate is None:
        return profile
    sustained, speeds, cores = matmul.sustained_flops_per_s["fp32"], matmul.layout_speed["fp32"], matmul.cuda_cores
    if cores is not None:
        sustained = Figure(value=cores.sustained_flops_per_s, kind=cores.kind, source=cores.source)
        speeds = {
            role: Figure(value=speed, kind=cores.kind, source=cores.source)
            for role, speed in cores.layout_speed.items()
        }
    else:
        sustained = replace(
            sustained,
            value=sustained.value * rate.value / spec.peak_flops_per_s["fp32"].value,
            kind="assumed",
            note="on CUDA cores, the share of the peak that TF32 reaches",
        )
        speeds = {role: replace(speeds["fwd"], kind="assumed") for role in speeds}
    matmul = replace(
        matmul,
        sustained_flops_per_s={**matmul.sustained_flops_per_s, "fp32": sustained},
        layout_speed={**matmul.layout_speed, "fp32": speeds},
    )
    return replace(
        profile,
        gpu_spec=replace(spec, peak_flops_per_s={**spec.peak_flops_per_s, "fp32": rate}),
        kernels=replace(profile.kernels, matmul=matmul),
    )


def older_attention(profile: Profile, kernel: str) -> AttentionModel | None:
    """Return the figures of an older ``kernel`` of attention, None where the profile has none apart."""
    return {"flash2": profile.kernels.attention_flash2, "triton": profile.kernels.attention_triton}[kernel]


def _with_attention(profile: Profile, kernel: str) -> Profile:
    """Return the profile with an older ``kernel``; dropout and biases cost what the newest's do, where unmeasured."""
    newest, older = profile.kernels.attention, older_attention(profile, kernel)
    if older is None:
        return profile
    attention = replace(older, dropout=older.dropout or newest.dropout, bias=older.bias or newest.bias)
    return replace(profile, kernels=replace(profile.kernels, attention=attention))


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
            found="; ".join(f"{vendor}: {', '.join(gpus)}" for vendor, gpus in types.items()),
            fix="nodes of one of them, such as by placement",
        )


def check_recipe(profile: Profile, recipe: ProductRecipe, *, key: str, file: object = None) -> None:
    """Raise `InputError` where the profile prices no products or casts of ``recipe``, which ``file`` has at ``key``."""
    if lacking := _unpriced(profile, recipe):
        priced = (load_profile(name) for name in catalog.names("profile"))
        gpus = ", ".join(dict.fromkeys(other.gpu for other in priced if not _unpriced(other, recipe)))
        raise InputError(
            lacking,
            file=file,
            key=key,
            found=recipe.name,
            allowed=f"{'null, or ' if key == recipe.key else ''}a GPU whose profile prices it: {gpus}",
        )


def _unpriced(profile: Profile, recipe: ProductRecipe) -> str:
    """Return what of ``recipe`` the profile has no price for; an empty text where it has all."""
    if recipe.dtype not in profile.gpu_spec.peak_flops_per_s:
        return f"{profile.gpu} has no matrix units for {recipe.bits} bits, or its profile nothing to price them by"
    if not profile.kernels.memory.fp8:
        return f"profile {profile.name} has no casts into {recipe.bits} bits (kernels.memory.fp8)"
    lacking = sorted({*recipe.products.values()} - {*UNSCALED, *profile.kernels.matmul.scaled})
    if lacking:
        scales = " or ".join(SCALES_IN_WORDS[scaling] for scaling in lacking)
        return f"profile {profile.name} has no speed of products with {scales} (kernels.matmul.scaled)"
    return ""


def has_plain_fp32(profile: Profile) -> bool:
    """Return whether the profile prices products of fp32 that are not TF32's."""
    return not profile.gpu_spec.has_tf32 or profile.gpu_spec.fp32_flops_per_s is not None


def check_attention(profile: Profile, kernel: str, *, file: object = None) -> None:
    """Raise `InputError` where the profile lacks a ``kernel`` of attention; ``file`` chose it.

    FlashAttention 2's may be its newest.
    """
    if kernel == "triton" and older_attention(profile, kernel) is None:
        raise InputError(
            f"the profile {profile.name} has no kernels.attention_triton",
            file=file,
            key="training.attention_kernel",
            found=kernel,
            allowed="newest, flash2",
        )


def check_tf32(profile: Profile, *, file: object = None) -> None:
    """Raise `InputError` where the profile prices products of fp32 as TF32 alone; ``file`` asks for others."""
    if not has_plain_fp32(profile):
        raise InputError(
            f"profile {profile.name} has no speed of fp32 on CUDA cores (gpu_spec.fp32_flops_per_s)",
            file=file,
            key="training.tf32",
            found=False,
            allowed="true",
        )


def check_updater(profile: Profile, rule: UpdateRule, *, key: str, file: object = None) -> None:
    """Raise `InputError` where the profile prices no matrix products of an optimizer; ``file`` chose it at ``key``."""
    if rule.multiplies_in and rule.multiplies_in not in profile.gpu_spec.peak_flops_per_s:
        without_products = [name for name, other in OPTIMIZERS.items() if not other.multiplies_in]
        raise InputError(
            f"its products are in {rule.multiplies_in}, for which {profile.gpu} has no matrix units",
            file=file,
            key=f"{key}.name",
            found=rule.name,
            allowed=", ".join(without_products),
        )


def check_steps(profile: Profile, *, file: object = None) -> None:
    """Raise `InputError` where the profile does not price attention in steps as transformers runs it; ``file`` asks."""
    if not profile.kernels.memory.transformers:
        raise InputError(
            f"profile {profile.name} has no kernels of transformers' attention in steps (kernels.memory.transformers)",
            file=file,
            key="calibration",
            found=profile.name,
            allowed="a profile that has them, such as one that is `like` a shipped one",
        )


def check_precision(profile: Profile, precision: str, *, file: object = None) -> None:
    """Raise `InputError` where the profile prices no products of a workload's ``precision``; ``file`` chose it."""
    if precision not in (types := list(profile.gpu_spec.peak_flops_per_s)):
        raise InputError(
            f"{profile.gpu} has no matrix units for it, or its profile nothing to price them by",
            file=file,
            key="training.precision",
            found=precision,
            allowed=", ".join(types),
            fix=f"precision: {types[0]}",
        )
