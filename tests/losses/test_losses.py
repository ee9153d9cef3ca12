"""Losses: what each launches and keeps, beside what they took on an H200 (see `tests.support.measured`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from simulator.api import run
from simulator.config import Workload, load_workload
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.losses import LOSSES
from simulator.models import Turn
from simulator.models.linear import linear
from simulator.models.shapes import FrameworkShapes, shapes
from simulator.models.vocabulary import head, loss_options
from simulator.operations.nodes import Node, Op
from simulator.program import Collective, Compute, Matmul, Memory, StepPhase
from simulator.units import GiB
from tests.support.measured import measured, played, profile

TOKENS, HIDDEN, VOCAB = 8192, 4096, 128256
#: Elements of all logits, of the weight and of the input.
LOGITS, WEIGHT, INPUT = TOKENS * VOCAB, HIDDEN * VOCAB, TOKENS * HIDDEN
#: What was measured -> loss, its options, and whether the framework is compiled.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "eager": ("eager", {}, False),
    "compiled": ("compiled", {}, True),
    "chunked": ("chunked", {}, False),
    "chunked recomputed": ("chunked", {"recompute": True}, False),
    "chunked compiled": ("chunked", {}, True),
    "fused_linear": ("fused_linear", {}, False),
}


def workload(loss: Any = "eager", *, compiled: bool = False, **changes: Any) -> Workload:
    """A model of one layer with the vocabulary of Llama 3, weights and gradients in bf16."""
    sizes = {"layers": 1, "hidden": HIDDEN, "heads": 32, "ffn_hidden": 14336, "vocab": VOCAB, "tied_embeddings": False}
    states = {"master_weights": False, "state_dtype": "bf16"}
    training = {"seq": TOKENS, "global_batch": 1, "grad_dtype": "bf16", "optimizer": states, "loss": loss}
    data = {
        "name": "loss",
        "model": {**sizes, "activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False},
        "training": training,
        "framework": {"name": "pytorch", "compile": compiled},
        "parallelism": {"dp": 1},
        "cluster": "dgx_h200",
    }
    return load_workload({**data, **changes})


def loss_nodes(work: Workload) -> tuple[FrameworkShapes, tuple[Node, ...]]:
    """Projection and loss of the first micro-batch, whose gradients are added to nothing."""
    z = shapes(work, turn=Turn(first=True))
    projection = linear(z, "head", "logits", z.vocab, z.hidden, split="none", saved="head.normed", cached=False)
    return z, LOSSES[work.training.loss.name].nodes(z, projection, loss_options(work, z))


def case_nodes(case: str) -> tuple[Workload, tuple[Node, ...]]:
    name, options, compiled = CASES[case]
    work = workload({"name": name, **options}, compiled=compiled)
    return work, loss_nodes(work)[1]


def forward_ops(nodes: tuple[Node, ...]) -> list[Op]:
    return [op for node in nodes for op in node.forward]


def backward_ops(nodes: tuple[Node, ...]) -> list[Op]:
    return [op for node in reversed(nodes) for op in node.backward]


def products(ops: list[Op]) -> Iterator[Matmul]:
    for op in ops:
        if isinstance(op, Compute) and isinstance(op.kernel, Matmul):
            yield op.kernel


@pytest.mark.parametrize("case", CASES)
def test_projection_and_loss_take_what_they_took(case: str) -> None:
    """Within 10 %, forward and backward; the engine plays them, as the clock of products depends on what is around."""
    work, nodes = case_nodes(case)
    passes = {StepPhase.FORWARD: forward_ops(nodes), StepPhase.BACKWARD: backward_ops(nodes)}
    step_s = measured("loss")[case, "", "bf16"]["step_s"]
    assert played(passes, work.software).step_time_s == pytest.approx(step_s, rel=0.1)


@pytest.mark.parametrize("case", [case for case, (_, _, compiled) in CASES.items() if not compiled])
def test_kernels_of_the_loss_take_what_they_took(case: str) -> None:
    """Within 10 %, without products, in the profiler, which does not count the gaps between kernels.

    Inductor's are priced as other fused kernels, and are too fast (see docs/limits.md).
    """
    work, nodes = case_nodes(case)
    costs, gap = Costs.from_profile(profile(), work.software), profile().kernels.gap_s
    assert gap is not None
    ops = [op for op in (*forward_ops(nodes), *backward_ops(nodes)) if isinstance(op, Compute)]
    others = [costs.kernel_s(op.kernel, profile().gpu) - gap.value for op in ops if isinstance(op.kernel, Memory)]
    row = measured("loss")[case, "", "bf16"]
    assert sum(others) == pytest.approx(row["kernel_s"] - row["product_s"], rel=0.1)


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_what_it_was(case: str) -> None:
    """Within 5 % of what was taken beside weight and input, which were there before, and the input's gradient twice."""
    _, nodes = case_nodes(case)
    saved = [sum(tensor.nbytes for tensor in node.saved if tensor.name != "head.normed") for node in nodes]
    forward = max(sum(saved[: number + 1]) + node.forward_bytes for number, node in enumerate(nodes))
    backward = sum(saved) + max(node.grad_bytes for node in nodes)
    row = measured("loss")[case, "", "bf16"]
    assert max(forward, backward) == pytest.approx(row["peak_bytes"] - row["base_bytes"], rel=0.05)


