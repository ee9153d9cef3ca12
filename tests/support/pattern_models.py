"""A small model of Llama's kind, to which tests of mixers give patterns of layers."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "layers": 4,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 4,
    "ffn_hidden": 512,
    "vocab": 1024,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rope",
    "bias": False,
}
#: Tokens of a sequence, and of the micro-batch of one.
SEQ = 128
