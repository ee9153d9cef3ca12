"""Attention through `scaled_dot_product_attention`, forward and backward, laid out as a linear layer leaves it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from calibration.measure.bench import Bench
from calibration.measure.case import Case, Level, Scalar, Work

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
TOKENS = 16384
#: (batch, heads, length, head dimension) of a few thousand tokens, as narrow models have them.
FEW_BLOCKS = ((16, 16, 1024, 64), (4, 16, 2048, 128), (2, 24, 1024, 128), (1, 40, 2048, 128))


def cases(level: Level, gpus: int) -> Iterator[Case]:
    if level == "smoke":
        for backend, op in itertools.product(("default", "flash", "cudnn", "math"), ("fwd", "bwd")):
            yield _case(op, 1, 4, 4, 256, 64, True, backend)
        yield _case("bwd", 1, 4, 2, 256, 64, True, "default")
        return
    full = level == "full"
    lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768) if full else (1024, 4096, 16384)
    for length, d, causal, backend, op in itertools.product(
        lengths, (64, 128), (True, False), ("flash", "cudnn"), ("fwd", "bwd")
    ):
        heads = 2048 // d
        yield _case(op, max(1, TOKENS // length), heads, heads, length, d, causal, backend)
    for length, backend, op in itertools.product(lengths[1:-1], ("flash", "cudnn"), ("fwd", "bwd")):
        yield _case(op, max(1, TOKENS // length), 16, 2, length, 128, True, backend)  # grouped queries
        if full:
            yield _case(op, 1, 32, 8, length, 128, True, backend)
            yield _case(op, 1, 8, 8, length, 128, True, backend)  # few blocks: a tensor-parallel share of the heads
            yield _case(op, 4, 4, 4, length, 64, True, backend)
    for (batch, heads, length, d), op in itertools.product(FEW_BLOCKS if full else (), ("fwd", "bwd")):
        yield _case(op, batch, heads, heads, length, d, True, "cudnn")
    for length, op in itertools.product((2048, 8192) if full else (4096,), ("fwd", "bwd")):
        yield _case(op, 2, 16, 16, length, 128, True, "default")
        yield _case(op, 2, 16, 16, length, 128, True, "efficient")
        for backend in ("flash", "cudnn"):
            yield _case(op, 2, 16, 16, length, 192, True, backend, value_dim=128)  # latent attention
            yield _case(op, 2, 16, 16, length, 256, True, backend)
            yield _case(op, 2, 16, 16, length, 96, True, backend)


def prepare(case: Case, bench: Bench) -> Work:
    p = case.params
    batch, heads, kv_heads, length, d = (int(p[name]) for name in ("batch", "heads", "kv_heads", "length", "head_dim"))
    value_dim = int(p.get("value_dim", d))
    causal, backward = bool(p["causal"]), case.op == "bwd"
    forward_bytes = 2.0 * batch * length * (heads * (d + value_dim) + kv_heads * (d + value_dim))
    sets = bench.sets(forward_bytes, 8)

    def heads_first(number: int, dim: int) -> torch.Tensor:
        return bench.random(batch, length, number, dim).transpose(1, 2).detach().requires_grad_()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        backend = BACKENDS.get(str(p["backend"]))
        if backend is None:
            return _sdpa(q, k, v, causal, kv_heads < heads)
        with sdpa_kernel(backend):
            return _sdpa(q, k, v, causal, kv_heads < heads)

    inputs = [(heads_first(heads, d), heads_first(kv_heads, d), heads_first(kv_heads, value_dim)) for _ in range(sets)]
    products = (5 if backward else 2) * (0.5 if causal else 1.0)
    flops = products * batch * heads * float(length) ** 2 * (d + value_dim)
    if not backward:
        return Work(lambda i: attend(*inputs[i]), flops=flops, nbytes=forward_bytes, sets=sets, launches=2)
    graphs = [attend(*one) for one in inputs]
    gradients = [bench.random(batch, length, heads, value_dim).transpose(1, 2) for _ in range(sets)]

    def run(i: int) -> object:
        return torch.autograd.grad(graphs[i], inputs[i], gradients[i], retain_graph=True)

    return Work(run, flops=flops, nbytes=2.5 * forward_bytes, sets=sets, launches=5)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, grouped: bool) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def _case(
    op: str, batch: int, heads: int, kv_heads: int, length: int, d: int, causal: bool, backend: str, **extra: Scalar
) -> Case:
    params: dict[str, Scalar] = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length, "head_dim": d}
    return Case("attention", op, {**params, "causal": causal, "backend": backend, **extra})