@pytest.mark.parametrize(
    ("case", "nbytes"),
    [
        # The log-softmax, its gradient and that of its input, each in fp32.
        ("eager", 3 * 4 * LOGITS),
        # The gradient in place of the logits, and the gradients of input and weight.
        ("compiled", 2 * (LOGITS + INPUT + WEIGHT)),
        # In the forward pass, at the last chunk: logits of all in bf16, seven log-softmaxes, logits and log-softmax.
        ("chunked", (2 + 4 * 9 / 8) * LOGITS),
        # Two weight gradients and their sum.
        ("chunked recomputed", 3 * 2 * WEIGHT),
        # The same, and gradients of the logits of six chunks.
        ("chunked compiled", 3 * 2 * WEIGHT + 2 * 6 / 8 * LOGITS),
        # Both gradients, and the logits of 256 tokens.
        ("fused_linear", 2 * (WEIGHT + INPUT + 256 * VOCAB)),
    ],
)
def test_the_peak_is_made_of(case: str, nbytes: float) -> None:
    """Beside weight and input; the input's gradient, which grows chunk by chunk, counts whole in the backward pass."""
    _, nodes = case_nodes(case)
    saved = [sum(tensor.nbytes for tensor in node.saved if tensor.name != "head.normed") for node in nodes]
    forward = max(sum(saved[: number + 1]) + node.forward_bytes for number, node in enumerate(nodes))
    backward = sum(saved) + max(node.grad_bytes for node in nodes)
    whole_input = 2 * INPUT if case in ("chunked recomputed", "chunked compiled") else 0
    assert max(forward, backward) == nbytes + whole_input


@pytest.mark.parametrize("case", CASES)
def test_every_loss_computes_the_three_products(case: str) -> None:
    """2 T H V FLOPs each, whatever the chunks; recomputation does the first of them once more."""
    _, nodes = case_nodes(case)
    flops: dict[str, float] = {}
    for kernel in products([*forward_ops(nodes), *backward_ops(nodes)]):
        flops[kernel.role] = flops.get(kernel.role, 0.0) + kernel.flops
    one = 2.0 * TOKENS * HIDDEN * VOCAB
    again = 2 if case == "chunked recomputed" else 1
    assert flops == {"fwd": again * one, "dgrad": one, "wgrad": one}


