"""Seconds of the host to issue one op in eager PyTorch, on tensors so small that the GPU never holds it up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibration.measure.bench import Bench
from calibration.measure.case import Case, Level, Work

WorkMaker = Callable[[Bench], Work]
ROWS, WIDTH = 64, 256


def cases(level: Level, gpus: int) -> Iterator[Case]:
    for op in OPS:
        yield Case("launch", op)
    for op in ("optimizer_fused", "optimizer_foreach", "zero_grad", "clip_grad"):
        for tensors in {"smoke": (4,), "quick": (100,)}.get(level, (16, 100, 300)):
            yield Case("launch", op, {"tensors": tensors})
    for op in ("block_fwd", "block_bwd"):
        for kind in ("gpt", "llama"):
            yield Case("launch", op, {"model": kind})


def prepare(case: Case, bench: Bench) -> Work:
    if "tensors" in case.params:
        return _over_parameters(bench, case.op, int(case.params["tensors"]))
    if "model" in case.params:
        return _block(bench, str(case.params["model"]), backward=case.op == "block_bwd")
    return OPS[case.op](bench)


def _on(*tensors: tuple[int, ...], grad: bool = False) -> Callable[[Callable[..., object]], WorkMaker]:
    """Work of a function of random tensors of these shapes, recorded by autograd if ``grad``."""

    def maker(function: Callable[..., object]) -> WorkMaker:
        def make(bench: Bench) -> Work:
            inputs = [bench.random(*shape).detach().requires_grad_(grad) for shape in tensors]
            return Work(lambda i: function(*inputs), launches=3)

        return make

    return maker


def _gradient(*tensors: tuple[int, ...]) -> Callable[[Callable[..., Tensor]], WorkMaker]:
    """Work of the gradients of such a function, through autograd's engine."""

    def maker(function: Callable[..., Tensor]) -> WorkMaker:
        def make(bench: Bench) -> Work:
            inputs = [bench.random(*shape).detach().requires_grad_() for shape in tensors]
            out = function(*inputs)
            gradient = bench.random(*out.shape)
            return Work(lambda i: torch.autograd.grad(out, inputs, gradient, retain_graph=True), launches=6)

        return make

    return maker


X, W, V, HEADS = (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,), (1, 4, ROWS, 64)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, V, weight, bias)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, V, weight, 1e-5)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1)


def _nothing(bench: Bench) -> Work:
    """A kernel with no tensors: the least that a launch costs."""
    if not bench.cuda:
        return Work(lambda i: None)
    return Work(lambda i: torch.cuda._sleep(1))


def _event(bench: Bench) -> Work:
    if not bench.cuda:
        return Work(lambda i: None)
    event = torch.cuda.Event()
    return Work(lambda i: event.record())


def _stream(bench: Bench) -> Work:
    if not bench.cuda:
        return Work(lambda i: None)
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    return Work(lambda i: stream.wait_event(event))


def _synchronize(bench: Bench) -> Work:
    """A kernel and the wait for it: the round trip to the GPU."""
    x = bench.random(*X)

    def run(i: int) -> None:
        x.add(1.0)
        bench.synchronize()

    return Work(run)


def _item(bench: Bench) -> Work:
    x = bench.random(1)
    return Work(lambda i: x.item())


def _cross_entropy(bench: Bench) -> Work:
    logits, labels = (
        bench.random(ROWS, WIDTH).requires_grad_(),
        torch.zeros(ROWS, dtype=torch.long, device=bench.device),
    )
    return Work(lambda i: F.cross_entropy(logits.float(), labels), launches=4)


def _embedding(bench: Bench) -> Work:
    table, ids = bench.random(*W).requires_grad_(), torch.zeros(ROWS, dtype=torch.long, device=bench.device)
    return Work(lambda i: F.embedding(ids, table))


def _autocast_linear(bench: Bench) -> Work:
    layer, x = nn.Linear(WIDTH, WIDTH, device=bench.device), bench.random(*X)

    def run(i: int) -> object:
        with torch.autocast(bench.device.type, dtype=torch.bfloat16):
            return layer(x)

    return Work(run, launches=4)


def _module(make: Callable[[], nn.Module]) -> WorkMaker:
    def maker(bench: Bench) -> Work:
        module, x = make().to(bench.device, torch.bfloat16), bench.random(*X)
        return Work(lambda i: module(x), launches=2)

    return maker


