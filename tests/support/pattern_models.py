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
#: 8 heads of 32 behind a compression to 64, in 2 groups that are compressed to 48; windows of 32. Of keys of 4 tokens
#: an indexer with 4 heads of 16 chooses 8. Heavily compressed keys have 16 tokens.
V4: dict[str, Any] = {
    "shared_key": {
        **{"heads": 8, "head_dim": 32, "query_rank": 64, "output_groups": 2, "output_rank": 48, "window": 32},
        **{"rotary_dim": 8, "sparse_rate": 4, "heavy_rate": 16, "index_heads": 4, "index_dim": 16, "top_k": 8},
    },
    "residual_streams": 4,
}
#: A sequence has 2 images of 64 patches with 48 values each. Of 2 layers, 128 wide, the second sees whole images. 4
#: patches become one token, of 16 an image.
ENCODER: dict[str, Any] = {
    **{
        "layers": 2,
        "hidden": 128,
        "heads": 4,
        "ffn_hidden": 256,
        "patch_values": 48,
        "patches_per_image": 64,
        "images": 2,
    },
    **{"window": 16, "global_layers": [1], "patches_per_token": 4, "merge_norm": True, "projector": [512]},
}

#: Of 4 layers, windows and all tokens in turns, the last two attend to keys of the first two.
EDGE = LLAMA | {
    **{"mixers": ["window", "attention"], "sliding_window": 32, "qk_norm": True},
    **{"layer_inputs": {"width": 16, "vocab": 512}, "reused_keys": {"layers": 2, "ffn_hidden": 1024}},
}
#: 4 heads of queries and keys 16 wide, 8 of values 32 wide.
DELTA = {"mixers": ["gated_delta"], "gated_delta": {"key_heads": 4, "value_heads": 8, "key_dim": 16, "value_dim": 32}}
#: 8 heads of queries, keys and values 16 wide.
KIMI = {"mixers": ["kimi_delta"], "kimi_delta": {"heads": 8, "head_dim": 16}}
#: 8 heads of 32 with states of 16, in 2 groups; pieces of 64 tokens.
MAMBA = {"mixers": ["mamba2"], "mamba2": {"heads": 8, "head_dim": 32, "state": 16, "groups": 2, "chunk": 64}}
SPARSE = {
    "kv_heads": 8,
    "mla": {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "indexer": {"heads": 4, "head_dim": 16, "top_k": 32},
}
