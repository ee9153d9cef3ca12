"""A small Llama of our own, to be captured, and the same as a built-in model."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn
functional = nn.functional
WIDTH, HEADS, KV_HEADS, FFN, VOCAB, SEQ, BATCH = 2048, 16, 4, 8192, 4096, 4096, 4
HEAD = WIDTH // HEADS
ROWS = SEQ * BATCH
#: The same as keys of a workload's model.
SIZES = {
    **{"layers": 2, "hidden": WIDTH, "heads": HEADS, "kv_heads": KV_HEADS, "ffn_hidden": FFN, "vocab": VOCAB},
    **{"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False, "tied_embeddings": False},
}


class Layer(nn.Module):
    """Attention with grouped heads and rotary positions, and an MLP with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        normed = self.first(x)
        q, k, v = (one(normed).view(BATCH, SEQ, -1, HEAD).transpose(1, 2) for one in (self.q, self.k, self.v))
        q, k = (one * cos + torch.cat((-one[..., HEAD // 2 :], one[..., : HEAD // 2]), -1) * sin for one in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        normed = self.second(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("cos", torch.zeros(SEQ, HEAD))
        self.register_buffer("sin", torch.zeros(SEQ, HEAD))

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.view(-1, VOCAB), ids.view(-1))


def llama() -> tuple[Any, Any]:
    """Return the module, on no device, and tokens."""
    with torch.device("meta"):
        return Llama(), torch.zeros(BATCH, SEQ, dtype=torch.long)
