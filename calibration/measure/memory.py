"""Kernels bound by memory traffic, as eager PyTorch runs them: forward, backward, loss, optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from calibration.measure.bench import Bench
from calibration.measure.case import Case, Level, UnavailableError, Work
from calibration.measure.sharding import SHARDING

BF16, FP32 = torch.bfloat16, torch.float32
KernelCall = Callable[[int], object]
#: More shapes of sums over columns, which PyTorch cuts into slices of rows by shape.
COLUMN_SUMS = (
    *itertools.product((1024, 4096, 16384), (1024, 3072, 4096, 12288)),
    *((8192, 2048), (8192, 8192), (2048, 3072), (8192, 6144)),
)


def cases(level: Level, gpus: int) -> Iterator[Case]:
    shapes = {
        "smoke": ((16, 64),),
        "quick": ((2048, 1024), (8192, 4096)),
        "full": tuple(itertools.product((512, 2048, 8192, 32768), (1024, 4096, 12288))),
    }[level]
    for op, (rows, width) in itertools.product(ROWWISE, shapes):
        yield Case("memory", op, {"rows": rows, "width": width})
    for rows, width in COLUMN_SUMS if level == "full" else ():
        yield Case("memory", "bias_grad", {"rows": rows, "width": width})
    tables = {"smoke": ((16, 64, 128),), "quick": ((8192, 4096, 50304),)}.get(
        level, tuple(itertools.product((2048, 8192), (1024, 4096), (12576, 50304, 128256)))
    )
    for op, (tokens, hidden, vocab) in itertools.product(("embedding", "embedding_bwd"), tables):
        yield Case("memory", op, {"tokens": tokens, "hidden": hidden, "vocab": vocab})
    for op, (tokens, vocab) in itertools.product(LOSSES, dict.fromkeys((t, v) for t, _, v in tables)):
        yield Case("memory", op, {"tokens": tokens, "vocab": vocab})
    squares = {"smoke": ((1, 2, 64),), "quick": ((2, 16, 2048),)}.get(
        level, ((2, 16, 1024), (2, 16, 2048), (1, 32, 4096))
    )
    for op, (batch, heads, length) in itertools.product(SQUARE, squares):
        yield Case("memory", op, {"batch": batch, "heads": heads, "length": length})
    states = {"smoke": ((4, 1000),), "quick": ((100, 1_000_000),)}.get(
        level, ((16, 100_000), (100, 1_000_000), (300, 1_000_000), (50, 16_777_216), (300, 4_194_304))
    )
    for op, (tensors, elements) in itertools.product(OPTIMIZERS, states):
        yield Case("memory", op, {"tensors": tensors, "elements": elements})
    layers = {"smoke": ((64, 2),), "quick": ((4096, 2),)}.get(
        level, tuple(itertools.product((1024, 2048, 4096, 6144), (2, 4, 8)))
    )
    for op, (hidden, ranks) in itertools.product(SHARDING, layers):
        yield Case("memory", op, {"hidden": hidden, "ranks": ranks})
    heads_of = {"smoke": ((1, 64, 4, 64),), "quick": ((4, 2048, 16, 128),)}.get(
        level, ((1, 2048, 8, 128), (4, 2048, 16, 128), (2, 8192, 32, 128), (4, 4096, 32, 64))
    )
    for op, (batch, length, heads, d) in itertools.product(ROTARY, heads_of):
        yield Case("memory", op, {"batch": batch, "length": length, "heads": heads, "head_dim": d})
    tokens_of = {"smoke": ((16, 2, 64),), "quick": ((8192, 2, 4096), (2048, 8, 4096))}.get(
        level, tuple(itertools.product((2048, 8192), (2, 4, 8), (1024, 4096)))
    )
    for op, (tokens, top_k, width) in itertools.product(CHOICES, tokens_of):
        yield Case("memory", op, {"tokens": tokens, "top_k": top_k, "width": width})


def prepare(case: Case, bench: Bench) -> Work:
    p = {name: int(value) for name, value in case.params.items()}
    for table in (ROWWISE, LOSSES, SQUARE, OPTIMIZERS, SHARDING, ROTARY, TABLES, CHOICES):
        if case.op in table:
            return table[case.op](bench, **p)
    raise UnavailableError(f"no such kernel: {case.op}")


Make = Callable[[Bench, int, int], Callable[[], object]]


def _rowwise(nbytes_per_element: float, make: Make, launches: int = 1) -> Callable[..., Work]:
    """An op on a tensor of rows x width; the bytes are those that it reads and writes per element."""

    def prepare(bench: Bench, rows: int, width: int) -> Work:
        return bench.rotated(nbytes_per_element * rows * width, lambda: make(bench, rows, width), launches)

    return prepare


def _unary(function: Callable[[Tensor], object], dtype: torch.dtype = BF16) -> Make:
    def make(bench: Bench, rows: int, width: int) -> Callable[[], object]:
        x = bench.random(rows, width, dtype=dtype)
        return lambda: function(x)

    return make


def _binary(
    function: Callable[[Tensor, Tensor], object], first: torch.dtype = BF16, second: torch.dtype = BF16
) -> Make:
    def make(bench: Bench, rows: int, width: int) -> Callable[[], object]:
        x, y = bench.random(rows, width, dtype=first), bench.random(rows, width, dtype=second)
        return lambda: function(x, y)

    return make


def _into(function: Callable[[Tensor, Tensor], object], out: torch.dtype, source: torch.dtype = BF16) -> Make:
    """``function`` writes its first argument."""

    def make(bench: Bench, rows: int, width: int) -> Callable[[], object]:
        y, x = bench.fresh(rows, width, dtype=out), bench.random(rows, width, dtype=source)
        return lambda: function(y, x)

    return make


def _backward(function: Callable[..., Tensor], tensors: int = 1, parameters: int = 0) -> Make:
    """The gradients of ``function`` of so many tensors of rows x width and so many parameters of one row."""

    def make(bench: Bench, rows: int, width: int) -> Callable[[], object]:
        inputs = [bench.random(rows, width).detach().requires_grad_() for _ in range(tensors)]
        inputs += [bench.random(width).detach().requires_grad_() for _ in range(parameters)]
        out = function(*inputs)
        gradient = bench.random(*out.shape)
        return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    return make


def _norm(function: Callable[..., Tensor], parameters: int) -> Make:
    def make(bench: Bench, rows: int, width: int) -> Callable[[], object]:
        x = bench.random(rows, width)
        weights = [bench.random(width).detach().requires_grad_() for _ in range(parameters)]
        return lambda: function(x, *weights)

    return make


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _split_swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1)


ROWWISE: dict[str, Callable[..., Work]] = {
    "layer_norm": _rowwise(4, _norm(_layer_norm, 2)),
    "layer_norm_bwd": _rowwise(6, _backward(_layer_norm, 1, 2), 3),
    "rms_norm": _rowwise(4, _norm(_rms_norm, 1)),
    "rms_norm_bwd": _rowwise(6, _backward(_rms_norm, 1, 1), 3),
    "gelu": _rowwise(4, _unary(F.gelu)),
    "gelu_tanh": _rowwise(4, _unary(_gelu_tanh)),
    "gelu_bwd": _rowwise(6, _backward(F.gelu)),
    "gelu_tanh_bwd": _rowwise(6, _backward(_gelu_tanh)),
    "relu": _rowwise(4, _unary(F.relu)),
    "relu_bwd": _rowwise(6, _backward(F.relu)),
    "silu": _rowwise(4, _unary(F.silu)),
    "swiglu": _rowwise(10, _binary(_swiglu), 2),
    "swiglu_bwd": _rowwise(18, _backward(_swiglu, 2), 3),
    "swiglu_split": _rowwise(5, _unary(_split_swiglu), 2),
    "swiglu_split_bwd": _rowwise(13, _backward(_split_swiglu), 6),
    "residual_add": _rowwise(6, _binary(torch.add)),
    "bias_add": _rowwise(4, lambda bench, rows, width: _bias(bench, rows, width)),
    "bias_grad": _rowwise(2, _unary(lambda x: x.sum(0)), 2),
    "multiply": _rowwise(6, _binary(torch.mul)),
    "dropout": _rowwise(5, _unary(_drop)),
    "dropout_bwd": _rowwise(5, _backward(_drop)),
    "softmax": _rowwise(4, _unary(lambda x: torch.softmax(x, -1))),
    "cast_bf16_fp32": _rowwise(6, _unary(lambda x: x.float())),
    "cast_fp32_bf16": _rowwise(6, _unary(lambda x: x.bfloat16(), FP32)),
    "cast_bf16_fp8": _rowwise(3, _unary(lambda x: x.to(torch.float8_e4m3fn))),
    "grad_add_fp32": _rowwise(10, _into(lambda y, x: y.add_(x), FP32)),
    "grad_add_bf16": _rowwise(6, _into(lambda y, x: y.add_(x), BF16)),
    "grad_scale_fp32": _rowwise(8, _into(lambda y, x: y.mul_(1.0), FP32)),
    "copy": _rowwise(4, _into(lambda y, x: y.copy_(x), BF16)),
    "zero": _rowwise(2, _into(lambda y, x: y.zero_(), BF16)),
    "transpose": _rowwise(4, _unary(lambda x: x.t().contiguous())),
    "concat": _rowwise(8, _binary(lambda x, y: torch.cat((x, y), -1))),
    "norm_of": _rowwise(4, _unary(lambda x: torch.linalg.vector_norm(x), FP32), 2),
    "abs_max": _rowwise(2, _unary(lambda x: x.abs().max()), 3),
}


def _bias(bench: Bench, rows: int, width: int) -> Callable[[], object]:
    x, bias = bench.random(rows, width), bench.random(width)
    return lambda: x + bias


def _embedding(bench: Bench, tokens: int, hidden: int, vocab: int) -> Work:
    table, ids = bench.random(vocab, hidden), _ids(bench, vocab, tokens)
    return Work(lambda i: F.embedding(ids, table), nbytes=4.0 * tokens * hidden)


def _embedding_bwd(bench: Bench, tokens: int, hidden: int, vocab: int) -> Work:
    """A gradient as large as the table, zero but for the tokens that occur."""
    table, ids = bench.random(vocab, hidden).detach().requires_grad_(), _ids(bench, vocab, tokens)
    out, gradient = F.embedding(ids, table), bench.random(tokens, hidden)
    return Work(
        lambda i: torch.autograd.grad(out, table, gradient, retain_graph=True),
        nbytes=2.0 * hidden * (2 * tokens + vocab),
        launches=10,
    )


TABLES: dict[str, Callable[..., Work]] = {"embedding": _embedding, "embedding_bwd": _embedding_bwd}


def _loss(bench: Bench, tokens: int, vocab: int) -> Work:
    """Logits to fp32, log-softmax, loss: (2 + 4) + (4 + 4) bytes per logit."""

    def make() -> Callable[[], object]:
        logits, labels = bench.random(tokens, vocab).detach().requires_grad_(), _ids(bench, vocab, tokens)
        return lambda: F.cross_entropy(logits.float(), labels)

    return bench.rotated(14.0 * tokens * vocab, make, 4, 2)


def _loss_bwd(bench: Bench, tokens: int, vocab: int) -> Work:
    """Gradient of the loss (zeros written and scattered into), of log-softmax, and back to bf16."""

    def make() -> Callable[[], object]:
        logits, labels = bench.random(tokens, vocab).detach().requires_grad_(), _ids(bench, vocab, tokens)
        loss = F.cross_entropy(logits.float(), labels)
        return lambda: torch.autograd.grad(loss, logits, retain_graph=True)

    return bench.rotated((4.0 + 12.0 + 6.0) * tokens * vocab, make, 4, 2)


LOSSES: dict[str, Callable[..., Work]] = {"loss": _loss, "loss_bwd": _loss_bwd}


def _ids(bench: Bench, vocab: int, count: int) -> Tensor:
    return torch.randint(vocab, (count,), device=bench.device)


def _square(
    nbytes_per_score: float, function: Callable[[Bench, Tensor, Tensor], Callable[[], object]]
) -> Callable[..., Work]:
    """An op of unfused attention on batch x heads x length x length scores, with the causal mask."""

    def prepare(bench: Bench, batch: int, heads: int, length: int) -> Work:
        mask = torch.ones(length, length, dtype=torch.bool, device=bench.device).triu(1)
        nbytes = nbytes_per_score * batch * heads * length * length
        return bench.rotated(nbytes, lambda: function(bench, bench.random(batch, heads, length, length), mask), 2, 8)

    return prepare


def _softmax_bwd(bench: Bench, scores: Tensor, mask: Tensor) -> Callable[[], object]:
    scores = scores.detach().requires_grad_()
    out, gradient = torch.softmax(scores, -1), bench.random(*scores.shape)
    return lambda: torch.autograd.grad(out, scores, gradient, retain_graph=True)


SQUARE: dict[str, Callable[..., Work]] = {
    "scores_scale": _square(4, lambda bench, x, mask: lambda: x * 0.125),
    "scores_mask": _square(4, lambda bench, x, mask: lambda: x.masked_fill(mask, float("-inf"))),
    "scores_softmax": _square(4, lambda bench, x, mask: lambda: torch.softmax(x, -1)),
    "scores_softmax_bwd": _square(6, _softmax_bwd),
}


def _adamw(dtype: torch.dtype, *, fused: bool) -> Callable[..., Work]:
    """`torch.optim.AdamW`: gradient, parameter and both states read, the last three written."""

    def prepare(bench: Bench, tensors: int, elements: int) -> Work:
        parameters = [torch.nn.Parameter(bench.random(elements, dtype=dtype).clone()) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = bench.random(elements, dtype=dtype)
        optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=fused, foreach=not fused)
        nbytes = 7.0 * dtype.itemsize * tensors * elements
        return Work(lambda i: optimizer.step(), nbytes=nbytes, launches=-(-tensors // 16) * (1 if fused else 12))

    return prepare


def _foreach(
    dtype: torch.dtype,
    factor: float,
    function: Callable[[list[Tensor], list[Tensor]], object],
    source: torch.dtype = FP32,
) -> Callable[..., Work]:
    def prepare(bench: Bench, tensors: int, elements: int) -> Work:
        first = [bench.fresh(elements, dtype=dtype) for _ in range(tensors)]
        second = [bench.random(elements, dtype=source) for _ in range(tensors)]
        return Work(lambda i: function(first, second), nbytes=factor * tensors * elements, launches=-(-tensors // 16))

    return prepare


def _clip(first: list[Tensor], second: list[Tensor]) -> object:
    """Clip gradients as `torch.nn.utils.clip_grad_norm_` does."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(first)))
    return torch._foreach_mul_(first, torch.clamp(1e6 / (norm + 1e-6), max=1.0))


