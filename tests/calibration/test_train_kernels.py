"""What `calibration.train` launches is what `simulator.models` says that plain PyTorch launches.

Parts of a tiny model run on the CPU under a dispatch mode that records every operation of PyTorch: each is a kernel on
a GPU, but for those that `SEVERAL` lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
#: Of collectives that have another name from torch 2.13 on.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from calibration.train import experts, layers  # noqa: E402
from calibration.train.tensor_parallel import TensorGroup  # noqa: E402
from simulator import models  # noqa: E402
from simulator.config import Workload, load_workload  # noqa: E402
from simulator.models import Part, Turn  # noqa: E402
from simulator.program import (  # noqa: E402
    Attention,
    Comm,
    GroupedMatmul,
    Matmul,
    Memory,
    kernels_of,
)
from tests.support.grids import one_in  # noqa: E402

BATCH, SEQ, HIDDEN = 2, 128, 256
TOKENS = BATCH * SEQ
LLAMA: dict[str, Any] = {
    "layers": 1,
    "hidden": HIDDEN,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 640,
    "vocab": 512,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rope",
    "bias": False,
    "tied_embeddings": False,
}
GPT = LLAMA | {"kv_heads": 4, "activation": "gelu", "norm": "layernorm", "position": "learned", "bias": True}
MOE = LLAMA | {"moe": {"experts": 8, "top_k": 2, "ffn_hidden": 384}}
MODELS = {"llama": LLAMA, "gpt": GPT, "geglu": GPT | {"activation": "geglu"}, "moe": MOE}
#: Kernels that move less than this share of a row of activations are index arithmetic, scalars and the like.
SMALL = 0.15 * TOKENS * HIDDEN * 2


def workload(name: str, recompute: str = "none", **layout: Any) -> Workload:
    training = {
        "seq": SEQ,
        "micro_batch": BATCH,
        "global_batch": 2 * BATCH,
        "grad_dtype": "bf16",
        "optimizer": {"master_weights": False, "state_dtype": "bf16"},
        "recompute": recompute,
    }
    sections = {"model": MODELS[name], "training": training, "parallelism": layout}
    return load_workload({**sections, "framework": "pytorch", "cluster": "dgx_h100"})


def nbytes(tensors: list[Any]) -> float:
    """Of distinct tensors; of an expanded one what there is."""
    sizes = {}
    for one in tensors:
        there = 1
        for size, stride in zip(one.shape, one.stride(), strict=True):
            there *= size if stride else 1
        sizes[one.data_ptr(), tuple(one.shape)] = there * one.element_size()
    return float(sum(sizes.values()))


class Recorder(TorchDispatchMode):
    """Products as ("matmul", sizes), fused attention, collectives as ("comm", op, bytes), and bytes of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[tuple[int, ...]] = Counter()
        self.grouped: Counter[tuple[int, ...]] = Counter()
        self.attention = 0
        self.comms: Counter[tuple[str, float]] = Counter()
        self.memory: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        read, written = (
            [one for one in torch.utils._pytree.tree_leaves(of) if isinstance(one, torch.Tensor)] for of in (args, out)
        )
        if func.is_view or name in ("aten::_unsafe_view", "aten::detach", "aten::empty_like", "aten::new_empty"):
            return out
        if name.startswith("c10d::"):
            self._comm(name, read)
        elif name in ("aten::mm", "aten::addmm"):
            a, b = read[-2:]
            self.products[tuple(sorted((a.shape[0], a.shape[1], b.shape[1])))] += 1
        elif "scaled_dot_product" in name:
            self.attention += 1
        else:
            self.memory += [size for size in _kernels(name, read, written) if size > SMALL]
        return out

    def _comm(self, name: str, tensors: list[Any]) -> None:
        largest = max(one.numel() * one.element_size() for one in tensors)
        self.comms[name.removeprefix("c10d::").strip("_"), float(largest)] += 1


