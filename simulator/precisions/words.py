"""Recipes described for users, kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from simulator.precisions.recipe import CastKernels, OperandScales, ProductRecipe

_ROLES = {"fwd": "forward", "dgrad": "input gradient", "wgrad": "weight gradient"}
#: How the operands of a product are scaled -> a phrase.
SCALES_IN_WORDS: Mapping[OperandScales, str] = {
    "tensor": "a scale for each tensor",
    "none": "scales that another kernel applies",
    "rows": "a scale for each row",
    "blocks": "a scale for each block of 128",
    "mx": "a scale for every 32 elements",
    "sixteens": "a scale for every 16 elements",
}


def in_words(recipe: ProductRecipe, gather: str = "") -> Iterator[str]:
    """Yield lines on products, casts, what is kept, and weights. ZeRO-3 gathers in type ``gather``.

    The first line is of products.

    >>> from simulator.precisions import FP8_RECIPES
    >>> next(in_words(FP8_RECIPES["torchao_tensorwise"]))
    'products of layers: forward, input gradient, weight gradient with a scale for each tensor'
    """
    by_scale: dict[OperandScales, list[str]] = {}
    for role, scaling in recipe.products.items():
        by_scale.setdefault(scaling, []).append(_ROLES[role])
    products = "; ".join(f"{', '.join(roles)} with {SCALES_IN_WORDS[scaling]}" for scaling, roles in by_scale.items())
    yield f"products of layers: {products}"
    left = ["the projection to the vocabulary", "routers", "attention"] + ([] if recipe.experts else ["experts"])
    yield f"as they are: {', '.join(left)}, and sizes that are no multiple of {recipe.multiple}"
    yield f"inputs: {_kernels(recipe.input_forward)}; again backward: {_kernels(recipe.input_backward)}"
    weights = f"weights: {_kernels(recipe.weight_forward)}; backward: {_kernels(recipe.weight_backward)}"
    yield weights + ("; once a step" if recipe.weights_once else "; for every micro-batch")
    yield f"gradients: {_kernels((*recipe.gradient, *recipe.gradient_again))}"
    for role, kernels in recipe.behind.items():
        yield f"behind the product of the {_ROLES[role]}: {_kernels(kernels)}"
    if recipe.keeps_input_copy:
        yield f"kept: {_bytes(recipe.copy_bytes)} for each element of an input"
    else:
        yield "kept: inputs in bf16; what a norm or an activation makes is made again"
    yield (
        f"copies of weights that stay: {_bytes(recipe.weight_copies * recipe.copy_bytes)} for each element"
        if recipe.weight_copies
        else f"no copies of weights stay{f'; ZeRO-3 gathers them in {gather}' if gather else ''}"
    )


def _bytes(number: float) -> str:
    return f"{number:.3g} {'byte' if number == 1 else 'bytes'}"


def _kernels(kernels: CastKernels) -> str:
    return ", ".join(kernel.name for kernel in kernels) or "nothing"