OPTIMIZERS: dict[str, Callable[..., Work]] = {
    "adamw_fused_fp32": _adamw(FP32, fused=True),
    "adamw_fused_bf16": _adamw(BF16, fused=True),
    "adamw_foreach_fp32": _adamw(FP32, fused=False),
    "adamw_foreach_bf16": _adamw(BF16, fused=False),
    "foreach_copy_fp32_bf16": _foreach(BF16, 6, torch._foreach_copy_),
    "foreach_copy_bf16": _foreach(BF16, 4, torch._foreach_copy_, BF16),
    "foreach_zero_fp32": _foreach(FP32, 4, lambda first, second: torch._foreach_zero_(first)),
    "foreach_norm_fp32": _foreach(FP32, 4, lambda first, second: torch._foreach_norm(first)),
    "clip_grad_fp32": _foreach(FP32, 12, _clip),
}


def _rotary(*, backward: bool) -> Callable[..., Work]:
    """x cos + rotate_half(x) sin on queries, as Llama's reference code: five kernels."""

    def prepare(bench: Bench, batch: int, length: int, heads: int, head_dim: int) -> Work:
        cos, sin = (bench.random(length, 1, head_dim) for _ in range(2))

        def rotate(x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-b, a), dim=-1) * sin

        def make() -> Callable[[], object]:
            x = bench.random(batch, length, heads, head_dim)
            if not backward:
                return lambda: rotate(x)
            x = x.detach().requires_grad_()
            out, gradient = rotate(x), bench.random(*x.shape)
            return lambda: torch.autograd.grad(out, x, gradient, retain_graph=True)

        # x cos: 2; -b: 1; join: 2; x sin: 2; sum: 3 tensors
        return bench.rotated(20.0 * batch * length * heads * head_dim, make, 10, 16)

    return prepare


