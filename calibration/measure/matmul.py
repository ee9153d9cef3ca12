"""Matrix products in the operand layouts of a linear layer: single, batched, and grouped for experts.

Sizes m, n, k are those of `simulator.program.Matmul`: forward y = x W^T, data gradient dx = dy W and weight gradient
dW = dy^T x. PyTorch keeps W as outputs x inputs, so that the layouts are NT, NN and TN. In fp8 all are NT,
the only layout that the tensor cores take: training libraries transpose the operands beforehand.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import torch

from calibration.measure.bench import Bench
from calibration.measure.case import Case, Level, Scalar, UnavailableError, Work
from calibration.shares import ends

ROLES = ("fwd", "dgrad", "wgrad")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
FP8 = torch.float8_e4m3fn
HIDDENS = (1024, 2048, 4096, 6144, 8192, 12288)


def cases(level: Level, gpus: int) -> Iterator[Case]:
    if level == "smoke":
        for role in ROLES:
            yield _case("mm", m=128, n=256, k=64, role=role, dtype="bf16")
        yield _case("mm", m=128, n=256, k=64, role="fwd", dtype="tf32")
        yield _case("mm_accumulate", m=128, n=256, k=64, role="wgrad", dtype="bf16")
        yield _case("mm_accumulate_fp32", m=128, n=256, k=64, role="wgrad", dtype="bf16")
        yield _case("mm_fp8", m=128, n=256, k=64, role="fwd", dtype="fp8")
        yield _case("bmm", batch=4, m=64, n=64, k=32, role="fwd", dtype="bf16")
        for role in ROLES:
            yield _case("grouped", batch=4, m=256, n=128, k=64, role=role, dtype="bf16")
        return
    yield from _dense(full=level == "full")
    yield from _other_types(full=level == "full")
    yield from _many(full=level == "full")


def prepare(case: Case, bench: Bench) -> Work:
    op, role = case.op, str(case.params["role"])
    m, n, k, batch = (int(case.params.get(name, 1)) for name in ("m", "n", "k", "batch"))
    dtype = FP8 if op == "mm_fp8" else DTYPES[str(case.params["dtype"])]
    torch.backends.cuda.matmul.allow_tf32 = case.params["dtype"] == "tf32"
    if op == "grouped":
        return _grouped(bench, role, m, n, k, batch, case.params.get("skew") is True)
    out_dtype = {"mm_fp8": torch.bfloat16, "mm_accumulate_fp32": torch.float32}.get(op, dtype)
    element, out_element = dtype.itemsize, out_dtype.itemsize * (2 if "accumulate" in op else 1)
    nbytes = float(batch * (element * (m * k + k * n) + out_element * m * n))
    sets = bench.sets(nbytes)
    turned_a, turned_b = role == "wgrad" and dtype != FP8, role == "fwd" or dtype == FP8
    lead = (batch,) if op == "bmm" else ()
    a_shape, b_shape = ((k, m) if turned_a else (m, k)), ((n, k) if turned_b else (k, n))
    buffers = []
    for _ in range(sets):
        a, b = bench.random(*lead, *a_shape, dtype=dtype), bench.random(*lead, *b_shape, dtype=dtype)
        a = a.transpose(-2, -1) if turned_a else a
        b = b.transpose(-2, -1) if turned_b else b
        buffers.append((a, b, bench.empty(*lead, m, n, dtype=out_dtype).fill_(0)))
    one = torch.ones((), device=bench.device)

    def run(i: int) -> object:
        a, b, out = buffers[i]
        match op:
            case "mm":
                return torch.mm(a, b, out=out)
            case "bmm":
                return torch.bmm(a, b, out=out)
            case "mm_accumulate":
                return out.addmm_(a, b)
            case "mm_accumulate_fp32":
                return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
            case "mm_fp8":
                return torch._scaled_mm(
                    a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=role == "fwd", out=out
                )
        raise UnavailableError(f"no such product: {op}")

    return Work(run, flops=2.0 * batch * m * n * k, nbytes=nbytes, sets=sets)


def _grouped(bench: Bench, role: str, m: int, n: int, k: int, groups: int, skew: bool) -> Work:
    """One product per expert over its share of the tokens: of m rows, or of k for the weight gradient."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is None:
        raise UnavailableError("this PyTorch has no grouped_mm")
    tokens = k if role == "wgrad" else m
    bounds = torch.tensor(ends(tokens, groups, skew), dtype=torch.int32, device=bench.device)
    weights, outs = 2.0 * groups * n * k, 2.0 * m * n
    nbytes = 2.0 * k * (m + n) + 2.0 * groups * m * n if role == "wgrad" else 2.0 * m * k + weights + outs
    sets = bench.sets(nbytes)
    buffers = []
    for _ in range(sets):
        a = bench.random(k, m).t() if role == "wgrad" else bench.random(m, k)
        match role:
            case "fwd":
                b = bench.random(groups, n, k).transpose(-2, -1)
            case "dgrad":
                b = bench.random(groups, k, n)
            case _:
                b = bench.random(k, n)
        buffers.append((a, b))

    def run(i: int) -> object:
        a, b = buffers[i]
        return grouped(a, b, offs=bounds)

    return Work(run, flops=2.0 * m * n * k, nbytes=nbytes, sets=sets)