OPS: dict[str, WorkMaker] = {
    "empty_kernel": _nothing,
    "event_record": _event,
    "stream_wait": _stream,
    "round_trip": _synchronize,
    "item": _item,
    "empty": lambda bench: Work(lambda i: torch.empty(X, device=bench.device)),
    "view": _on(X)(lambda x: x.view(WIDTH, ROWS)),
    "mm": _on(X, W)(lambda x, w: torch.mm(x, w)),
    "add": _on(X, X)(torch.add),
    "add_inplace": _on(X, X)(lambda x, y: y.add_(x)),
    "copy": _on(X, X)(lambda x, y: y.copy_(x)),
    "cast": _on(X)(lambda x: x.float()),
    "cat": _on(X, X)(lambda x, y: torch.cat((x, y))),
    "sum": _on(X)(lambda x: x.sum(0)),
    "gelu": _on(X)(F.gelu),
    "gelu_grad": _on(X, grad=True)(F.gelu),
    "gelu_bwd": _gradient(X)(F.gelu),
    "silu_mul": _on(X, X, grad=True)(lambda x, y: F.silu(x) * y),
    "add_grad": _on(X, X, grad=True)(torch.add),
    "linear": _on(X, W)(F.linear),
    "linear_grad": _on(X, W, grad=True)(F.linear),
    "linear_bias_grad": _on(X, W, V, grad=True)(F.linear),
    "linear_bwd": _gradient(X, W)(F.linear),
    "linear_bias_bwd": _gradient(X, W, V)(F.linear),
    "linear_module": _module(lambda: nn.Linear(WIDTH, WIDTH)),
    "linear_autocast": _autocast_linear,
    "layer_norm_grad": _on(X, V, V, grad=True)(_norm),
    "layer_norm_bwd": _gradient(X, V, V)(_norm),
    "rms_norm_grad": _on(X, V, grad=True)(_rms),
    "rms_norm_bwd": _gradient(X, V)(_rms),
    "dropout_grad": _on(X, grad=True)(_drop),
    "dropout_bwd": _gradient(X)(_drop),
    "softmax_grad": _on(X, grad=True)(lambda x: torch.softmax(x, -1)),
    "attention_grad": _on(HEADS, HEADS, HEADS, grad=True)(_attend),
    "attention_bwd": _gradient(HEADS, HEADS, HEADS)(_attend),
    "embedding_grad": _embedding,
    "cross_entropy_grad": _cross_entropy,
}


def _over_parameters(bench: Bench, op: str, tensors: int) -> Work:
    parameters = [nn.Parameter(bench.fresh(64)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = bench.fresh(64)
    launches = -(-tensors // 16) * 12
    match op:
        case "zero_grad":
            optimizer = torch.optim.AdamW(parameters)
            return Work(lambda i: optimizer.zero_grad(set_to_none=False), launches=launches)
        case "clip_grad":
            return Work(lambda i: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True), launches=launches)
    fused = op == "optimizer_fused"
    stepper = torch.optim.AdamW(parameters, lr=1e-6, fused=fused, foreach=not fused)
    return Work(lambda i: stepper.step(), launches=launches)


class NarrowLayer(nn.Module):
    """A transformer layer as people write it: GPT's (LayerNorm, GELU, biases), Llama's (RMSNorm, rotation, SwiGLU)."""

    def __init__(self, llama: bool, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.llama, self.heads = llama, heads
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=not llama)
        self.out = nn.Linear(width, width, bias=not llama)
        self.up = nn.Linear(width, 4 * width, bias=not llama)
        self.gate = nn.Linear(width, 4 * width, bias=False) if llama else None
        self.down = nn.Linear(4 * width, width, bias=not llama)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).unbind(2)
        if self.llama:
            q, k = (one * cos + _half_turned(one) * sin for one in (q, k))
        heads = _attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        hidden = F.silu(self.gate(y)) * self.up(y) if self.gate is not None else F.gelu(self.up(y))
        return x + self.down(hidden)


def _half_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def _block(bench: Bench, kind: str, *, backward: bool) -> Work:
    block = NarrowLayer(kind == "llama").to(bench.device, torch.bfloat16)
    x = bench.random(1, ROWS, WIDTH).detach().requires_grad_()
    cos, sin = (bench.random(ROWS, 1, WIDTH // 4) for _ in range(2))
    if not backward:
        return Work(lambda i: block(x, cos, sin), launches=30)
    out, gradient = block(x, cos, sin), bench.random(1, ROWS, WIDTH)
    inputs = [x, *block.parameters()]
    return Work(lambda i: torch.autograd.grad(out, inputs, gradient, retain_graph=True), launches=70)
