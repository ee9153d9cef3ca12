"""The training section of a workload file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from simulator.adapters import ADAPTERS
from simulator.bounds import Text
from simulator.config.section import AsTuple, Integral, Section, ShortSection
from simulator.config.sizes import Size
from simulator.config.updaters import Dtype, Optimizer
from simulator.frameworks.framework import UnfusedPart
from simulator.input_files import closest
from simulator.losses import LOSSES
from simulator.precisions import FP4_RECIPES, FP8_RECIPES, PRODUCT_RECIPES, ProductRecipe


def _without_recipe(value: object) -> object:
    recipes = {"fp8": FP8_RECIPES, "fp4": FP4_RECIPES}.get(str(value))
    if recipes:
        raise PydanticCustomError(
            "recipe",
            "says nothing of casts and scales: write precision: bf16, which all but products is in, and "
            f"{value}: {' or '.join(recipes)}",
        )
    return value


#: Of weights and activations: products in 8 or 4 bits are said by a recipe.
Precision = Annotated[Dtype, BeforeValidator(_without_recipe)]


Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


class Recompute(ShortSection):
    """Activations that are computed again in the backward pass. A plain text means `granularity`."""

    text_means: ClassVar[str] = "granularity"

    granularity: Literal["none", "selective", "ops", "full"] = "none"
    """selective: what `modules` names; ops: all but attention, every second product and what other ranks sent, as
    torchtitan's selective "op" (experts' grouped products again); full: whole layers [none]"""
    modules: Annotated[tuple[Module, ...], AsTuple] = ("core_attn",)
    """selective: core_attn (between the attention's two products), layernorm (both norms of a layer), mla_up_proj (from
    latent attention's compressed forms to queries, keys and values), mlp (of dense layers), moe (all of it), moe_act
    (the experts' activation), shared_experts; Megatron-LM's --recompute-modules [core_attn]"""
    layers: Size | None = None
    """full: only the first so many layers of each stage [null: all]"""


Target = Literal["q", "k", "v", "qkv", "o", "q_down", "q_up", "kv_down", "kv_up", "gate", "up", "gate_up", "down"]


if TYPE_CHECKING:
    AdapterMethod = str
    LossName = str
    RecipeName = str
    Fp4RecipeName = str
else:
    # What is listed, so that a new kind of adapters, a new loss, or a new recipe, needs no line here.
    AdapterMethod = Literal[tuple(ADAPTERS)]
    LossName = Literal[tuple(LOSSES)]
    RecipeName = Literal[tuple(FP8_RECIPES)]
    Fp4RecipeName = Literal[tuple(FP4_RECIPES)]


class Adapters(Section):
    """Thin trained matrices beside frozen products: y = x W + (x A) B."""

    rank: Size
    """columns of A, which are rows of B"""
    targets: Annotated[tuple[Target, ...], AsTuple, Field(min_length=1)]
    """products that have an adapter: q, k, v, o, gate, up, down, of which the model has what it has; qkv and gate_up:
    one for products that a framework has side by side in one (Megatron-LM's linear_qkv and linear_fc1); of latent
    attention q_down, q_up, kv_down, kv_up; of experts the shared ones alone"""
    dtype: Dtype | None = None
    """of A and B [null: the precision]"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """probability, of each adapter's input [0]"""
    method: AdapterMethod = "lora"
    """dora: the magnitude of every column is trained apart [lora]"""

    @model_validator(mode="before")
    @classmethod
    def _scaled(cls, data: object) -> object:
        """The factor of what an adapter gives changes neither time nor memory."""
        if isinstance(data, Mapping) and (named := next((key for key in data if key in _SCALES), None)):
            raise PydanticCustomError("alpha", f"{named} changes neither time nor memory: leave it out")
        return data


_SCALES = ("alpha", "lora_alpha", "scale", "scaling", "use_rslora")
#: Kinds of weights that may be frozen.
FREEZABLE = ("embedding", "head", "norms", "layers", "attention", "mlp", "experts", "router")
#: All of them.
EVERYTHING = ("embedding", "head", "norms", "layers")


def _freezable(value: str) -> str:
    layers = re.fullmatch(r"layers (\d+)-(\d+)", value)
    if value in FREEZABLE or (layers and int(layers[1]) <= int(layers[2])):
        return value
    if layers:
        message = "the first layer comes after the last"
        raise PydanticCustomError("freezable", message, {"fix": f"layers {layers[2]}-{layers[1]}"})
    one = re.fullmatch(r"layers? (\d+)", value)
    message = f"is none of {', '.join(FREEZABLE)}, nor such as 'layers 0-15'"
    near = f"layers {one[1]}-{one[1]}" if one else closest(value, FREEZABLE)
    raise PydanticCustomError("freezable", message, {"fix": near})


class LossChoice(ShortSection):
    """How projection to the vocabulary and cross-entropy are computed. A plain text means `name`."""

    text_means: ClassVar[str] = "name"

    name: LossName = "eager"
    """eager: in fp32, of logits in fp32; eager_narrow: of logits as they are, outside of autocast; compiled: logits in
    fp32 are never written; chunked: eager or compiled, for chunks of tokens, as in torchtune; fused: Apex's kernels, a
    pass each way; te_fused: Transformer Engine's, which write gradients over logits in the forward pass; fused_linear:
    Liger's, with gradients in the forward pass; vocab_parallel: Megatron's, in place, over a vocabulary that may be
    split [the framework's: vocab_parallel for megatron_core and deepspeed, compiled under torch.compile, else eager]"""
    chunks: Size = 8
    """chunked: into how many the tokens are cut [8]"""
    recompute: bool = False
    """chunked: projection and loss of a chunk are computed again in the backward pass, as in TRL [false]"""
    compile: bool = False
    """chunked: the loss of a chunk is compiled [the framework's: true where pytorch is]"""
    metrics: Annotated[int, Field(ge=0, le=100), Integral] = 0
    """how often the cross-entropy of each micro-batch is computed once more, eagerly and without gradients, for figures
    of the training: two in llm-foundry, whose Composer has train metrics [0]"""


class Fp8(ShortSection):
    """Products of layers in 8 bits. A plain text means `recipe`."""

    text_means: ClassVar[str] = "recipe"

    recipe: RecipeName
    """whose casts and scales, and what they are of: `llmsim list recipes`"""
    gather: Literal["bf16", "fp8"] = "bf16"
    """zero 3: what weights of these products are gathered in [bf16]"""


class Fp4(ShortSection):
    """Products of layers in 4 bits. A plain text means `recipe`."""

    text_means: ClassVar[str] = "recipe"

    recipe: Fp4RecipeName
    """whose casts and scales, and what they are of: `llmsim list recipes`"""


class Training(Section):
    """How the model is trained."""

    seq: Size
    """tokens per sequence"""
    micro_batch: Size = 1
    """sequences per micro-batch per data-parallel replica [1]"""
    global_batch: Size
    """sequences per step; micro-batches = global_batch / (micro_batch * dp)"""
    precision: Precision = "bf16"
    """of weights and activations [bf16]"""
    tf32: bool = True
    """products in fp32 run on matrix units as TF32, which PyTorch has to be asked for (allow_tf32); false: on CUDA
    cores, at the share of their peak that TF32's products reach of theirs, which is assumed [true]"""
    fp8: Fp8 | None = None
    """a recipe, or {recipe, gather}: which products of layers are in 8 bits, and how operands are cast; the projection
    to the vocabulary, routers and attention stay in the precision [null: none]"""
    fp4: Fp4 | None = None
    """a recipe: which products of layers are in 4 bits, in place of fp8 [null: none]"""
    optimizer: Optimizer = Optimizer()
    grad_dtype: Dtype = "fp32"
    """what gradients are accumulated and reduced in [fp32; of hugging_face the precision, but for
    autocast]"""
    grad_clip: float | None = Field(default=None, gt=0)
    """norm clipping: a small all-reduce over all model-parallel ranks [null: none]"""
    recompute: Recompute = Recompute()
    """none, selective, full, ops, or {granularity, layers, modules} [none]"""
    loss: LossChoice = LossChoice()
    """a name, or {name, chunks, recompute}: how the cross-entropy is computed [the framework's]"""
    gradient_accumulation_fusion: bool = False
    """the product that makes a weight gradient adds it to the buffer, as Megatron-LM does with Apex of March 2022 and
    later; false: one more pass over the gradients per micro-batch [the framework's: true for megatron_core]"""
    attention_kernel: Literal["newest", "flash2", "triton"] = "newest"
    """of attention: flash: the newest that the profile has (cuDNN's on Hopper), or FlashAttention 2's, which PyTorch's
    scaled_dot_product_attention took there too before it preferred cuDNN's; triton: FlashAttention's first in Triton,
    of 2022, as llm-foundry's `attn_impl: triton`; neither has kernels of fp32 [newest]"""
    fused_rms_norm: bool = True
    """RMSNorm is a kernel each way (PyTorch from 2.9 on, Triton's, Apex's); false: operation by operation, as PyTorch's
    before and the modules of Meta's and Hugging Face's Llama, where nothing is compiled [the framework's: true but for
    pytorch before 2.9 and eager hugging_face]"""
    fused_permutation: bool = True
    """tokens are put in the order of experts, and back, by a kernel each way (Megatron-Core with --moe-permute-fusion,
    as recipes of Megatron-Bridge have it); false: by PyTorch's own kernels, Megatron-Core's default, with atomic
    additions [the framework's: true but for megatron_core_local with experts]"""
    unfused: Annotated[tuple[UnfusedPart, ...], AsTuple] = ()
    """parts that Megatron-Core could run as one, by PyTorch's kernels one by one: qkv_bias (of linear
    layers before Transformer Engine), rotation (rotary positions without apply_rope_fusion), router (experts' without
    --moe-router-fusion, Megatron-LM's default) [none]"""
    keep_gradients: bool = False
    """gradients of a micro-batch, once added to the buffer, stay in the working precision until the next backward pass,
    as in DeepSpeed's BF16_Optimizer (``update_hp_grads(clear_lp_grads=False)``) [the framework's: true for deepspeed in
    bf16 with gradients in fp32, zero 0 and 1]"""
    adapters: Adapters | None = None
    """what is trained beside frozen products [null: none]"""
    freeze: Annotated[tuple[Annotated[Text, AfterValidator(_freezable)], ...], AsTuple] | None = None
    """kinds of weights that are not trained: embedding, head (the projection to the vocabulary), norms, layers, or in
    layers attention, mlp, experts, router; 'layers 0-15': all of the first 16 layers [null: none; with adapters all]"""
    base: Literal["bf16", "nf4"] | None = None
    """what frozen products of layers are stored in: nf4 as in QLoRA, with double quantisation, made whole before each
    product by bitsandbytes' kernels [null: the precision]"""
    total_tokens: float | None = Field(default=None, gt=0, le=1e18)
    """of the whole run; gives days, GPU-hours and, with a price, cost [null]"""

    @property
    def frozen(self) -> tuple[str, ...]:
        """Kinds of weights that are not trained."""
        return self.freeze if self.freeze is not None else EVERYTHING if self.adapters else ()

    @property
    def product_recipe(self) -> ProductRecipe | None:
        """Recipe of products in 8 or 4 bits."""
        choice = self.fp8 or self.fp4
        return PRODUCT_RECIPES[choice.recipe] if choice else None

    @property
    def trained_dtype(self) -> str:
        """Type of the weights that are trained."""
        return (self.adapters and self.adapters.dtype) or self.precision
