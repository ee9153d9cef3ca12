"""The model section of a workload file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Discriminator, Field, GetJsonSchemaHandler, PrivateAttr, Tag
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from simulator.bounds import MAX_LAYERS, Text
from simulator.captured import CapturedModel
from simulator.config.captured_file import read_captured
from simulator.config.encoder import Encoder
from simulator.config.model_sections import InheritedKeys, LayerInputs, Mla, ReusedKeys, WindowHeads
from simulator.config.presets import presets
from simulator.config.section import AsSection, AsTuple, Integral, Section
from simulator.config.sizes import Number, Size
from simulator.mixers import MIXERS, GatedDelta, Indexer, KimiDelta, Mamba2, Mixer, SharedKey

Share = Annotated[float, Field(ge=0, le=1e30)]
if TYPE_CHECKING:
    MixerName = str
else:
    MixerName = Literal[tuple(MIXERS)]
MlpKind = Literal["dense", "moe", "none"]
_Kind = TypeVar("_Kind", bound=str)
#: Linear layers that can have biases. ``o`` is the output of attention, ``mlp`` both layers of an MLP or of shared
#: experts, ``head`` the projection to the vocabulary.
BiasPlace = Literal["qkv", "o", "mlp", "experts", "router", "head"]
#: Those that `bias` means.
BIASES: tuple[BiasPlace, ...] = ("qkv", "o", "mlp", "experts")


def _entry(pattern: tuple[_Kind, ...], layer: int, layers: int) -> _Kind:
    """Return the entry of a ``pattern`` for a layer; after the last of ``layers`` that one's."""
    return pattern[min(layer, layers - 1) % len(pattern)]


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
    shared_gate: bool = False
    """the output of shared experts is weighed by a gate, which is a number for each token (Qwen2-MoE) [false]"""
    beside_dense: bool = False
    """layers with experts have a dense MLP of model.ffn_hidden beside them, with norms of its own (Gemma 4) [false]"""
    redundant_experts: Number = 0
    """copies of the busiest experts, so that experts + redundant_experts divide by ep [0]"""
    router_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """of the router's product [fp32; of hugging_face the precision]"""
    balancing_loss: bool = False
    """a loss balances experts, of a micro-batch or of each sequence (Megatron-Core's --moe-aux-loss-coeff above 0 with
    --moe-router-load-balancing-type aux_loss or seq_aux_loss) [false]"""

    def here(self, layer: int) -> bool:
        """Return whether layer ``layer``, counted from 0, has experts.

        >>> moe = Moe(experts=8, top_k=2, ffn_hidden=8, first_dense_layers=1, every=2)
        >>> [layer for layer in range(6) if moe.here(layer)]
        [1, 3, 5]
        """
        return layer >= self.first_dense_layers and (layer - self.first_dense_layers) % self.every == 0