def _kernels(name: str, read: list[Any], written: list[Any]) -> Iterator[float]:
    """Bytes that each kernel of an operation moves."""
    match name:
        case "aten::native_layer_norm_backward":  # of the input, and of the parameters
            grad, x = read[:2]
            yield nbytes([grad, x]) + nbytes(written[:1])
            yield nbytes([grad, x]) + nbytes(written[1:])
        case "aten::embedding":
            yield 2 * nbytes(written)
        case "aten::embedding_dense_backward" if written[0].shape[0] == SEQ:  # positions: a sum
            yield nbytes(read[:1]) + nbytes(written)
        case "aten::embedding_dense_backward":  # cleared, and added to
            yield nbytes(written)
            yield 2 * nbytes(read[:1])
        case "aten::nll_loss_forward":  # a number per token
            yield 0.0
        case "aten::nll_loss_backward":  # cleared but for those
            yield nbytes(written)
        case "aten::index_select":
            yield 2 * nbytes(written)
        case "aten::cat":
            yield 2 * nbytes(written)
        case _:  # tables of rotations are small beside what is rotated in a model of usual size
            largest = max(one.numel() for one in (*read, *written))
            yield nbytes([one for one in read if one.numel() > 0.6 * largest]) + nbytes(written)


def expected(ops: tuple[Any, ...]) -> Recorder:
    """What the simulator has the GPU do, in the recorder's terms."""
    found = Recorder()
    for op in ops:
        if isinstance(op, Comm):
            found.comms[op.op, op.nbytes] += 1
            continue
        for one in kernels_of(op):
            match one.kernel:
                case Matmul() as product:
                    found.products[tuple(sorted((product.m, product.n, product.k)))] += 1
                case GroupedMatmul() as products:
                    found.grouped[tuple(sorted((sum(products.tokens), products.n, products.k)))] += 1
                case Attention():
                    found.attention += 1
                case Memory() as kernel if kernel.bytes > SMALL:
                    found.memory.append(kernel.bytes)
    return found


class Grouped(torch.autograd.Function):
    """Grouped products as the one kernel each that they are on a GPU."""

    recorder: Recorder

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, loads: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.loads = loads.tolist()
        with _disable_current_modes():
            y = torch.cat([F.linear(part, w) for part, w in zip(x.split(ctx.loads), weight, strict=True)])
        Grouped.recorder.grouped[tuple(sorted((len(x), *weight.shape[1:])))] += 1
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        parts = [(g, part) for g, part in zip(grads[0].split(ctx.loads), x.split(ctx.loads), strict=True)]
        with _disable_current_modes():
            dx = torch.cat([g @ w for (g, _), w in zip(parts, weight, strict=True)])
            dw = torch.stack([g.t() @ part for g, part in parts])
        Grouped.recorder.grouped[tuple(sorted((len(x), *weight.shape[1:])))] += 2
        return dx, dw, None


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm is one kernel there, forward and for either gradient, like LayerNorm; here it is a dozen operations."""
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: F.layer_norm(x, shape, weight, None, eps))
    monkeypatch.setattr(experts, "grouped", Grouped.apply)


def compare(module: Any, part: Part, first: Part, *inputs: Any) -> None:
    """Forward, backward of a step's first micro-batch, and of a later one."""
    for turn in (first, part):
        for parameter in module.parameters():
            parameter.grad = None if turn is first else torch.zeros_like(parameter)
        for one in inputs:
            one.grad = None
        forward, backward = Recorder(), Recorder()
        Grouped.recorder = forward
        with forward:
            out = module(*inputs)
        gradient = torch.randn_like(out) if out.dim() else torch.ones_like(out)
        Grouped.recorder = backward
        with backward:
            out.backward(gradient)
        agree(forward, expected(turn.forward))
        agree(backward, expected(turn.backward))


def agree(found: Recorder, told: Recorder) -> None:
    assert found.products == told.products
    assert found.grouped == told.grouped
    assert found.attention == told.attention
    assert sum(found.comms.values()) == sum(told.comms.values())
    assert sorted(size for _, size in found.comms.elements()) == sorted(size for _, size in told.comms.elements())
    # Weights of norms, statistics and biases are in none of the simulator's kernels.
    found_sizes, told_sizes = sorted(found.memory), sorted(told.memory)
    assert len(found_sizes) == len(told_sizes), f"\n{found_sizes}\n{told_sizes}"
    for one, other in zip(found_sizes, told_sizes, strict=True):
        assert one == pytest.approx(other, rel=0.03), f"\n{found_sizes}\n{told_sizes}"


def parts(work: Workload, index: int) -> tuple[Part, Part]:
    return (
        models.stage_parts(work, 0)[index],
        models.stage_parts(work, 0, turn=Turn(first=True))[index],
    )


