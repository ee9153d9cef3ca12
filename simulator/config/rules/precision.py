"""Products in 8 or 4 bits: recipes that a framework lacks, sizes that a recipe does not take, weights gathered so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.errors import Bare, InputError
from simulator.input_files import brief
from simulator.precisions import FP8_RECIPES, PRODUCT_RECIPES, ProductRecipe

if TYPE_CHECKING:
    from simulator.config.workload import Workload

_KEY = "training.fp8"


def problems(workload: Workload) -> Iterator[InputError]:
    """Yield what contradicts the recipe, of the framework or of the training section."""
    training, choice = workload.training, workload.framework
    recipe = training.product_recipe
    if recipe is None:
        return
    section = recipe.key.rpartition(".")[0]
    if training.fp8 and training.fp4:
        yield InputError(
            "a product is in 8 bits or in 4",
            key="training.fp4",
            found=training.fp4.recipe,
            allowed="null, or without training.fp8",
        )
    if choice.name not in recipe.frameworks:
        recipes = [one for one in PRODUCT_RECIPES.values() if one.bits == recipe.bits]
        able = [one.name for one in recipes if choice.name in one.frameworks]
        yield InputError(
            f"{recipe.name} is not simulated with {choice.name}",
            key=recipe.key,
            found=recipe.name,
            allowed=" or ".join(able) if able else "null",
            fix=f"framework: {recipe.frameworks[0]}",
        )
    elif recipe.compiled and not choice.compile:
        yield InputError(
            f"{recipe.name} has the kernels that torch.compile makes; its eager casts are not simulated",
            key="framework.compile",
            found=brief(False),
            allowed="true",
        )
    if training.precision != "bf16":
        yield InputError(
            f"operands in {recipe.bits} bits are cast from bf16",
            key="training.precision",
            found=training.precision,
            allowed="bf16",
        )
    if training.frozen or training.base:
        yield InputError(
            f"products of frozen weights in {recipe.bits} bits are not simulated",
            key="training.adapters" if training.adapters else "training.freeze",
            found=Bare("a section") if training.adapters else list(training.frozen),
            allowed=f"null, or without {section}",
        )
    yield from _size_problems(workload, recipe)


def _size_problems(workload: Workload, recipe: ProductRecipe) -> Iterator[InputError]:
    """Yield sizes that leave no product that the matrix units can work on."""
    model, multiple = workload.model, recipe.multiple
    if model.hidden % multiple:
        yield InputError(
            f"operands of {recipe.name} have rows of a multiple of {multiple} elements",
            key="model.hidden",
            found=model.hidden,
            allowed=f"a multiple of {multiple}",
        )
    if workload.rank_tokens % multiple:
        yield InputError(
            f"{recipe.name} sums over the tokens of a micro-batch, {workload.rank_tokens} on a rank",
            key="training.seq",
            found=workload.training.seq,
            allowed=f"tokens on a rank that are a multiple of {multiple}",
        )


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """Yield weights that cannot be gathered in 8 bits, and weights in fp32 that autocast would cast first."""
    fp8, layout, recipe = workload.training.fp8, workload.parallelism, workload.training.product_recipe
    if recipe is None:
        return
    if workload.software.autocasts(workload.traits):
        yield InputError(
            "torch.autocast casts weights in fp32 that are not sharded first, which is not simulated below 16 bits",
            key="training.optimizer.master_weights",
            found=brief(True),
            allowed="false, or parallelism.zero: 3 on several GPUs",
        )
    if fp8 is None or fp8.gather == "bf16":
        return
    able = [name for name, one in FP8_RECIPES.items() if fp8.gather in one.gathers]
    if fp8.recipe not in able:
        yield InputError(
            f"weights of {fp8.recipe} are gathered in bf16",
            key=f"{_KEY}.gather",
            found=fp8.gather,
            allowed=f"bf16, or recipe: {' or '.join(able)}",
        )
    elif not workload.replication.fully_sharded or layout.shards("dp") == 1 or layout.offload.parameters != "none":
        yield InputError(
            "only weights that fully_shard splits over GPUs are gathered",
            key=f"{_KEY}.gather",
            found=fp8.gather,
            allowed="bf16, or parallelism.zero: 3 on several GPUs",
        )
