"""Precision, optimizer, gradients and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.profile import has_plain_fp32, load_profile
from simulator.errors import InputError
from simulator.input_files import brief

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def problems(workload: Workload) -> Iterator[InputError]:
    """Keys of the training section that contradict each other."""
    training = workload.training
    recompute, optimizer = training.recompute, training.optimizer
    if training.trained_dtype == "fp32" and "master_weights" in optimizer.model_fields_set and optimizer.master_weights:
        yield InputError(
            "fp32 weights have no copy in fp32",
            key="training.optimizer.master_weights",
            found=brief(True),
            allowed="false",
        )
    if recompute.layers is not None and recompute.granularity != "full":
        yield InputError(
            f"has no meaning with granularity {recompute.granularity}",
            key="training.recompute.layers",
            found=recompute.layers,
            fix="granularity: full",
        )
    if training.precision == "fp32" and training.attention_kernel != "newest" and workload.model.attention == "flash":
        yield InputError(
            "FlashAttention has no kernels of fp32, neither its second version nor those in Triton",
            key="training.attention_kernel",
            found=training.attention_kernel,
            allowed="newest, or training.precision: bf16 or fp16",
            fix="attention_kernel: newest",
        )
    yield from _module_problems(workload)
    step = training.global_batch * training.seq
    if training.total_tokens is not None and training.total_tokens < step:
        yield InputError(
            "is less than one step trains on",
            key="training.total_tokens",
            found=brief(training.total_tokens),
            allowed=f">= {step:,}, which is global_batch x seq",
        )
    if _repeated(training.unfused):
        yield InputError(
            "names a part more than once",
            key="training.unfused",
            found=brief(list(training.unfused)),
            allowed="each part once",
            fix=f"unfused: [{', '.join(dict.fromkeys(training.unfused))}]",
        )


def _module_problems(workload: Workload) -> Iterator[InputError]:
    """Modules to recompute that the model does not have."""
    model, recompute = workload.model, workload.training.recompute
    if recompute.modules != ("core_attn",) and recompute.granularity != "selective":
        yield InputError(
            f"has no meaning with granularity {recompute.granularity}",
            key="training.recompute.modules",
            found=list(recompute.modules),
            fix="granularity: selective",
        )
    there = ["core_attn"] if any(kind.attends for kind in model.kinds) else []
    there += ["layernorm"] if model.norm_place != "after" else []
    there += ["mla_up_proj"] if model.mla and there else []
    there += ["mlp"] if model.has_dense_mlps else []
    there += ["moe", "moe_act"] if model.moe else []
    there += ["shared_experts"] if model.moe and model.moe.shared_experts else []
    missing = [module for module in recompute.modules if module not in there]
    if missing and recompute.granularity == "selective" and "modules" not in recompute.model_fields_set:
        modules = f", or modules of {', '.join(there)}" if there else ""
        yield InputError(
            "selective computes core_attn again, of which the model has none: no layer has heads of keys and values",
            key="training.recompute",
            found="selective",
            allowed=f"none or full{modules}",
        )
    elif missing and recompute.granularity == "selective":
        yield InputError(
            "the model has no such modules",
            key="training.recompute.modules",
            found=missing,
            allowed=", ".join(there),
        )


def warnings(workload: Workload) -> Iterator[str]:
    """Yield the meaning of fp32, recomputation that saves nothing, and names that say nothing."""
    if workload.training.precision == "fp32" and workload.training.tf32 and _has_tf32(workload):
        yield (
            "training.precision fp32: matrix products are TF32's, which PyTorch has to be asked for (allow_tf32)"
            + ("; training.tf32=false takes CUDA cores" if _has_fp32(workload) else "")
        )
    recompute = workload.training.recompute
    named = recompute.modules
    if recompute.granularity == "selective" and not named:
        yield "training.recompute.modules is empty: nothing is computed again"
    lists = (
        ("training.recompute.modules", named),
        ("training.freeze", workload.training.freeze or ()),
        ("model.biases", workload.model.biases),
    )
    for key, names in lists:
        if twice := _repeated(names):
            yield f"{key} names {', '.join(twice)} more than once, which counts once"


def _repeated(names: tuple[str, ...]) -> list[str]:
    """Return the names that stand more than once in a list."""
    return sorted({name for name in names if names.count(name) > 1})


def _has_fp32(workload: Workload) -> bool:
    """Return whether the profiles of the job price products of fp32 on CUDA cores, so that TF32 can be turned off."""
    return all(has_plain_fp32(load_profile(workload.calibrations[gpu])) for gpu in workload.gpu_types)


def _has_tf32(workload: Workload) -> bool:
    """Return whether some GPU of the job multiplies fp32 as TF32."""
    return any(load_profile(workload.calibrations[gpu]).gpu_spec.has_tf32 for gpu in workload.gpu_types)