def activation(rows: int = TOKENS) -> Any:
    return torch.randn(rows, HIDDEN, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer(name: str) -> None:
    work = workload(name)
    builder = layers.Builder(work, layers.ReplicaPlace(torch.device("cpu")))
    compare(layers.Layer(builder, 0), *parts(work, 1), activation())


class Again(torch.nn.Module):  # type: ignore[misc]
    """A layer that is run again before its backward pass, as `calibration.train.layers.StageModule` does."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def recomputed(work: Any) -> list[Part]:
    return [replace(part, backward=(*part.recompute, *part.backward)) for part in parts(work, 1)]


@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_a_layer_that_is_run_again_stops_at_the_last_tensor_that_is_kept(name: str) -> None:
    """Not the whole layer: autograd's last product keeps its input first, and neither it nor the sum runs again."""
    work = workload(name, "full")
    builder = layers.Builder(work, layers.ReplicaPlace(torch.device("cpu")))
    compare(Again(layers.Layer(builder, 0)), *recomputed(work), activation())


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_a_split_layer_that_is_run_again_sums_once_more(name: str, rank_of_two: None) -> None:
    """Its product is a function of the trainer's own, which keeps what it keeps when it returns."""
    work = workload(name, "full", tp=2)
    builder = layers.Builder(work, layers.ReplicaPlace(torch.device("cpu"), TensorGroup(dist.group.WORLD, 2, 0, True)))
    compare(Again(layers.Layer(builder, 0)), *recomputed(work), activation(TOKENS // 2))


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_the_embedding(name: str) -> None:
    work = workload(name)
    builder = layers.Builder(work, layers.ReplicaPlace(torch.device("cpu")))
    compare(layers.Embedding(builder), *parts(work, 0), torch.randint(512, (BATCH, SEQ)))


def test_the_head_and_the_loss() -> None:
    work, place = workload("llama"), layers.ReplicaPlace(torch.device("cpu"))
    head, loss, targets = layers.Head(layers.Builder(work, place), None), layers.loss_of(work, place), None
    targets = torch.randint(512, (BATCH, SEQ))

    class WithLoss(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: Any) -> Any:
            return loss(self.head(x), targets)

    compare(WithLoss(), *parts(work, 2), activation())


@pytest.fixture
def rank_of_two() -> Iterator[None]:
    """The first of two ranks, whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_split_over_two_ranks(name: str, sequence_parallel: bool, rank_of_two: None) -> None:
    work = workload(name, tp=2, sequence_parallel=sequence_parallel)
    tensor = TensorGroup(dist.group.WORLD, 2, 0, sequence_parallel)
    builder = layers.Builder(work, layers.ReplicaPlace(torch.device("cpu"), tensor))
    compare(layers.Layer(builder, 0), *parts(work, 1), activation(TOKENS // 2 if sequence_parallel else TOKENS))


def test_experts_of_two_ranks(rank_of_two: None) -> None:
    """The host reads the counts of both ranks, of which the other's are not there: it is given this rank's for them."""
    work = workload("moe", dp=2, ep=2)
    place = layers.ReplicaPlace(torch.device("cpu"), expert_group=dist.group.WORLD, ep=2)
    layer = layers.Layer(layers.Builder(work, place), 0)
    gather = dist.all_gather_into_tensor

    def gathered(out: Any, x: Any, group: Any = None) -> None:
        gather(out, x, group=group)
        with _disable_current_modes():
            out.copy_(x.repeat(2))

    dist.all_gather_into_tensor = gathered
    try:
        compare(layer, *parts(work, 1), activation())
    finally:
        dist.all_gather_into_tensor = gather


def test_rows_are_put_in_another_order_only_where_there_is_one() -> None:
    """Two experts with parts of three ranks: the first of each rank, then the second. Rows of one expert, or of one
    rank, lie in order already, and are not copied."""
    rows = torch.arange(12)
    assert experts.regrouped(rows, [[1, 3], [2, 2], [3, 1]]).tolist() == [0, 4, 5, 8, 9, 10, 1, 2, 3, 6, 7, 11]
    assert experts.regrouped(rows, [[4, 4, 4]]) is rows
    assert experts.regrouped(rows, [[4], [4], [4]]) is rows
