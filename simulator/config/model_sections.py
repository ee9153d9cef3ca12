"""Small sections of a model: forms of attention, inputs of each layer, keys of other layers."""

from __future__ import annotations

from collections.abc import Iterable

from simulator.config.section import Section
from simulator.config.sizes import Size


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


class WindowHeads(Section):
    """Heads of layers with a sliding window, where they differ from those of other layers."""

    heads: Size | None = None
    """query heads [model.heads]"""
    kv_heads: Size | None = None
    """key and value heads [model.kv_heads]"""
    head_dim: Size | None = None
    """width of a head of queries and keys [model.head_dim]"""
    v_head_dim: Size | None = None
    """width of a head of values [model.v_head_dim]"""


class LayerInputs(Section):
    """A second embedding, of which each layer gets a part of its own."""

    width: Size
    """numbers of a token that a layer gets"""
    vocab: Size
    """tokens of its table"""


class ReusedKeys(Section):
    """Layers at the model's end without keys and values of their own."""

    layers: Size
    """so many layers at the end attend to keys and values of the last layer of their kind before these"""
    ffn_hidden: Size | None = None
    """width inside their MLPs [model.ffn_hidden]"""


class InheritedKeys(frozenset[str]):
    """Keys of a model that come from a preset or a config.json, and the path of the latter, or none.

    They are no part of what the model is, so that all of these are equal.
    """

    config: str

    def __new__(cls, keys: Iterable[str] = (), config: str = "") -> InheritedKeys:
        inherited = super().__new__(cls, keys)
        inherited.config = config
        return inherited

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InheritedKeys)

    __hash__ = frozenset.__hash__
