"""The model section of a workload file."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from simulator.config.files import Integral, Section
from simulator.config.presets import presets

Size = Annotated[int, Field(ge=1, le=1_000_000_000), Integral]


class Model(Section):
    """A dense transformer. `preset` or `hf_config` may stand in a file for these keys; keys beside them win."""

    layers: Annotated[int, Field(ge=1, le=10_000), Integral]
    """transformer layers"""
    hidden: Size
    """width of the residual stream"""
    heads: Size
    """query heads"""
    kv_heads: Size = Field(default_factory=lambda known: known["heads"])
    """key and value heads [heads]"""
    head_dim: Size = Field(default_factory=lambda known: max(1, known["hidden"] // known["heads"]))
    """width of a head [hidden / heads]"""
    ffn_hidden: Size = Field(default_factory=lambda known: 4 * known["hidden"])
    """width inside the MLP [4 * hidden]"""
    vocab: Size
    """tokens of the vocabulary"""
    vocab_multiple: Size = 128
    """the vocabulary is padded to a multiple of this times tp [128]"""
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
    sliding_window: Size | None = None
    """tokens that a token attends to, itself among them; null: all before it [null]"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """probability, of attention and of both residual branches [0]"""

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
