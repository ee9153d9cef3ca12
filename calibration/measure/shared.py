"""Products that share the GPU's time, period by period, with waiting or with kernels that draw less power: how the
clock rises when the mean has room below the power limit, and how products follow it."""

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
SMALLER = 4096


def cases(level: Level, gpus: int) -> Iterator[Case]:
    size = 128 if level == "smoke" else 8192
    turns = [(size, *turn) for turn in itertools.product(BESIDE, SHARES[level], PERIODS[level])]
    if level == "full":
        short = PERIODS[level][:1]
        turns += [(size, *turn) for turn in itertools.product(BESIDE[:1], FEW, MORE_PERIODS)]
        turns += [(size, *turn) for turn in itertools.product(("attention_fwd", "attention_bwd", *STREAMS), FEW, short)]
        turns += [(SMALLER, *turn) for turn in itertools.product(BESIDE[:1], FEW, short)]
    for side, beside, share, period_s in turns:
        sizes: dict[str, Scalar] = {"m": side, "n": side, "k": side, "role": "fwd", "dtype": "bf16"}
        shared: dict[str, Scalar] = {"beside": beside, "share": share, "period_s": period_s}
        yield Case("shared", "mm", {**sizes, **shared, "seconds": SECONDS[level]})


def prepare(case: Case, bench: Bench) -> tuple[Work, Work]:
    """The product, and what stands between products."""
    sizes = {name: case.params[name] for name in ("m", "n", "k", "role", "dtype")}
    product = matmul.prepare(Case("matmul", case.op, sizes), bench)
    if (beside := str(case.params["beside"])).startswith("attention"):
        scores = Case("attention", beside.removeprefix("attention_"), {**ATTENTION, "length": 4096, "backend": "cudnn"})
        return product, attention.prepare(scores, bench)
    if beside != "wait":
        rows, width = (16, 64) if not bench.cuda else (32768, 4096)
        return product, memory.prepare(Case("memory", beside, {"rows": rows, "width": width}), bench)
    cycles = math.ceil(1e-4 * SLEEP_HZ)
    return product, Work(lambda i: torch.cuda._sleep(cycles) if bench.cuda else None)