ROTARY: dict[str, Callable[..., Work]] = {"rope": _rotary(backward=False), "rope_bwd": _rotary(backward=True)}


def _choices(tensors: Callable[[int], int], make: Callable[[Tensor, Tensor, Tensor], object]) -> Callable[..., Work]:
    """Return an op on the experts' results, ``top_k`` rows of each token, and their weights.

    ``tensors``: how many tensors of one row per token it reads or writes, by ``top_k``.
    """

    def prepare(bench: Bench, tokens: int, top_k: int, width: int) -> Work:
        def one() -> Callable[[], object]:
            out, weights = bench.random(tokens, top_k, width), bench.random(tokens, top_k, 1)
            gradient = bench.random(tokens, 1, width)
            return lambda: make(out, weights, gradient)

        return bench.rotated(2.0 * tensors(top_k) * tokens * width, one)

    return prepare


CHOICES: dict[str, Callable[..., Work]] = {
    "choices_weigh": _choices(lambda k: 2 * k, lambda out, weights, gradient: out * weights),
    "choices_weigh_bwd": _choices(lambda k: 1 + k, lambda out, weights, gradient: gradient * weights),
    "choices_weights_bwd": _choices(lambda k: 1 + 2 * k, lambda out, weights, gradient: gradient * out),
    "choices_sum": _choices(lambda k: k + 1, lambda out, weights, gradient: out.sum(1)),
    "choices_dot": _choices(lambda k: k, lambda out, weights, gradient: out.sum(-1)),
}
