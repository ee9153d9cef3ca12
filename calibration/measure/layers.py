"""Seconds of the host to issue layers as training does: modules, autograd, the adding up of gradients, hooks of DDP and
FSDP, collectives, pipelines. The layers are narrow (`calibration.narrow`), no optimizer step is taken, and the host's
clock is read before the GPU has been waited for.

``part``: a row of modules of one kind. ``model``: a whole model, its loss and all; ``split``: the gradients of inputs
and of weights of its layers one after the other, as zero-bubble schedules compute them; ``input``: those of inputs
alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from calibration.measure.bench import Bench, MeasuredFigures
from calibration.measure.case import Case, Level, Scalar
from calibration.measure.hosts import beside_probes
from calibration.measure.team import Team
from calibration.narrow import DEPTH, HEADS, JOINED, LAYOUTS, SEQ, WIDTH, narrow
from calibration.train.experts import ExpertsModule, regrouped
from calibration.train.host import Probe
from calibration.train.layers import AttentionModule, Builder, Layer, Linear, Norm, ReplicaPlace
from calibration.train.process_groups import ProcessGroups
from calibration.train.trainer import Trainer

PARTS = ("linear", "linear_no_bias", "layer_norm", "rms_norm", "attention", "rope", "gelu", "residual", *JOINED)
#: Layouts on several GPUs, and the models that are measured in them.
SHARED = {
    "tp": ("gpt", "llama"),
    "sp": ("gpt", "llama"),
    "ddp": ("gpt", "llama"),
    "ddp_buckets": ("gpt",),
    "fsdp": ("gpt", "llama"),
    "fsdp_kept": ("gpt", "llama"),
    "ep": ("moe", "moe_32"),
    "gpipe": ("gpt",),
    "1f1b": ("gpt", "llama"),
    "interleaved": ("gpt",),
    "interleaved_zb": ("gpt",),
    "zb_v": ("gpt",),
}


#: Layers of the models: the seconds of one follow from the difference.
DEPTHS = (4, 12)


def cases(level: Level, gpus: int) -> Iterator[Case]:
    """Yield the cases on one GPU and, where there are several ``gpus``, in the layouts of two."""
    if level == "smoke":
        yield Case("layers", "passes", {"part": "linear"})
        yield Case("layers", "split", {"model": "gpt", "layers": 1})
        if gpus > 1:
            yield _case("passes", "llama", 2, gpus, layout="1f1b", batches=2)
        return
    yield from _on_one_gpu()
    if gpus > 1:
        for layout, models in SHARED.items():
            for model in models:
                yield from _in_layout(layout, model, gpus)


def _on_one_gpu() -> Iterator[Case]:
    """Yield the cases of rows of modules and of models."""
    for op in ("forward", "passes"):
        for part in PARTS:
            yield Case("layers", op, {"part": part})
        for model in ("gpt", "llama", "moe"):
            for layers in DEPTHS:
                yield _case(op, model, layers)
    for model in ("gpt", "llama"):
        yield _case("passes", model, DEPTHS[-1], batches=4)
        yield _case("passes", model, DEPTHS[-1], recompute="full")
        for layers in DEPTHS:
            for op in ("split", "input"):
                yield _case(op, model, layers)


def _in_layout(layout: str, model: str, gpus: int) -> Iterator[Case]:
    """Yield the cases of a model in a layout: pipelines in two depths, all others with one micro-batch and with three.

    Where parameters stay whole, a forward pass after another has nothing to gather, and is not measured.
    """
    if "pp" in LAYOUTS[layout]:
        for layers in DEPTHS:
            yield _case("passes", model, layers, gpus, layout=layout, batches=8)
        return
    if layout != "fsdp_kept":
        yield _case("forward", model, DEPTHS[-1], gpus, layout=layout, batches=1)
    for batches in (1, 3):
        yield _case("passes", model, DEPTHS[-1], gpus, layout=layout, batches=batches)


def _case(op: str, model: str, layers: int, gpus: int = 1, **params: Scalar) -> Case:
    """Return the case of a model on one GPU, or of its layout on several."""
    every: dict[str, Scalar] = {"model": model, "layers": layers, **params}
    return Case("layers", op, every, tuple(range(gpus)), limit_s=60.0) if gpus > 1 else Case("layers", op, every)


def measure(case: Case, bench: Bench, probe: Probe | None, team: Team | None) -> MeasuredFigures:
    """Return the host's seconds, see `calibration.measure.hosts`.

    Seconds in which it waits for the GPU and the other hosts, to be told how many tokens it gets, do not count.
    """
    waiting = _Waiting(bench)
    with _prepared(case, bench, waiting) as issue:

        def run() -> float:
            before, began = waiting.seconds, time.perf_counter()
            issue()
            return time.perf_counter() - began - (waiting.seconds - before)

        return beside_probes(run, bench, probe, team)


class _Waiting:
    """Tells what the host waits for its GPU from what reading numbers takes it."""

    def __init__(self, bench: Bench) -> None:
        self.seconds = 0.0
        self._bench = bench

    def read(self, numbers: Tensor) -> list[Any]:
        """`torch.Tensor.tolist`, on a GPU that has nothing left to do."""
        began = time.perf_counter()
        self._bench.synchronize()
        self.seconds += time.perf_counter() - began
        values: list[Any] = numbers.tolist()
        return values


@contextlib.contextmanager
def _prepared(case: Case, bench: Bench, waiting: _Waiting) -> Iterator[Callable[[], object]]:
    if "part" in case.params:
        yield _row(case, bench)
        return
    if case.op in ("split", "input"):
        yield _split(case, bench)
        return
    groups = ProcessGroups.from_layout(narrow(case.params).parallelism, dist.get_rank() if len(case.ranks) > 1 else 0)
    if groups is None:
        yield lambda: None
        return
    trainer = Trainer(narrow(case.params), groups, bench.device)
    for stage in trainer.modules:
        for module in stage.modules():
            if isinstance(module, ExpertsModule):
                module.read = waiting.read
    size = trainer.workload.training.micro_batch
    inputs = trainer.inputs[:size]
    yield (lambda: trainer.modules[0](inputs)) if case.op == "forward" else trainer.forward_backward
    trainer.close()


def _row(case: Case, bench: Bench) -> Callable[[], object]:
    """`DEPTH` modules, one after another or, where the output is not as wide as the input, beside each other."""
    part, llama = str(case.params["part"]), "llama"
    model = llama if part in ("rms_norm", "rope", "linear_no_bias") else "gpt"
    builder = Builder(narrow({"model": model, "layers": 1}), ReplicaPlace(bench.device))
    modules, width = _modules(part, builder), 3 * WIDTH if part == "attention" else WIDTH
    beside = part == "attention"
    parameters = [one for module in modules if isinstance(module, nn.Module) for one in module.parameters()]
    shape = (1, SEQ, HEADS, WIDTH // HEADS) if part == "rope" else (SEQ, width)
    inputs = [bench.fresh(*shape).requires_grad_() for _ in (modules if beside else (0,))]

    def forward() -> Sequence[Tensor]:
        if beside:
            return [module(x) for module, x in zip(modules, inputs, strict=True)]
        x = inputs[0]
        for module in modules:
            x = module(x)
        return [x]

    gradients = [bench.fresh(*y.shape) for y in forward()]

    def passes() -> None:
        for one in (*parameters, *inputs):
            one.grad = None
        torch.autograd.backward(list(forward()), gradients)

    return forward if case.op == "forward" else passes


def _modules(part: str, builder: Builder) -> list[Callable[[Tensor], Tensor]]:
    match part:
        case "linear" | "linear_no_bias":
            return [Linear(builder, f"{part}{n}", WIDTH, WIDTH, "none") for n in range(DEPTH)]
        case "layer_norm" | "rms_norm":
            return [Norm(builder) for _ in range(DEPTH)]
        case "gelu":
            return [nn.functional.gelu] * DEPTH
        case "residual":
            other = torch.randn(SEQ, WIDTH, device=builder.place.device, dtype=builder.dtype)
            return [lambda x: x + other] * DEPTH
    if part in JOINED:
        sizes = [[SEQ // JOINED[part]] * 4] * (JOINED[part] // 4)
        return [lambda x: regrouped(x, sizes)] * DEPTH
    blocks = [AttentionModule(builder, f"{part}{n}") for n in range(DEPTH)]
    if part == "rope":
        return [block._rotated for block in blocks]
    for block in blocks:
        block.qkv, block.proj = nn.Identity(), nn.Identity()
    return list(blocks)


def _split(case: Case, bench: Bench) -> Callable[[], object]:
    """Forward, gradients of the input, and where asked for of the weights: `torch.distributed.pipelining`'s own
    functions."""
    builder = Builder(narrow(case.params), ReplicaPlace(bench.device))
    with torch.device(bench.device):
        layers = nn.Sequential(*(Layer(builder, number) for number in range(int(case.params["layers"]))))
    x, gradient = bench.fresh(SEQ, WIDTH), bench.fresh(SEQ, WIDTH)

    def run() -> None:
        for one in layers.parameters():
            one.grad = None
        inputs = x.detach().requires_grad_()
        out = layers(inputs)
        _, groups = stage_backward_input([out], [gradient], [inputs], iter(layers.parameters()))
        if case.op == "split":
            stage_backward_weight(iter(layers.parameters()), groups)

    return run
