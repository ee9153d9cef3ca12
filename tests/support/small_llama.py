"""A small Llama with adapters, or with weights that are frozen, and its sizes."""

from __future__ import annotations

from typing import Any

from simulator.config import Workload
from tests.support import quick
from tests.support.jobs import job

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS, SEQ = 64, 4, 2, 16, 128, 256, 3, 32
LLAMA: dict[str, Any] = {
    "layers": LAYERS,
    "hidden": HIDDEN,
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "ffn_hidden": FFN,
    "vocab": VOCAB,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rope",
    "bias": False,
    "tied_embeddings": False,
}
ALL = ["q", "k", "v", "o", "gate", "up", "down"]
#: Target -> rows and columns of its matrix, n x k.
SIZES = {
    "q": (HEADS * HEAD_DIM, HIDDEN),
    "k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate": (FFN, HIDDEN),
    "up": (FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}
MATRICES = LAYERS * sum(n * k for n, k in SIZES.values())
#: Two tables of the vocabulary, two norms a layer, and the last one.
OTHERS = 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN


def load(framework: Any = "pytorch", parallelism: dict[str, Any] | None = None, **training: Any) -> Workload:
    work = job(framework=framework, parallelism=parallelism or {}, model=LLAMA)
    work["training"] = {"seq": SEQ, "global_batch": 8} | training
    return quick.load(work)


def adapted(*targets: str, rank: int = 4, **changes: Any) -> dict[str, Any]:
    return {"rank": rank, "targets": list(targets)} | changes
