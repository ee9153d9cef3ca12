"""The model section of a workload file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from simulator.config.presets import presets
from simulator.config.section import AsTuple, Integral, Section

Size = Annotated[int, Field(ge=1, le=1_000_000_000), Integral]
Share = Annotated[float, Field(ge=0, le=1e30)]
Number = Annotated[int, Field(ge=0, le=1_000_000_000), Integral]


class Skew(Section):
    """Experts of unequal popularity."""

    skew: float = Field(ge=0, le=20)
    """the i-th most popular expert is chosen in proportion to i^-skew (Zipf's law), but by no token twice; which
    experts these are follows from the workload's seed, and is the same in every layer"""


def _form(value: object) -> str:
    """Return the member of the union of token distributions that a value means."""
    if isinstance(value, list | tuple):
        return "list"
    return "Skew" if isinstance(value, Mapping | Skew) else "text"


TokenDistribution = Annotated[
    Annotated[Literal["balanced"], Tag("text")]
    | Annotated[Skew, Tag("Skew")]
    | Annotated[tuple[Share, ...], AsTuple, Tag("list")],
    Discriminator(_form),
]


class Moe(Section):
    """Layers whose MLP is a mixture of experts."""

    experts: Annotated[int, Field(ge=1, le=100_000), Integral]
    """routed experts of a layer"""
    top_k: Size
    """experts that each token is sent to"""
    ffn_hidden: Size
    """width inside an expert"""
    shared_experts: Number = 0
    """experts that every token passes through, each as wide as a routed one [0]"""
    shared_ffn_hidden: Number = Field(default_factory=lambda section: section["shared_experts"] * section["ffn_hidden"])
    """width of all shared experts together [shared_experts * ffn_hidden]"""
    first_dense_layers: Number = 0
    """so many layers at the model's beginning have a dense MLP of model.ffn_hidden [0]"""
    every: Size = 1
    """after those, one layer in so many has experts, the first of them to begin with; the others are dense [1]"""
    capacity_factor: float | None = Field(default=None, gt=0, le=1e6)
    """an expert takes ceil(factor * tokens * top_k / experts) of a rank's tokens, drops others [null: takes all]"""
    pad_to_capacity: bool = True
    """with a capacity factor, experts always work on that number (GShard); false: on the tokens that they got [true]"""
    token_distribution: TokenDistribution = "balanced"
    """balanced, {skew: s}, or how popular each expert is, as a list of `experts` numbers [balanced]"""
    node_limit: Size | None = None
    """tokens go to experts on at most so many nodes, once over the network to each, and on to its GPUs over NVLink
    [null: every copy of a token travels by itself]"""
    redundant_experts: Number = 0
    """copies of the busiest experts, so that experts + redundant_experts divide by ep [0]"""
    router_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """of the router's product [fp32; of hugging_face the precision]"""

    def here(self, layer: int) -> bool:
        """Return whether layer ``layer``, counted from 0, has experts.

        >>> moe = Moe(experts=8, top_k=2, ffn_hidden=8, first_dense_layers=1, every=2)
        >>> [layer for layer in range(6) if moe.here(layer)]
        [1, 3, 5]
        """
        return layer >= self.first_dense_layers and (layer - self.first_dense_layers) % self.every == 0


class Mla(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), named as in DeepSeek's config.json."""

    q_lora_rank: Size | None = None
    """width that queries are compressed to [null: not compressed]"""
    kv_lora_rank: Size
    """width that keys and values are compressed to"""
    qk_nope_head_dim: Size
    """part of a query's and key's head without position"""
    qk_rope_head_dim: Size
    """part with rotary position; of keys one for all heads"""
    v_head_dim: Size
    """width of a value's head"""


class Model(Section):
    """A transformer. `preset` or `hf_config` may stand in a file for these keys; keys beside them win."""

    layers: Annotated[int, Field(ge=1, le=10_000), Integral]
    """transformer layers"""
    hidden: Size
    """width of the residual stream"""
    heads: Size
    """query heads"""
    kv_heads: Size = Field(default_factory=lambda section: section["heads"])
    """key and value heads [heads]"""
    head_dim: Size = Field(default_factory=lambda section: max(1, section["hidden"] // section["heads"]))
    """width of a head [hidden / heads]"""
    ffn_hidden: Size = Field(default_factory=lambda section: 4 * section["hidden"])
    """width inside the MLP [4 * hidden]"""
    vocab: Size
    """tokens of the vocabulary"""
    vocab_multiple: Size = 128
    """the vocabulary is padded to a multiple of this times tp [128; 1 of hugging_face]"""
    activation: Literal["gelu", "swiglu", "geglu", "relu"] = "gelu"
    """of the MLP; swiglu and geglu have a third matrix [gelu]"""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """[layernorm]"""
    position: Literal["learned", "rope", "none"] = "learned"
    """position embedding [learned]"""
    bias: bool = True
    """whether linear layers have biases [true]"""
    tied_embeddings: bool = True
    """whether the vocabulary projection shares the embedding's weight [true]"""
    attention: Literal["flash", "unfused"] = "flash"
    """one fused kernel, or batched products with the s x s scores in memory [flash]"""
    qk_norm: bool = False
    """each head of queries and keys passes through a norm of its own before its position, as in Qwen3 [false]"""
    sliding_window: Size | None = None
    """tokens that a token attends to, itself among them; null: all before it [null]"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """probability, of attention and of both residual branches [0]"""
    moe: Moe | None = None
    """experts in place of the MLP [null: none]"""
    mla: Mla | None = None
    """latent attention in place of heads of head_dim [null: none]"""
    mtp_layers: Annotated[int, Field(ge=0, le=100), Integral] = 0
    """multi-token prediction: so many more layers, each with the loss of one more token ahead, on the last stage [0]"""

    @property
    def qk_head_dim(self) -> int:
        """Width of a head of queries and keys."""
        return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def v_head_dim(self) -> int:
        """Width of a head of values."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    def targets(self, layer: int) -> tuple[str, ...]:
        """Return the names of the products of ``layer`` that may have adapters; the first layer is 0.

        >>> sizes = dict(layers=1, hidden=8, heads=1, vocab=8)
        >>> Model(activation="swiglu", **sizes).targets(0)
        ('q', 'k', 'v', 'qkv', 'o', 'gate', 'up', 'gate_up', 'down')
        """
        names: tuple[str, ...] = ("q", "k", "v", "qkv", "o")
        if self.mla is not None:
            names = (*(("q_down", "q_up") if self.mla.q_lora_rank else ("q",)), "kv_down", "kv_up", "o")
        if self.moe is not None and self.moe.here(layer) and not self.moe.shared_experts:
            return names
        gated = self.activation in ("swiglu", "geglu")
        return (*names, *(("gate", "up", "gate_up", "down") if gated else ("up", "down")))

    @property
    def table_at_both_ends(self) -> bool:
        """The last stage works with the embedding table too."""
        return self.tied_embeddings or self.mtp_layers > 0

    def window(self, seq: int) -> int:
        """Tokens of a sequence that a token attends to at most; 0 where no window bounds them."""
        window = self.sliding_window
        return window if window is not None and window < seq else 0

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding table: `vocab`, padded once to a multiple of `vocab_multiple` * tp.

        >>> sizes = dict(layers=1, hidden=8, heads=1)
        >>> Model(vocab=151552, **sizes).padded_vocab(6), Model(vocab=32000, **sizes).padded_vocab(2)
        (152064, 32000)
        """
        multiple = self.vocab_multiple * tp
        return math.ceil(self.vocab / multiple) * multiple

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of what stands in a file, where a preset or a config.json can give the sizes."""
        schema = handler.resolve_ref_schema(handler(core))
        sizes = schema.pop("required")
        schema["properties"] |= {
            "preset": {"enum": list(presets()), "description": "a shipped model"},
            "hf_config": {"type": "string", "description": "path of a Hugging Face config.json"},
        }
        schema["oneOf"] = [{"required": ["preset"]}, {"required": ["hf_config"]}, {"required": sizes}]
        schema["oneOf"][2] |= {"not": {"anyOf": schema["oneOf"][:2]}}
        return schema
