"""Seconds on end of one kind of kernel, or of those of a layer in turn: where the power limit lowers the clock."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F

from calibration.measure import attention, matmul, memory
from calibration.measure.bench import Bench
from calibration.measure.case import Case, Level, Scalar, Work

SECONDS = {"smoke": 0.1, "quick": 1.0, "full": 2.5}
ATTENTION: dict[str, Scalar] = {
    "batch": 4,
    "heads": 16,
    "kv_heads": 16,
    "length": 4096,
    "head_dim": 128,
    "causal": True,
}
#: More of the kernels that memory bounds: (op, rows, width).
STREAMS = (
    ("cast_bf16_fp32", 8192, 32768),
    *((op, 8192, 8192) for op in ("bias_grad", "gelu", "swiglu_split")),
    ("residual_add", 8192, 2048),
)


def cases(level: Level, gpus: int) -> Iterator[Case]:
    sizes = {"smoke": (128,), "quick": (8192,)}.get(level, (4096, 8192, 16384))
    for size in sizes:
        for dtype, op in (("bf16", "mm"), ("fp8", "mm_fp8"), ("tf32", "mm"), ("fp16", "mm")):
            if size == sizes[0] or dtype in ("bf16", "fp8"):
                params: dict[str, Scalar] = {"m": size, "n": size, "k": size, "role": "fwd", "dtype": dtype}
                yield Case("sustained", op, {**params, "seconds": SECONDS[level]})
    for op in ("attention_fwd", "attention_bwd"):
        for backend in ("math",) if level == "smoke" else ("flash", "cudnn"):
            length = 64 if level == "smoke" else 4096
            sizes_of = {**ATTENTION, "length": length, "backend": backend}
            yield Case("sustained", op, {**sizes_of, "seconds": SECONDS[level]})
    rows, width = (16, 64) if level == "smoke" else (32768, 4096)
    streams = [(op, rows, width) for op in ("copy", "layer_norm", "gelu", "residual_add")]
    for op, rows, width in (*streams, *(STREAMS if level == "full" else ())):
        yield Case("sustained", op, {"rows": rows, "width": width, "seconds": SECONDS[level]})
    for tokens, hidden in {"smoke": ((64, 64),), "quick": ((8192, 4096),)}.get(level, ((8192, 4096), (4096, 8192))):
        yield Case("sustained", "mlp", {"tokens": tokens, "hidden": hidden, "seconds": SECONDS[level]})


def prepare(case: Case, bench: Bench) -> Work:
    params = {name: value for name, value in case.params.items() if name != "seconds"}
    if case.op == "mlp":
        return _mlp(bench, int(params["tokens"]), int(params["hidden"]))
    if case.op.startswith("attention"):
        return attention.prepare(Case("attention", case.op.removeprefix("attention_"), params), bench)
    if "role" in params:
        return matmul.prepare(Case("matmul", case.op, params), bench)
    return memory.prepare(Case("memory", case.op, params), bench)


def _mlp(bench: Bench, tokens: int, hidden: int) -> Work:
    """Norm, product, activation, product, sum: the mix of a step, which draws less power than products alone."""
    x, up, down = bench.random(tokens, hidden), bench.random(4 * hidden, hidden), bench.random(hidden, 4 * hidden)

    def run(i: int) -> object:
        y = F.layer_norm(x, (hidden,))
        return x + F.linear(F.gelu(F.linear(y, up)), down)

    return Work(run, flops=16.0 * tokens * hidden * hidden, launches=5)