class Heads(NamedTuple):
    """Heads of a layer's attention, and their widths."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


class KeysSeen(NamedTuple):
    """Bounds of what a query sees of a sequence: the last ``window`` tokens, or those of its ``chunk``; 0: none."""

    window: int
    chunk: int


class Model(Section):
    """A transformer. `preset` or `hf_config` may stand in a file for these keys; keys beside them win."""

    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS), Integral]
    """transformer layers"""
    hidden: Size
    """width of the residual stream"""
    heads: Size
    """query heads"""
    kv_heads: Size = Field(default_factory=lambda section: section["heads"])
    """key and value heads [heads]"""
    head_dim: Size = Field(default_factory=lambda section: max(1, section["hidden"] // section["heads"]))
    """width of a head [hidden / heads]"""
    v_head_dim: Size = Field(default_factory=lambda section: section["head_dim"])
    """width of a head of values [head_dim]"""
    ffn_hidden: Size = Field(default_factory=lambda section: 4 * section["hidden"])
    """width inside the MLP [4 * hidden]"""
    vocab: Size
    """tokens of the vocabulary"""
    vocab_multiple: Size = 128
    """the vocabulary is padded to a multiple of this times tp [128; 1 of hugging_face]"""
    activation: Literal["gelu", "swiglu", "geglu", "relu", "relu2"] = "gelu"
    """of the MLP; swiglu and geglu have a third matrix, relu2 squares [gelu]"""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """[layernorm]"""
    norm_place: Literal["before", "after", "both"] = "before"
    """where norms of attention and MLP stand: before it, on its output (OLMo 2), or both (Gemma 2) [before]"""
    position: Literal["learned", "rope", "none"] = "learned"
    """position embedding [learned]"""
    bias: bool = True
    """whether linear layers have biases [true]"""
    biases: Annotated[tuple[BiasPlace, ...], AsTuple] = Field(
        default_factory=lambda section: BIASES if section["bias"] else ()
    )
    """which linear layers have some, in place of `bias`: a list of qkv, o, mlp, experts, router, head
    [all but router and head, or none]"""
    joined_products: bool = False
    """queries, keys and values come from one product, and gate and up from another, as in Phi-3; frameworks whose own
    layers join them do so for all models [false]"""
    tied_embeddings: bool = True
    """whether the vocabulary projection shares the embedding's weight [true]"""
    attention: Literal["flash", "unfused"] = "flash"
    """one fused kernel, or batched products with the s x s scores in memory [flash]"""
    qk_norm: bool = False
    """each head of queries and keys passes through a norm of its own before its position, as in Qwen3 [false]"""
    qk_norm_kind: Literal["head", "width", "unweighted"] = "head"
    """with qk_norm: over each head, over the width of all heads (OLMo 2), or over each without weights (Llama 4)
    [head]"""
    mixers: Annotated[tuple[MixerName, ...], AsTuple, Field(min_length=1)] | None = None
    """how tokens act on each other, layer by layer; a shorter list begins anew
    [attention; window with sliding_window; sparse with indexer]"""
    mlps: Annotated[tuple[MlpKind, ...], AsTuple, Field(min_length=1)] | None = None
    """which layers have a dense MLP, experts or neither, as a list like mixers [dense, or as moe says]"""
    sliding_window: Size | None = None
    """tokens that a token attends to in layers with a window, itself among them; null: all before it [null]"""
    window_heads: WindowHeads | None = None
    """heads of layers with a window, where they differ [null]"""
    attention_chunk: Size | None = None
    """tokens of a piece of the sequence in `chunked` layers [null]"""
    value_norm: bool = False
    """each head of values passes through a norm without weights (Gemma 4) [false]"""
    keys_as_values: bool = False
    """in layers without a window values are the keys before their norm and position, and have no product of their own
    (Gemma 4) [false]"""
    attention_sinks: bool | Literal["window"] = False
    """the softmax of each head has one more score, which is learned (gpt-oss); window: in layers with one (MiMo-V2)
    [false]"""
    attention_gate: bool = False
    """the output of attention is weighed by a gate as wide as itself, from the layer's input (Qwen3-Next) [false]"""
    attention_softcap: float | None = Field(default=None, gt=0)
    """scores pass through this times tanh of them over it (Gemma 2); fused kernels are assumed to take no longer for it
    [null]"""
    logit_softcap: float | None = Field(default=None, gt=0)
    """so do the logits [null]"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """probability, of attention and of both residual branches [0]"""
    moe: Moe | None = None
    """experts in place of the MLP [null: none]"""
    mla: Mla | None = None
    """latent attention in place of heads of head_dim [null: none]"""
    indexer: Annotated[Indexer, AsSection()] | None = None
    """of `sparse` layers: sparse attention beside mla [null]"""
    gated_delta: Annotated[GatedDelta, AsSection()] | None = None
    """of `gated_delta` layers: the gated delta rule [null]"""
    kimi_delta: Annotated[KimiDelta, AsSection()] | None = None
    """of `kimi_delta` layers: the delta rule of Kimi Linear [null]"""
    mamba2: Annotated[Mamba2, AsSection()] | None = None
    """of `mamba2` layers [null]"""
    shared_key: Annotated[SharedKey, AsSection()] | None = None
    """of `shared_key`, `compressed_sparse` and `heavily_compressed` layers (DeepSeek-V4) [null]"""
    residual_streams: Annotated[int, Field(ge=1, le=64), Integral] = 1
    """streams that blocks read a weighed sum of and add to (DeepSeek-V4's hyper-connections); layers pass on all of
    them [1]"""
    layer_inputs: LayerInputs | None = None
    """a second embedding, of which each layer gets a part (Gemma 4's E2B and E4B) [null]"""
    reused_keys: ReusedKeys | None = None
    """layers at the end that attend to keys and values of layers before (Gemma 4's E2B and E4B) [null]"""
    encoder: Encoder | None = None
    """an encoder of images in front of the first layer [null]"""
    captured: Text = ""
    """file of a captured PyTorch module (`llmsim capture`), which gives all other keys but `layers` [none]"""
    mtp_layers: Annotated[int, Field(ge=0, le=100), Integral] = 0
    """multi-token prediction: so many more layers, each with the loss of one more token ahead, on the last stage [0]"""

    _inherited: InheritedKeys = PrivateAttr(default=InheritedKeys())

    def inheriting(self, keys: Iterable[str], config: str = "") -> Model:
        """Return a copy of the model whose dotted ``keys`` come from a preset, or from the config.json ``config``."""
        copy = self.model_copy()
        copy._inherited = InheritedKeys(keys, config)
        return copy

    @property
    def inherited(self) -> InheritedKeys:
        """Dotted keys that come from a preset or a config.json, not from the workload's file."""
        return self._inherited

    def mixer(self, layer: int) -> Mixer:
        """Return the mixer of a layer. Modules of multi-token prediction have the last layer's.

        >>> model = Model(layers=3, hidden=8, heads=1, vocab=8, mixers=["window", "attention"], sliding_window=4)
        >>> [model.mixer(layer).name for layer in range(4)]
        ['window', 'attention', 'window', 'window']
        """
        return MIXERS[_entry(self._mixers, layer, self.layers)]

    @property
    def _mixers(self) -> tuple[str, ...]:
        if self.mixers is not None:
            return self.mixers
        return ("sparse",) if self.indexer else ("window",) if self.sliding_window else ("attention",)

    @property
    def kinds(self) -> tuple[Mixer, ...]:
        """The mixers that some layer has, each once."""
        return tuple(MIXERS[name] for name in dict.fromkeys(self._mixers[: self.layers]))

    @property
    def keeps_scores(self) -> bool:
        """Attention keeps its scores. They are what selective recomputation saves, unless other modules are named."""
        return self.attention != "flash"

    def mlp(self, layer: int) -> MlpKind:
        """Return what MLP a layer has: a dense one, experts, or none.

        >>> sizes = dict(layers=3, hidden=8, heads=1, vocab=8, moe=Moe(experts=8, top_k=2, ffn_hidden=8))
        >>> [Model(mlps=pattern, **sizes).mlp(1) for pattern in (None, ["moe", "none"])]
        ['moe', 'none']
        """
        if self.mlps is not None:
            return _entry(self.mlps, layer, self.layers)
        return "moe" if self.moe is not None and self.moe.here(layer) else "dense"

    @property
    def has_dense_mlps(self) -> bool:
        """Some layer has a dense MLP."""
        beside = self.moe is not None and self.moe.beside_dense
        return beside or any(self.mlp(layer) == "dense" for layer in range(self.layers))

    def alike(self, layer: int) -> object:
        """Return what tells layers of the model apart: mixer, MLP and whose keys; of a captured one its part."""
        if captured := self.captured_model:
            return captured.part_of_layer(layer)
        return self.mixer(layer).name, self.mlp(layer), self.reuses_keys(layer), self.lends_keys(layer)

    def reuses_keys(self, layer: int) -> bool:
        """Return whether a layer attends to keys and values of another."""
        return self.reused_keys is not None and self.layers - self.reused_keys.layers <= layer < self.layers

    def lends_keys(self, layer: int) -> bool:
        """Return whether later layers attend to a layer's keys and values: the last of its kind before these.

        >>> sizes = dict(layers=6, hidden=8, heads=1, vocab=8, mixers=["window", "attention"], sliding_window=4)
        >>> [Model(reused_keys=ReusedKeys(layers=2), **sizes).lends_keys(layer) for layer in range(6)]
        [False, False, True, True, False, False]
        """
        if self.reused_keys is None or self.reuses_keys(layer):
            return False
        first = self.layers - self.reused_keys.layers
        return all(self.mixer(later).name != self.mixer(layer).name for later in range(layer + 1, first))

    def ffn_of(self, layer: int) -> int:
        """Return the width inside a layer's dense MLP."""
        wider = self.reused_keys.ffn_hidden if self.reused_keys and self.reuses_keys(layer) else None
        return wider or self.ffn_hidden

    def mixer_sizes(self, layer: int) -> Any:
        """Return the section with the sizes of a layer's mixer, where it has one."""
        section = self.mixer(layer).section
        return getattr(self, section) if section else None

    def heads_of(self, layer: int) -> Heads:
        """Return the heads of a layer's attention."""
        if self.mla is not None:
            mla = self.mla
            return Heads(self.heads, self.heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim)
        heads = Heads(self.heads, self.kv_heads, self.head_dim, self.v_head_dim)
        if self.window_heads is None or self.mixer(layer).name != "window":
            return heads
        return heads._replace(**self.window_heads.model_dump(exclude_none=True))

    def targets(self, layer: int) -> tuple[str, ...]:
        """Return the names of the products of ``layer`` that may have adapters; the first layer is 0.

        >>> sizes = dict(layers=1, hidden=8, heads=1, vocab=8)
        >>> Model(activation="swiglu", **sizes).targets(0)
        ('q', 'k', 'v', 'qkv', 'o', 'gate', 'up', 'gate_up', 'down')
        """
        names: tuple[str, ...] = ("q", "k", "v", "qkv", "o") if self.mixer(layer).attends else ()
        if self.keys_as_values and self.mixer(layer).name != "window":
            names = tuple(name for name in names if name != "v")
        if self.mla is not None and names:
            names = (*(("q_down", "q_up") if self.mla.q_lora_rank else ("q",)), "kv_down", "kv_up", "o")
        kind = self.mlp(layer)
        if kind == "none" or (kind == "moe" and self.moe is not None and not self.moe.shared_experts):
            return names
        gated = self.activation in ("swiglu", "geglu")
        return (*names, *(("gate", "up", "gate_up", "down") if gated else ("up", "down")))

    @property
    def captured_model(self) -> CapturedModel | None:
        """The model of the file `captured`, where there is one."""
        return read_captured(self.captured) if self.captured else None

    @property
    def table_at_both_ends(self) -> bool:
        """The last stage works with the embedding table too."""
        return self.tied_embeddings or self.mtp_layers > 0

    def keys_seen(self, layer: int, seq: int) -> KeysSeen:
        """Return the bounds of what a token of ``layer`` attends to: 0 where a sequence of ``seq`` is no longer.

        >>> sizes = dict(layers=2, hidden=8, heads=1, vocab=8, mixers=["window", "chunked"])
        >>> model = Model(sliding_window=16, attention_chunk=32, **sizes)
        >>> model.keys_seen(0, 64), model.keys_seen(1, 64), model.keys_seen(1, 32)
        (KeysSeen(window=16, chunk=0), KeysSeen(window=0, chunk=32), KeysSeen(window=0, chunk=0))
        """
        attends = self.mixer(layer).attends
        mask = attends.mask if attends else ""
        window = {"window": self.sliding_window, "top_k": self.indexer and self.indexer.top_k}.get(mask) or seq
        chunk = (self.attention_chunk if mask == "chunk" else None) or seq
        return KeysSeen(window if window < seq else 0, chunk if chunk < seq else 0)

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
        schema = super().__get_pydantic_json_schema__(core, handler)
        sizes = schema.pop("required")
        schema["properties"] |= {
            "preset": {"enum": list(presets()), "description": "a shipped model"},
            "hf_config": {"type": "string", "description": "path of a Hugging Face config.json"},
        }
        sources = [{"required": [key]} for key in ("preset", "hf_config", "captured")]
        schema["oneOf"] = [*sources, {"required": sizes, "not": {"anyOf": sources}}]
        return schema
