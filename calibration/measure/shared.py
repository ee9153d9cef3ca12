"""Products that share the GPU's time, period by period, with waiting or with kernels that draw less power.

They show how the clock rises when the mean has room below the power limit, and how products follow it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from calibration.measure import attention, matmul, memory
from calibration.measure.bench import SLEEP_HZ, Bench
from calibration.measure.case import Case, Level, Scalar, Work
from calibration.measure.sustained import ATTENTION, SECONDS

#: Between the products: a kernel of one thread, as NCCL's are that wait, or a copy of 0.5 GB.
BESIDE = ("wait", "copy")
SHARES = {"smoke": (0.5,), "quick": (0.5,), "full": (0.1, 0.25, 0.5, 0.65, 0.8, 0.9)}
#: Seconds after which products and pauses repeat.
PERIODS = {"smoke": (0.01,), "quick": (0.02,), "full": (0.02, 0.2)}
#: With fewer shares: more periods of products and pauses; attention and streams, in short turns; other products.
FEW = (0.5, 0.8)
MORE_PERIODS = (0.05, 0.1, 0.5)
STREAMS = ("layer_norm", "layer_norm_bwd", "gelu", "gelu_bwd", "bias_grad", "residual_add")
#: Products (m, n, k) and attention (batch, heads, length) of layers, with pauses that leave them the highest clock.
PRODUCTS = (
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (2048, 4096, 4096),
    (4096, 1024, 4096),
    (8192, 2048, 1024),
    (8192, 3072, 768),
    (8192, 3072, 3072),
    (8192, 9216, 3072),
    (8192, 3072, 12288),
    (4096, 20480, 5120),
    (8192, 51200, 3072),
)
SCORES = ((8, 24, 1024), (4, 16, 2048), (1, 24, 8192))


def cases(level: Level, gpus: int) -> Iterator[Case]:
    size = 128 if level == "smoke" else 8192
    turns: list[tuple[str, dict[str, Scalar], str, float, float]] = [
        ("mm", _product(size, size, size), *turn) for turn in itertools.product(BESIDE, SHARES[level], PERIODS[level])
    ]
    if level == "full":
        (short, *_), large = PERIODS[level], _product(size, size, size)
        neighbours = itertools.product(("attention_fwd", "attention_bwd", *STREAMS), FEW, (short,))
        turns += [("mm", large, *turn) for turn in itertools.product(BESIDE[:1], FEW, MORE_PERIODS)]
        turns += [("mm", large, *turn) for turn in neighbours]
        turns += [("mm", _product(*sizes), "wait", share, short) for sizes in PRODUCTS for share in FEW[:1]]
        turns += [
            (op, _scores(*sizes), "wait", share, short)
            for op in ("attention_fwd", "attention_bwd")
            for sizes in SCORES
            for share in FEW[:1]
        ]
    for op, sizes, beside, share, period_s in turns:
        shared: dict[str, Scalar] = {"beside": beside, "share": share, "period_s": period_s}
        yield Case("shared", op, {**sizes, **shared, "seconds": SECONDS[level]})


def _product(m: int, n: int, k: int) -> dict[str, Scalar]:
    return {"m": m, "n": n, "k": k, "role": "fwd", "dtype": "bf16"}


def _scores(batch: int, heads: int, length: int) -> dict[str, Scalar]:
    sizes: dict[str, Scalar] = {"batch": batch, "heads": heads, "kv_heads": heads, "length": length}
    return {**sizes, "head_dim": 128, "causal": True, "backend": "cudnn"}


def prepare(case: Case, bench: Bench) -> tuple[Work, Work]:
    """The kernel, and what stands between its runs."""
    sizes = {
        name: value for name, value in case.params.items() if name not in ("beside", "share", "period_s", "seconds")
    }
    if case.op == "mm":
        product = matmul.prepare(Case("matmul", case.op, sizes), bench)
    else:
        product = attention.prepare(Case("attention", case.op.removeprefix("attention_"), sizes), bench)
    if (beside := str(case.params["beside"])).startswith("attention"):
        scores = Case("attention", beside.removeprefix("attention_"), {**ATTENTION, "length": 4096, "backend": "cudnn"})
        return product, attention.prepare(scores, bench)
    if beside != "wait":
        rows, width = (16, 64) if not bench.cuda else (32768, 4096)
        return product, memory.prepare(Case("memory", beside, {"rows": rows, "width": width}), bench)
    cycles = math.ceil(1e-4 * SLEEP_HZ)
    return product, Work(lambda i: torch.cuda._sleep(cycles) if bench.cuda else None)
