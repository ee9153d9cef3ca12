"""Recipes of training in 8 bits: kernels around products, and what is kept.

A new one is a file with an `Fp8Recipe`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.precisions import te_blockwise, te_current, te_delayed, te_mxfp8, torchao_rowwise, torchao_tensorwise
from simulator.precisions.recipe import CastKernel, Fp8Recipe
from simulator.precisions.words import SCALES_IN_WORDS, in_words

#: By name.
FP8_RECIPES: Mapping[str, Fp8Recipe] = {
    recipe.name: recipe
    for recipe in (
        torchao_tensorwise.RECIPE,
        torchao_rowwise.RECIPE,
        te_delayed.RECIPE,
        te_current.RECIPE,
        te_blockwise.RECIPE,
        te_mxfp8.RECIPE,
    )
}

__all__ = ["FP8_RECIPES", "SCALES_IN_WORDS", "CastKernel", "Fp8Recipe", "in_words"]