@pytest.mark.parametrize(("case", "checkpoints"), [("chunked", 0), ("chunked recomputed", 8)])
def test_a_chunk_that_is_computed_again_costs_its_host_a_checkpoint(case: str, checkpoints: int) -> None:
    """Eight chunks, each in a checkpoint of its own; what it keeps is its part of the input, which is there anyway."""
    _, nodes = case_nodes(case)
    carriers = [op for op in backward_ops(nodes) if isinstance(op, Compute) and op.carries_checkpoint]
    assert len(carriers) == checkpoints
    assert all(isinstance(op.kernel, Matmul) for op in carriers)


def test_liger_has_its_gradients_before_the_backward_pass() -> None:
    """32 chunks of 256 tokens, so that logits of one are no larger than the input; backward has nothing to compute."""
    _, (node,) = case_nodes("fused_linear")
    assert len(list(products(list(node.forward)))) == 3 * 32
    assert node.backward == ()
    assert {tensor.name: tensor.nbytes for tensor in node.saved} == {
        "loss.input gradient": 2 * INPUT,
        "loss.weight gradient": 2 * WEIGHT,
    }


def test_gradients_of_chunks_are_added_up() -> None:
    """8 chunks give 7 sums, each of two tensors read and one written; a frozen projection has no gradient."""
    work = workload("chunked")
    z, (projection, _) = loss_nodes(work)
    sums = [op for op in projection.weight_grad if isinstance(op, Compute) and isinstance(op.kernel, Memory)]
    assert [op.kernel.bytes for op in sums] == [3 * 2 * WEIGHT] * 7
    frozen = linear(z, "head", "logits", z.vocab, z.hidden, split="none", saved="head.normed", cached=False)
    frozen = replace(frozen, weight_grad=(), weight_grad_bytes=0.0)
    assert LOSSES["chunked"].nodes(z, frozen, loss_options(work, z, trained=False))[0].weight_grad == ()


def test_a_frozen_projection_has_gradients_in_place_of_logits() -> None:
    """Losses of eight chunks go first, and each gives its logits up as its gradient comes: 9/8 of the logits in all."""
    work = workload("chunked", compiled=True)
    z = shapes(work)
    projection = linear(z, "head", "logits", z.vocab, z.hidden, split="none", saved="head.normed", cached=False)
    cut, loss = LOSSES["chunked"].nodes(z, projection, loss_options(work, z, trained=False))
    assert (cut.grad_bytes, cut.output_grad_bytes) == (0, 0)
    assert sum(tensor.nbytes for tensor in loss.saved) + loss.grad_bytes == 2 * LOGITS * 9 / 8 + 2 * INPUT


def test_kernels_of_chunks_have_the_tokens_of_their_products() -> None:
    """torch.chunk cuts 8,192 tokens in 7 as six of 1,171 and one of 1,166. A log-softmax reads 4 bytes a logit."""
    _, (projection, loss) = loss_nodes(workload({"name": "chunked", "chunks": 7}))
    sizes = [1171] * 6 + [1166]
    assert [product.m for product in products(list(projection.forward))] == sizes
    softmaxes = [op.kernel for op in loss.forward if isinstance(op, Compute) and op.name == "loss.log_softmax"]
    assert [kernel.read_bytes for kernel in softmaxes if isinstance(kernel, Memory)] == [
        pytest.approx(4 * size * VOCAB) for size in sizes
    ]


def test_ranks_that_split_the_vocabulary_find_maximum_and_sum_one_after_the_other() -> None:
    """All ranks' maximum is needed for the exponentials, so that no kernel can find both; without ranks one does."""
    whole, split = workload("compiled", compiled=True), workload("compiled", compiled=True, parallelism={"tp": 2})
    forward = {}
    for work in (whole, split):
        z = shapes(work, turn=Turn(first=True))
        projection = linear(z, "head", "logits", z.vocab, z.hidden, split="none", saved="head.normed", cached=False)
        options = replace(loss_options(work, z), online_softmax=True)
        _, loss = LOSSES["compiled"].nodes(z, projection, options)
        forward[z.tp] = [op.name for op in loss.forward]
    assert forward[1] == ["loss.softmax"]
    assert forward[2] == [
        "loss.max",
        "tp.all_reduce loss max",
        "tp.all_reduce loss target",
        "loss.sum_exp",
        "tp.all_reduce loss sum",
    ]


