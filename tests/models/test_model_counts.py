"""Parameters, FLOPs and states of optimizers."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import models
from simulator.config import Workload, load_workload
from simulator.operations.weights import elements
from simulator.program import Comm, Compute
from tests.support.layers import GELU, SIZES, make, vector

# --- parameters and state ---

#: The released checkpoints' exact counts: openai/gpt2, gpt2-xl; meta-llama's model.safetensors.index.json.
RELEASED = [
    ("gpt2-124m", 1024, 124_439_808),
    ("gpt2-1.5b", 1024, 1_557_611_200),
    ("llama2-7b", 4096, 6_738_415_616),
    ("llama2-70b", 4096, 68_976_648_192),
    ("llama3-8b", 8192, 8_030_261_248),
    ("llama3-70b", 8192, 70_553_706_496),
    ("llama3-405b", 8192, 405_853_388_800),
]


def preset(name: str, seq: int, **parallelism: Any) -> Workload:
    return load_workload(
        {
            "model": {"preset": name},
            "training": {"seq": seq, "global_batch": 64},
            "parallelism": parallelism,
            "cluster": "dgx_a100",
        }
    )


@pytest.mark.parametrize(("name", "seq", "expected"), RELEASED)
def test_parameter_counts(name: str, seq: int, expected: int) -> None:
    assert models.parameters(preset(name, seq)) == expected


def test_parameters_of_gpt3() -> None:
    """arXiv 2104.04473, equation 2: 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h), which leaves out the final norm's 2
    h."""
    work = preset("gpt3-175b", 2048)
    h, layers, v, s = 12288, 96, 51200, 2048
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert models.parameters(work) == pytest.approx(formula + 2 * h, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-8b"])
@pytest.mark.parametrize("t", [1, 2, 8])
def test_ranks_hold_the_model_between_them(name: str, t: int) -> None:
    """Summed over tp, layers are the model's with norms and row biases counted t times; a pipeline holds a tied
    table twice."""
    whole, work = preset(name, 2048, tp=1), preset(name, 2048, tp=t, pp=8)
    h = work.model.hidden
    copies = 2 * h * (2 if work.model.norm == "layernorm" else 1) + (2 * h if work.model.bias else 0)
    layer = elements(models.layer(work).weights)
    assert t * layer == elements(models.layer(whole).weights) + (t - 1) * copies
    stages = [part for stage in range(8) for part in models.stage_parts(work, stage)]
    if t == 1:
        twice = work.model.vocab * h if work.model.tied_embeddings else 0
        assert sum(elements(part.weights) for part in stages) == models.parameters(work) + twice
    assert sum(elements(part.weights) for part in models.stage_parts(whole, 0)) == models.parameters(whole)


@pytest.mark.parametrize(
    ("settings", "per_param"),
    [
        # arXiv 1910.02054, section 3.1: 2 + 2 + (4 + 4 + 4); fp32 gradients make 18; ZeRO-1 over 8 GPUs 2 + 2 + 12/8.
        ({"grad_dtype": "fp16"}, 16),
        ({}, 18),
        ({"grad_dtype": "fp16", "zero": 1, "dp": 8}, 5.5),
        ({"zero": 1, "dp": 8}, 7.5),
        ({"precision": "fp32"}, 16),  # 4 + 4 + 8: no second copy of fp32 weights
        ({"optimizer": {"state_dtype": "bf16", "master_weights": False}}, 10),  # 2 + 4 + 4
    ],
)
def test_bytes_of_state_per_parameter(settings: dict[str, Any], per_param: float) -> None:
    work = make(*SIZES[0], **settings)
    state = models.state_bytes(work, 0)
    assert state.total == per_param * models.parameters(work)


def test_state_of_interleaved_chunks_is_summed() -> None:
    """Pipeline rank 0 of 2 with 2 chunks holds stages 0 and 2: the embedding and two of four layers."""
    work = make(*SIZES[0], pp=2, vpp=2, schedule="interleaved")
    parts = (models.embedding(work), models.layer(work), models.head(work))
    table, layer, head = (elements(part.weights) for part in parts)
    assert models.state_bytes(work, 0).weights == 2 * (table + 2 * layer)
    assert models.state_bytes(work, 1).weights == 2 * (2 * layer + head)


# --- FLOPs ---


@pytest.mark.parametrize(("s", "b", "h", "a"), SIZES)
@pytest.mark.parametrize("layout", [{}, {"tp": 8}, {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": False}])
def test_flops_against_closed_forms(s: int, b: int, h: int, a: int, layout: dict[str, Any]) -> None:
    """Forward, per layer: 24 B s h^2 of products and 4 B s^2 h of attention; 2 B s h V for the vocabulary; backward
    twice that. arXiv 2104.04473, equation 3 counts the layers' forward once more for full recomputation: 96 B s l h^2
    (1 + s/6h + V/16lh), and arXiv 2205.05198 has 72 B s l h^2 (1 + s/6h + V/12lh) without it."""
    work = make(s, b, h, a, recompute="full", global_batch=8 * b, **GELU, **layout)
    batch, layers, v = 8 * b, 4, work.model.padded_vocab(work.parallelism.tp)
    narayanan = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert models.hardware_flops_per_step(work) == pytest.approx(narayanan, rel=1e-12)
    korthikanti = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert models.model_flops_per_step(work) == pytest.approx(korthikanti, rel=1e-12)
    attention = 3 * batch * layers * 4 * s**2 * h
    assert models.model_flops_per_step(work) - models.model_flops_per_step_causal(work) == pytest.approx(attention / 2)


def test_hardware_flops_of_recomputation_and_flash() -> None:
    """Without recomputation the kernels of unfused attention do the model's FLOPs. Selective recomputation repeats both
    products of attention (4 B s^2 h per layer). Flash does 2 causal products forward and 5 backward: 7/6 of the
    half."""
    s, b, h, a = SIZES[1]

    def hardware(**changes: Any) -> float:
        return models.hardware_flops_per_step(make(s, b, h, a, **{**GELU, **changes}))

    work = make(s, b, h, a, **GELU)
    exact, attention = models.model_flops_per_step(work), 4 * 8 * b * 4.0 * s**2 * h
    assert hardware() == pytest.approx(exact, rel=1e-12)
    assert hardware(recompute="selective") == pytest.approx(exact + attention, rel=1e-12)
    assert hardware(attention="flash") == pytest.approx(exact - 3 * attention + 3.5 * attention / 2, rel=1e-12)


def test_model_flops_of_llama() -> None:
    """SwiGLU has three matrices, grouped KV heads narrow ones: 6 per weight of a product and token, and 12 s h per
    layer."""
    work = preset("llama3-8b", 8192)
    h, f, v, layers, tokens = 4096, 14336, 128256, 32, 64 * 8192
    weights = layers * (h * (h + 2 * 1024) + h * h + 3 * h * f) + h * v
    expected = tokens * (6 * weights + layers * 12 * 8192 * h)
    assert models.model_flops_per_step(work) == pytest.approx(expected, rel=1e-12)


def test_block_recomputation_covers_the_first_layers_of_each_stage() -> None:
    work = make(*SIZES[0], pp=2, recompute={"granularity": "full", "layers": 1}, **GELU)
    for stage in (0, 1):
        layers = [part for part in models.stage_parts(work, stage) if part.name == "layer"]
        assert [bool(layer.recompute) for layer in layers] == [True, False]
    assert [part.name for part in models.stage_parts(work, 0)] == ["embedding", "layer", "layer"]
    assert [part.name for part in models.stage_parts(work, 1)] == ["layer", "layer", "head"]


# --- optimizer ---


def test_optimizer_of_mixed_precision() -> None:
    """fp16 with fp32 gradients, per parameter: unscale 4 + 4, norm 4, clip 4 + 4, Adam 16 read and 12 written, cast 4 +
    2, clearing the gradients 4. The two decisions are one number over the model-parallel ranks."""
    n = 10**6
    ops = models.optimizer_ops(make(*SIZES[0], tp=2, pp=2, grad_clip=1.0), vector(n))
    moved = {op.name.removeprefix("optimizer."): op.kernel.bytes / n for op in ops if isinstance(op, Compute)}
    assert moved == {
        "unscale": 8,
        "grad norm": 4,
        "clip": 8,
        "adam": 28,
        "master to model weights": 6,
        "zero gradients": 4,
    }
    assert [(op.op, op.axis, op.nbytes) for op in ops if isinstance(op, Comm)] == [("all_reduce", "mp", 4.0)] * 2
    assert {op.phase for op in ops if isinstance(op, Compute)} == {"O"}


def test_zero_one_divides_the_optimizer_among_replicas() -> None:
    """Each of 4 replicas updates a quarter; clearing the gradient buffer is not divided. The decisions span dp too."""
    n = 10**6
    one: dict[str, Any] = {"precision": "bf16", "grad_clip": 1.0, "tp": 2}
    whole = models.optimizer_ops(make(*SIZES[0], dp=4, **one), vector(n))
    shard = models.optimizer_ops(make(*SIZES[0], dp=4, zero=1, **one), vector(n))
    for a, b in zip(*([op for op in ops if isinstance(op, Compute)] for ops in (whole, shard)), strict=True):
        share = 1 if a.name == "optimizer.zero gradients" else 4
        assert a.kernel.bytes == share * b.kernel.bytes
    assert [op.axis for op in shard if isinstance(op, Comm)] == ["mp", "dp"]


def test_eager_adam_moves_more() -> None:
    """PyTorch's foreach AdamW walks over its tensors eight times: 12 operands read and 8 written after the decay's one
    each of 4 bytes, against 4 and 3 of the fused kernel."""
    fused, eager = (
        [
            op
            for op in models.optimizer_ops(make(*SIZES[0], optimizer={"implementation": i}), vector(1000))
            if isinstance(op, Compute)
        ]
        for i in ("fused", "foreach")
    )
    adam = {op.name: op.kernel.bytes for op in fused}["optimizer.adam"]
    steps = [op for op in eager if op.kernel.kind == "foreach" and op.name != "optimizer.unscale"]
    assert len(steps) == 8
    assert adam == 4 * 1000 * (4 + 3)
    assert sum(op.kernel.bytes for op in steps) == 4 * 1000 * (13 + 8)


def test_gradients_of_replicated_parameters() -> None:
    """With sequence parallelism each rank's norms (4 h) and row biases (2 h) saw its rows alone: 6 h per layer, 2 h in
    the head. Without, the ranks' gradients agree. Two KV heads on eight ranks: each rank's has part of its query
    heads."""
    s, b, h, a = SIZES[1]
    for sequence_parallel, params in ((True, 4 * 6 * h + 2 * h), (False, 0)):
        work = make(s, b, h, a, tp=2, sequence_parallel=sequence_parallel)
        weights = models.weights_of(models.stage_parts(work, 0))
        assert sum(c.nbytes for c in models.replicated_gradient_ops(work, weights)) == 4 * params
    shared = make(s, b, h, a, tp=8, kv_heads=2, sequence_parallel=False, bias=False)
    (op,) = models.replicated_gradient_ops(shared, models.layer(shared).weights)
    assert op.nbytes == 4 * 2 * (h // a) * h
