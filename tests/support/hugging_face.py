"""Small models of Hugging Face's modules, and their kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from simulator.config import Workload, load_workload
from simulator.models import Part
from simulator.operations.nodes import Op
from simulator.operations.shapes import Turn
from simulator.program import Compute, Matmul, Memory

HUGGING_FACE = "hugging_face"
KERNELS = Path(__file__).resolve().parents[2] / "calibration" / "measurements" / "hugging-face-kernels.csv"
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, BATCH, SEQ = 2, 256, 4, 2, 64, 512, 1001, 2, 128
TOKENS = BATCH * SEQ
#: The first micro-batch, whose gradients nothing is added to.
FIRST = Turn(first=True)
LLAMA: dict[str, Any] = {
    **{"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM},
    **{"ffn_hidden": FFN, "vocab": VOCAB, "activation": "swiglu", "norm": "rmsnorm", "position": "rope"},
    **{"bias": False, "tied_embeddings": True},
}
MOE: dict[str, Any] = {"experts": 4, "top_k": 2, "ffn_hidden": 64}
MIXTRAL = LLAMA | {"moe": MOE}
GPT2: dict[str, Any] = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB, "dropout": 0.1}


def load(model: dict[str, Any], **sections: Any) -> Workload:
    training = {"seq": SEQ, "micro_batch": BATCH, "global_batch": BATCH} | sections.pop("training", {})
    job = {"model": model, "training": training, "framework": HUGGING_FACE, "cluster": "hgx_h200_8gpu"}
    return load_workload({"name": "small", **job, **sections})


def kinds(ops: Iterable[Op]) -> Counter[str]:
    """Kernels by class: products, attention, and those that memory bounds together."""
    names = {Matmul: "product", Memory: "memory"}
    return Counter(names.get(type(op.kernel), "attention") for op in ops if isinstance(op, Compute))


def memory_kernels(part: Part, kind: str) -> dict[str, Memory]:
    """Memory-bound kernels of a pass by name."""
    ops = (op for op in part.ops(kind) if isinstance(op, Compute))
    return {op.name: op.kernel for op in ops if isinstance(op.kernel, Memory)}