def test_a_loss_that_needs_whole_logits_is_refused_where_they_are_split() -> None:
    for name in ("chunked", "fused_linear"):
        with pytest.raises(InputError, match="whole vocabulary") as caught:
            workload(name, parallelism={"tp": 2})
        assert caught.value.key == "training.loss"
        assert workload(name, parallelism={"tp": 2, "vocab_parallel": False}).training.loss.name == name


def test_options_are_of_losses_that_work_chunk_by_chunk() -> None:
    with pytest.raises(InputError, match="chunk by chunk") as caught:
        workload({"name": "eager", "chunks": 4})
    assert caught.value.key == "training.loss.chunks"
    assert workload({"name": "chunked", "chunks": 4}).training.loss.chunks == 4


def test_megatron_s_loss_is_the_same_by_both_names() -> None:
    """Its frameworks have one loss: in place on fp32 logits, which leaves the softmax."""
    named = {name: workload(name, framework="megatron_core") for name in ("eager", "vocab_parallel")}
    kept = {name: loss_nodes(work)[1][1] for name, work in named.items()}
    assert kept["eager"] == kept["vocab_parallel"]
    assert [tensor.name for tensor in kept["eager"].saved] == ["loss.softmax"]


def test_a_chunked_loss_makes_a_million_tokens_fit() -> None:
    """Qwen3 8B, 1,048,576 tokens over 8 GPUs of 80 GB ran in 52.3 GiB with TRL's loss (github.com/huggingface/trl, pull
    request 6846), which computes chunks of 256 tokens again. Logits of 131,072 tokens would take 37 GiB in bf16."""
    training = {"seq": 1 << 20, "global_batch": 1, "recompute": "full"}
    job = {
        "name": "long",
        "model": {"preset": "qwen3-8b"},
        "framework": {"name": "pytorch", "compile": True},
        "parallelism": {"cp": 8, "zero": 3, "offload": {"activations": "cpu"}},
        "cluster": {"name": "dgx_h100", "nodes": 1},
    }
    chunks = {"name": "chunked", "chunks": (1 << 20) // 8 // 256, "recompute": True}
    memory = {
        name: run({**job, "training": {**training, "loss": loss}}).key_figures()
        for name, loss in (("chunked", chunks), ("whole", "eager"))
    }
    assert (memory["chunked"]["fits"], memory["whole"]["fits"]) == (True, False)
    assert memory["chunked"]["peak_bytes"] == pytest.approx(52.3 * GiB, rel=0.15)


def test_narrow_logits_are_not_cast() -> None:
    """The log-softmax of bf16 logits takes 2 bytes, as do its gradient and that of its input. No kernel casts."""
    _, (_, loss) = loss_nodes(workload("eager_narrow"))
    names = [op.name for op in (*loss.forward, *loss.input_grad)]
    assert names == ["loss.log_softmax", "loss.nll", "loss.nll bwd", "loss.log_softmax bwd"]
    assert sum(tensor.nbytes for tensor in loss.saved) + loss.grad_bytes == 3 * 2 * LOGITS
    log_softmax = next(op.kernel for op in loss.forward if isinstance(op, Compute))
    assert isinstance(log_softmax, Memory)
    assert log_softmax.read_bytes == log_softmax.write_bytes == 2 * LOGITS


def test_apex_s_loss_passes_over_the_logits_once_each_way() -> None:
    """Logits have 2 bytes: the forward pass reads them, the backward pass reads them and writes a gradient beside."""
    _, (_, loss) = loss_nodes(workload("fused"))
    kernels = [op.kernel for op in (*loss.forward, *loss.backward) if isinstance(op, Compute)]
    assert [(k.read_bytes, k.write_bytes) for k in kernels if isinstance(k, Memory)] == [
        (2 * LOGITS, 0),
        (2 * LOGITS, 2 * LOGITS),
    ]
    assert [tensor.nbytes for tensor in loss.saved] == [2 * LOGITS]
    assert loss.grad_bytes == 2 * LOGITS


def test_transformer_engine_s_loss_writes_its_gradient_over_the_logits() -> None:
    """The forward pass reads logits of 2 bytes, and reads and overwrites them; the backward pass multiplies the
    gradient in place: five passes. The projection has its gradient of 2 bytes a logit already, and no second one."""
    z, (projection, loss) = loss_nodes(workload("te_fused", framework="megatron_core"))
    forward, backward = (
        [
            (op.kernel.read_bytes / LOGITS, op.kernel.write_bytes / LOGITS)
            for op in ops
            if isinstance(op, Compute) and isinstance(op.kernel, Memory)
        ]
        for ops in (loss.forward, loss.backward)
    )
    assert (forward, backward) == ([(2, 0), (2, 2)], [(2, 2)])
    assert [tensor.nbytes for tensor in loss.saved] == [2 * LOGITS]
    alone = linear(z, "head", "logits", z.vocab, z.hidden, split="none", saved="head.normed", cached=False)
    assert (alone.grad_bytes - projection.grad_bytes, loss.grad_bytes) == (2 * LOGITS, 0)


def test_transformer_engine_s_ranks_gather_three_numbers_of_a_row() -> None:
    """Each of 2 ranks has a maximum, a sum and a target's logit, of 4 bytes each, for each of 8,192 rows."""
    parallelism = {"dp": 1, "tp": 2, "sequence_parallel": False}
    _, (_, loss) = loss_nodes(workload("te_fused", framework="megatron_core", parallelism=parallelism))
    comms = [(op.op, op.nbytes) for op in loss.forward if isinstance(op, Collective)]
    assert comms == [("all_gather", 8192 * 2 * 3 * 4)]


def test_each_metric_is_the_forward_pass_of_an_eager_loss() -> None:
    """A cast reads 2 bytes of a logit and writes 4, a log-softmax reads and writes 4: 14, and 28 for two metrics."""
    ops = {number: head(workload({"name": "fused", "metrics": number})).forward for number in (0, 2)}
    nbytes = {
        number: sum(op.kernel.bytes for op in some if isinstance(op, Compute) and isinstance(op.kernel, Memory))
        for number, some in ops.items()
    }
    assert nbytes[2] - nbytes[0] == 2 * 14 * LOGITS
    backward = {number: head(workload({"name": "fused", "metrics": number})).backward for number in (0, 2)}
    assert backward[0] == backward[2]


@pytest.mark.parametrize(
    ("name", "framework"), [("chunked", "pytorch"), ("fused_linear", "pytorch"), ("te_fused", "megatron_core")]
)
def test_metrics_need_the_logits_of_a_micro_batch(name: str, framework: str) -> None:
    with pytest.raises(InputError, match="leaves no logits of a micro-batch behind it") as caught:
        workload({"name": name, "metrics": 1}, framework=framework)
    assert caught.value.key == "training.loss.metrics"


def test_metrics_are_of_whole_rows_where_each_rank_has_them() -> None:
    """Each of 4 ranks of torchtitan gathers all logits before the loss: 14 bytes of each once more, nothing sent."""

    def work(number: int) -> list[Op]:
        split = workload({"name": "eager", "metrics": number}, framework="torchtitan", parallelism={"tp": 4, "dp": 1})
        return list(head(split).forward)

    plain, measured_too = work(0), work(1)
    nbytes = [
        sum(op.kernel.bytes for op in some if isinstance(op, Compute) and isinstance(op.kernel, Memory))
        for some in (plain, measured_too)
    ]
    assert nbytes[1] - nbytes[0] == 14 * LOGITS
    assert len(measured_too) - len(plain) == 3  # the cast, the log-softmax, and the choice of the targets'
