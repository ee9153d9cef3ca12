"""Ways to train that a first job has: all weights, adapters, adapters beside four bits, products in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.config.profile import load_profile
from simulator.errors import InputError
from simulator.frameworks import FRAMEWORKS
from simulator.input_files import closest

FULL, LORA, QLORA, FP8 = METHODS = ("full", "lora", "qlora", "fp8")
_ADAPTERS = {"rank": 16, "targets": ["q", "k", "v", "o", "gate", "up", "down"]}
#: Framework -> recipe of products in 8 bits that runs on every GPU with matrix units for them, and its compiler.
_RECIPES = {"megatron_core": ("te_current", False), "torchtitan": ("torchao_tensorwise", True)}


def chosen(name: str, text: str, allowed: Mapping[str, Any] | tuple[str, ...]) -> str:
    """Return an answer that is one of those ``allowed``. Raises `InputError` for any other."""
    if text in allowed:
        return text
    raise InputError(
        "is none of these", file=name, found=text, allowed=", ".join(allowed), fix=closest(text, allowed, likeness=0.5)
    )


def usual_framework(method: str, gpus: int) -> str:
    """Return the framework in which most people train so.

    >>> usual_framework("lora", 64), usual_framework("full", 2), usual_framework("full", 64)
    ('hugging_face', 'hugging_face', 'megatron_core')
    """
    if method in (LORA, QLORA) or (method == FULL and gpus < 8):
        return "hugging_face"
    return "megatron_core"


def usual_length(method: str) -> int:
    """Return a usual number of tokens per sequence: of pre-training, or of fine-tuning."""
    return 2048 if method in (LORA, QLORA) else 4096


def usual_batch(gpus: int) -> int:
    """Return a usual number of sequences of a step, which all GPUs share evenly.

    >>> usual_batch(2), usual_batch(12), usual_batch(64), usual_batch(4096)
    (16, 72, 256, 4096)
    """
    least = min(max(4 * gpus, 64), 1024) if gpus >= 8 else 16
    return -(-least // gpus) * gpus


def training_keys(method: str, framework: str, gpu: str) -> dict[str, Any]:
    """Return keys of the section ``training`` that a method needs on a type of GPU.

    Raises `InputError` where the framework has no products in 8 bits.
    """
    keys: dict[str, Any] = {}
    if "bf16" not in load_profile(gpu).gpu_spec.peak_flops_per_s:
        keys["precision"] = "fp16"
    if method in (LORA, QLORA):
        keys["adapters"] = dict(_ADAPTERS)
    if method == QLORA:
        keys["base"] = "nf4"
    if method == FP8:
        recipe, _ = _RECIPES[chosen("a framework with products in 8 bits", framework, tuple(_RECIPES))]
        keys["fp8"] = recipe
    return keys


def framework_section(method: str, framework: str) -> str | dict[str, Any]:
    """Return the section ``framework``: the name, and a compiler where the method needs one."""
    chosen("framework", framework, FRAMEWORKS)
    compiled = method == FP8 and _RECIPES.get(framework, ("", False))[1]
    return {"name": framework, "compile": True} if compiled else framework