def _case(op: str, **params: Scalar) -> Case:
    return Case("matmul", op, params)


def _dense(*, full: bool) -> Iterator[Case]:
    """Linear layers of GPT and Llama shapes over tensor-parallel degrees, vocabularies, and sizes at random."""
    tokens = (1024, 2048, 4096, 8192, 16384) if full else (2048, 8192)
    for h in HIDDENS if full else (2048, 8192):
        layers = [(n // tp, k) for n, k in ((3 * h, h), (4 * h, h)) for tp in ((1, 2, 4) if full else (1, 4))]
        layers += [(n, k // tp) for n, k in ((h, h), (h, 4 * h)) for tp in ((1, 2, 4) if full else (1, 4))]
        for (n, k), t in itertools.product(dict.fromkeys(layers), tokens):
            yield from _layer(t, n, k)
    if not full:
        return
    for n, k in (
        (28672, 4096),
        (4096, 14336),
        (6144, 4096),
        (22016, 4096),
        (4096, 11008),
        (10240, 8192),
        (57344, 8192),
    ):
        for t in (2048, 8192):
            yield from _layer(t, n, k)
    for vocab, h, t in itertools.product((50304, 12576, 128256), (1024, 4096, 8192), (2048, 8192)):
        yield from _layer(t, vocab, h)
    rng = random.Random(1)
    for index in range(240):
        m, n, k = (round(math.exp(rng.uniform(math.log(256), math.log(20000)))) for _ in range(3))
        step = 128 if index % 3 else 8  # of a third of them no tile divides the sizes
        yield _case(
            "mm", m=m // step * step, n=n // step * step, k=k // step * step, role=ROLES[index % 3], dtype="bf16"
        )


def _layer(tokens: int, n: int, k: int, op: str = "mm", dtype: str = "bf16") -> Iterator[Case]:
    """Forward, data gradient and weight gradient of a layer of n outputs and k inputs."""
    yield _case(op, m=tokens, n=n, k=k, role="fwd", dtype=dtype)
    yield _case(op, m=tokens, n=k, k=n, role="dgrad", dtype=dtype)
    yield _case(op, m=n, n=k, k=tokens, role="wgrad", dtype=dtype)


def _other_types(*, full: bool) -> Iterator[Case]:
    hiddens = HIDDENS[1:] if full else (4096,)
    for h in hiddens:
        for t in (2048, 8192) if full else (4096,):
            for n, k in ((4 * h, h), (h, 4 * h), (3 * h, h)):
                yield from _layer(t, n, k, "mm_fp8", "fp8")
        yield from _layer(4096, 4 * h, h, dtype="fp16")
        yield from _layer(4096, 4 * h, h, dtype="tf32")
        for t in (2048, 8192):
            for n, k in ((4 * h, h), (h, 4 * h), (3 * h, h)) if full else ((4 * h, h),):
                yield _case("mm_accumulate", m=n, n=k, k=t, role="wgrad", dtype="bf16")
                yield _case("mm_accumulate_fp32", m=n, n=k, k=t, role="wgrad", dtype="bf16")
    for size in (2048, 4096) if full else ():
        yield from _layer(size, size, size, dtype="fp32")
        yield from _layer(size, 2 * size, size, dtype="tf32")


def _many(*, full: bool) -> Iterator[Case]:
    """Batched products of unfused attention, and experts."""
    for seq, heads, d in itertools.product((1024, 2048, 4096) if full else (2048,), (8, 32), (64, 128)):
        sizes = {"m": seq, "n": seq, "k": d}, {"m": seq, "n": d, "k": seq}
        for role, size in itertools.product(ROLES, sizes):
            yield _case("bmm", batch=heads, **size, role=role, dtype="bf16")
    shapes = ((8, 4096, 14336), (8, 4096, 4096), (2, 4096, 14336), (32, 2048, 1408), (64, 2048, 1408), (16, 5120, 1536))
    for groups, h, ffn in shapes if full else shapes[:1]:
        for tokens in (4096, 16384):
            for n, k in ((ffn, h), (h, ffn)):
                for skew in (False, True) if full and tokens == 16384 else (False,):
                    extra: dict[str, Scalar] = {"skew": True} if skew else {}
                    for case in _layer(tokens, n, k, "grouped"):
                        yield _case("grouped", batch=groups, **case.params, **extra)
    # Whose time is in good part that of beginning.
    small = ((2, 1024, 2048), (4, 1024, 1408), (8, 1024, 1024), (4, 2048, 2048), (8, 2048, 1408), (16, 2048, 768))
    for (groups, h, ffn), tokens in itertools.product(small if full else (), (2048, 8192)):
        for n, k in ((ffn, h), (h, ffn)):
            for case in _layer(tokens, n, k, "grouped"):
                yield _case("grouped", batch=groups, **case.params)
