"""Recipes of training in 8 or 4 bits: kernels around products, and what is kept.

A new one is a file with a `ProductRecipe`, and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping

from simulator.precisions import (
    te_blockwise,
    te_current,
    te_delayed,
    te_mxfp8,
    te_nvfp4,
    torchao_rowwise,
    torchao_tensorwise,
)
from simulator.precisions.recipe import CastKernel, ProductRecipe
from simulator.precisions.words import SCALES_IN_WORDS, in_words

#: By name.
PRODUCT_RECIPES: Mapping[str, ProductRecipe] = {
    recipe.name: recipe
    for recipe in (
        torchao_tensorwise.RECIPE,
        torchao_rowwise.RECIPE,
        te_delayed.RECIPE,
        te_current.RECIPE,
        te_blockwise.RECIPE,
        te_mxfp8.RECIPE,
        te_nvfp4.RECIPE,
    )
}
#: Those of key ``training.fp8``, and of ``training.fp4``.
FP8_RECIPES = {name: recipe for name, recipe in PRODUCT_RECIPES.items() if recipe.bits == 8}
FP4_RECIPES = {name: recipe for name, recipe in PRODUCT_RECIPES.items() if recipe.bits == 4}

__all__ = [
    "FP4_RECIPES",
    "FP8_RECIPES",
    "PRODUCT_RECIPES",
    "SCALES_IN_WORDS",
    "CastKernel",
    "ProductRecipe",
    "in_words",
]
