"""Ways to train that a first job has: all weights, adapters, adapters beside four bits, products in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.config import load_workload
from simulator.config.model import Model
from simulator.config.profile import load_profile
from simulator.config.rules.tuning import TOGETHER
from simulator.errors import InputError
from simulator.frameworks import FRAMEWORKS
from simulator.input_files import closest
from simulator.precisions import FP8_RECIPES, ProductRecipe

FULL = "full"
#: Recipes of products in 8 bits that run on every GPU with matrix units for them.
_RECIPES = ("te_current", "torchao_tensorwise")


@dataclass(frozen=True)
class Method:
    """A way to train. ``seq``: its usual tokens per sequence, of pre-training or of fine-tuning.

    ``adapters``: thin trained matrices stand beside frozen products. ``base``: in what these are frozen; None: as they
    are.
    ``fp8``: products are in 8 bits. ``few_gpus``: below so many GPUs most people train so in Hugging Face's Trainer.
    """

    name: str
    seq: int
    few_gpus: float
    adapters: bool = False
    base: str | None = None
    fp8: bool = False


_RANK = 16
#: By name.
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(FULL, seq=4096, few_gpus=8),
        Method("lora", seq=2048, few_gpus=math.inf, adapters=True),
        Method("qlora", seq=2048, few_gpus=math.inf, adapters=True, base="nf4"),
        Method("fp8", seq=4096, few_gpus=0, fp8=True),
    )
}


def chosen(name: str, text: str, allowed: Collection[str]) -> str:
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
    return "hugging_face" if gpus < METHODS[method].few_gpus else "megatron_core"


def usual_batch(gpus: int) -> int:
    """Return a usual number of sequences of a step, which all GPUs share evenly.

    >>> usual_batch(2), usual_batch(12), usual_batch(64), usual_batch(4096)
    (16, 72, 256, 4096)
    """
    least = min(max(4 * gpus, 64), 1024) if gpus >= 8 else 16
    return -(-least // gpus) * gpus


def training_keys(method: str, framework: str, gpu: str) -> dict[str, Any]:
    """Return keys of the section ``training`` that a method needs on a type of GPU, whatever the model.

    Raises `InputError` where the framework has no products in 8 bits.
    """
    keys: dict[str, Any] = {}
    if "bf16" not in load_profile(gpu).gpu_spec.peak_flops_per_s:
        keys["precision"] = "fp16"
    if METHODS[method].fp8:
        keys["fp8"] = _recipe(framework).name
    return keys


def adapter_keys(method: str, model: Model) -> dict[str, Any]:
    """Return keys of the section ``training`` for adapters beside every product of a model; none of other methods."""
    way = METHODS[method]
    if not way.adapters:
        return {}
    products = dict.fromkeys(name for layer in range(model.layers) for name in model.targets(layer))
    targets = [name for name in products if name not in TOGETHER]
    base = {} if way.base is None else {"base": way.base}
    return {"adapters": {"rank": _RANK, "targets": targets}, **base}


def weight_keys(method: str, framework: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of the section ``training`` by which all weights are trained in fp32, as Trainer's bf16=True does it.

    No keys where the framework keeps such weights anyway, where adapters are trained, and where the job of these
    ``data`` is not simulated so.
    """
    if FRAMEWORKS[framework].master_weights or METHODS[method].adapters:
        return {}
    keys = {"optimizer": {"master_weights": True}}
    try:
        load_workload({**data, "training": {**data["training"], **keys}})
    except InputError:
        return {}
    return keys


def framework_section(method: str, framework: str) -> str | dict[str, Any]:
    """Return the section ``framework``: the name, and a compiler where the method needs one. Raises `InputError`."""
    chosen("framework", framework, FRAMEWORKS)
    compiled = METHODS[method].fp8 and _recipe(framework).compiled
    return {"name": framework, "compile": True} if compiled else framework


def _recipe(framework: str) -> ProductRecipe:
    """Return the recipe of products in 8 bits that a framework has. Raises `InputError` where it has none."""
    recipes = {name: FP8_RECIPES[recipe] for recipe in _RECIPES for name in FP8_RECIPES[recipe].frameworks}
    return recipes[chosen("a framework with products in 8 bits", framework, recipes)]
