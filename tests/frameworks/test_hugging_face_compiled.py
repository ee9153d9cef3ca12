"""Hugging Face's modules under torch.compile: kernels counted by hand in Inductor's code, and real kernels."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from simulator import models
from simulator.api import run
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.frameworks import find_framework
from simulator.models.vocabulary import embedding, head
from simulator.program import Attention, Compute, Matmul, Memory
from simulator.validation.rows import loaded, read_rows
from simulator.validation.suites import SUITES
from tests.support.exact import compare
from tests.support.hugging_face import (
    BATCH,
    FFN,
    FIRST,
    GPT2,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KERNELS,
    KV_HEADS,
    LLAMA,
    SEQ,
    TOKENS,
    VOCAB,
    kinds,
    load,
    memory_kernels,
)

MEASURED = Path(__file__).resolve().parents[2] / "calibration" / "measurements"
GPU = "h200-sxm-141gb"
COMPILED = {"name": "hugging_face", "compile": True}


def compiled(model: dict[str, Any], **sections: Any) -> Any:
    return load(model, framework=COMPILED, **sections)


# --- kernels of a layer ---


def test_kernels_of_a_llama_layer() -> None:
    """Forward, beside the seven products: two norms with the sums before them, queries turned, keys turned and
    repeated, values repeated, and the gated SiLU: 6.

    Backward: each norm has a kernel for its input and the sums behind it, and two for its weight as the rows are few:
    6. Then the gated SiLU, queries, keys and values: 4.
    """
    part = models.layer(compiled(LLAMA), turn=FIRST)
    assert kinds(part.forward) == {"product": 7, "attention": 1, "memory": 6}
    assert kinds(part.backward) == {"product": 14, "attention": 1, "memory": 10}


def test_one_kernel_makes_both_gradients_of_many_rows() -> None:
    """The weight's gradient comes from the kernel of the input's from 5 x 2^20 elements on. There must be 4,096 rows or
    more, and twice as many as columns. The kernel leaves 512 sums in fp32, which one more adds up, and they are cast.

    10,240 rows of 512 columns are 5 x 2^20; of 511 columns fewer. 8,192 rows of 4,096 columns are twice as many.
    """

    def weight_kernels(tokens: int, hidden: int) -> list[str]:
        model = LLAMA | {"hidden": hidden, "heads": hidden // 64, "kv_heads": 2, "head_dim": 64}
        training = {"seq": tokens // 4, "micro_batch": 4, "global_batch": 4}
        part = models.layer(compiled(model, training=training), turn=FIRST)
        return [name.removeprefix("mlp.norm ") for name in memory_kernels(part, "W") if name.startswith("mlp.norm")]

    assert weight_kernels(10_240, 512) == ["wgrad sum", "wgrad cast"]
    assert weight_kernels(10_236, 512) == ["wgrad", "wgrad sum"]
    assert weight_kernels(8_192, 4_096) == ["wgrad sum", "wgrad cast"]
    assert weight_kernels(8_188, 4_096) == ["wgrad", "wgrad sum"]


def test_norms_read_what_is_summed_and_write_the_sum() -> None:
    """Forward two tensors in, two out. Backward the norm before q, k and v reads their three gradients and its input.
    It reads the gradient that goes round the block too. The norm before gate and up reads one less."""
    part = models.layer(compiled(LLAMA), turn=FIRST)
    row = 2.0 * TOKENS * HIDDEN
    forward, backward = memory_kernels(part, "F"), memory_kernels(part, "B")
    assert (forward["mlp.norm"].read_bytes, forward["mlp.norm"].write_bytes) == (2 * row, 2 * row)
    reads = {name: backward[f"{name} bwd"].read_bytes / row for name in ("attn.norm", "mlp.norm")}
    assert reads == {"attn.norm": 5, "mlp.norm": 4}


def test_sines_and_cosines_bound_the_rotation() -> None:
    """Two for each element forward, three backward. Keys are turned for each of 4 heads, back for each of 2."""
    part = models.layer(compiled(LLAMA), turn=FIRST)
    q, k = TOKENS * HEADS * HEAD_DIM, TOKENS * KV_HEADS * HEAD_DIM
    forward, backward = memory_kernels(part, "F"), memory_kernels(part, "B")
    assert [forward[f"attn.rope {name}"].elements for name in "qk"] == [2 * q, 2 * q]
    assert [backward[f"attn.rope {name} bwd"].elements for name in "qk"] == [3 * q, 3 * k]


def test_keys_of_four_heads_turn_back_in_two_kernels() -> None:
    """A kernel that reads the gradients of four heads and turns their sum reads too much for one."""
    part = models.layer(compiled(LLAMA | {"kv_heads": 1}), turn=FIRST)
    assert {"attn.rope k sin bwd", "attn.rope k bwd"} <= set(memory_kernels(part, "B"))


def test_norms_of_heads_are_part_of_the_rotation() -> None:
    """Forward each has a kernel for its rows' numbers, and keys are turned before they are repeated: three more. On the
    way back queries are normed as they are turned, and keys apart."""
    plain, normed = (models.layer(compiled(LLAMA | {"qk_norm": norm}), turn=FIRST) for norm in (False, True))
    assert kinds(normed.forward) - kinds(plain.forward) == {"memory": 3}
    names = set(memory_kernels(normed, "B")) - set(memory_kernels(plain, "B"))
    assert {name for name in names if "wgrad" not in name} == {"attn.k_norm bwd"}


def test_attention_reads_a_mask_of_whole_squares() -> None:
    """All pairs are computed, unlike in the causal kernel, with a key for each head, and a bias."""
    part = models.layer(compiled(LLAMA), turn=FIRST)
    kernel = next(op.kernel for op in part.forward if isinstance(op, Compute) and isinstance(op.kernel, Attention))
    assert (kernel.causal, kernel.bias, kernel.kv_heads, kernel.pairs) == (False, True, HEADS, SEQ * SEQ)
    mask = {tensor.name: tensor.nbytes for tensor in embedding(compiled(LLAMA)).saved}["mask"]
    assert mask == 2 * BATCH * SEQ * SEQ


def test_random_numbers_bound_norms_that_drop() -> None:
    """A row of 768 is padded to 1,024; one of 1,280 is gone through twice."""

    def elements(hidden: int) -> float:
        part = models.layer(compiled(GPT2 | {"hidden": hidden, "heads": hidden // 64}), turn=FIRST)
        kernel = memory_kernels(part, "F")["mlp.norm"]
        assert kernel.op == "dropout"
        return kernel.elements

    assert [elements(768), elements(1280)] == [TOKENS * 1024, TOKENS * 2560]


def test_gpt2s_products_are_padded_and_llamas_are_not() -> None:
    """Rows of 1,001 words are no multiple of 16 bytes: the weight is copied twice, the gradient of the logits once for
    each of two products. Those of 1,008 are."""

    def copies(vocab: int) -> dict[str, float]:
        part = head(compiled(GPT2 | {"vocab": vocab}), FIRST)
        kernels = memory_kernels(part, "F") | memory_kernels(part, "B")
        return {name: kernel.write_bytes for name, kernel in kernels.items() if "pad" in name}

    weight, logits = 2.0 * 1001 * HIDDEN, 2.0 * 1001 * TOKENS
    assert copies(1001) == {
        "head.logits pad": weight,
        "head.logits grad pad": 2 * logits,
        "head.logits pad again": weight,
    }
    assert copies(1008) == {}


def test_logits_that_are_an_output_have_a_gradient_of_zeros() -> None:
    """Autograd fills it, and the loss adds its own. GPT-2's loss is compiled apart from its model, and finds none."""
    llama, gpt2 = (memory_kernels(head(compiled(model), FIRST), "B") for model in (LLAMA, GPT2))
    logits = 2.0 * TOKENS * VOCAB
    assert llama["loss.zero logits grad"].write_bytes == logits
    assert (llama["loss.bwd"].read_bytes, gpt2["loss.bwd"].read_bytes) == (2 * logits, logits)
    assert "loss.zero logits grad" not in gpt2


# --- what is kept ---


def test_bytes_that_a_llama_layer_keeps() -> None:
    """Both norms and the products after them keep their inputs: 4 x 2 bytes of each element. Attention keeps
    queries, keys and values of all heads and its output, and a number in fp32 per head and token. The MLP keeps gate,
    up and their product: 3 x 2 bytes."""
    part = models.layer(compiled(LLAMA))
    attention = 2 * 4 * HEADS * HEAD_DIM + 4 * HEADS
    assert part.saved_bytes == TOKENS * (8 * HIDDEN + attention + 3 * 2 * FFN)


def test_bytes_that_a_gpt2_layer_keeps() -> None:
    """The inputs of both norms and of the products after them, 4 x 2 bytes. The product of queries, keys and values,
    attention's output, and a number per head; a byte for what both blocks drop. The MLP's first product and gelu_new's
    result: 2 x 2 bytes of 4 h."""
    part = models.layer(compiled(GPT2))
    assert part.saved_bytes == TOKENS * (8 * HIDDEN + 8 * HIDDEN + 4 * HEADS + 2 * HIDDEN + 4 * 4 * HIDDEN)


# --- against what was measured ---


@pytest.mark.parametrize("case", ["llama-1b_b4_s2048_compile", "llama-3b_b1_s4096_compile"])
def test_products_are_as_many_as_in_the_trace(case: str) -> None:
    """All products of a trace take one per cent of it or more, but for those of narrow keys and values (llama-1b: 32
    of 339)."""
    with KERNELS.open(encoding="utf-8", newline="") as file:
        counted = [row for row in csv.DictReader(file) if row["case"] == case]
    traced = sum(int(row["launches"]) for row in counted if row["kernel"].startswith("nvjet"))
    row = next(row for row in read_rows(SUITES["hugging-face"].table) if row["id"] == case)
    timeline = run(loaded(row, SUITES["hugging-face"].settings_of(row))).timeline
    small = {"llama-1b_b4_s2048_compile": 32, "llama-3b_b1_s4096_compile": 0}[case]
    assert (timeline["kind"] == "matmul").sum() == traced + small


@pytest.mark.parametrize(
    ("part", "ops"),
    [
        ("silu", ("mlp.swiglu", "mlp.swiglu bwd")),
        ("log_softmax", ("loss.softmax", "loss.bwd")),
        ("sdpa", ("attn.flash", "attn.flash bwd")),
        ("FusedAdam", ("optimizer.adam",)),
    ],
)
def test_kernels_of_a_real_step_take_what_they_took(part: str, ops: tuple[str, ...]) -> None:
    """Kernels of Llama 1B's step with ``part`` in their names, which last 1 % of it or more, beside ``ops`` here."""
    case = "llama-1b_b4_s2048_compile"
    with KERNELS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["case"] == case and part in row["kernel"]]
    measured_s = 1e-6 * sum(float(row["total_us"]) for row in rows)
    row = next(row for row in read_rows(SUITES["hugging-face"].table) if row["id"] == case)
    timeline = run(loaded(row, SUITES["hugging-face"].settings_of(row))).timeline
    chosen = timeline[timeline["name"].isin(ops)]
    assert (chosen["end_s"] - chosen["start_s"]).sum() == pytest.approx(measured_s, rel=0.08)


def test_inductors_kernels_take_what_they_took() -> None:
    """Kernels of compiled models of two layers, by class within 10 per cent in the mean. Losses over GPT-2's 50,257
    words, whose rows no vector loads fit, take a fifth more, and blocks' sums are short."""
    profile = load_profile("h200-sxm-141gb")
    costs = Costs.from_profile(profile, find_framework("hugging_face", compile=True))
    assert profile.kernels.gap_s is not None
    off: dict[str, list[float]] = defaultdict(list)
    with (MEASURED / "inductor-kernels.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            sizes = (float(row[key]) for key in ("read_bytes", "written_bytes"))
            kernel = Memory(row["class"], *sizes, elements=float(row["elements"]))
            seconds = costs.kernel_s(kernel, GPU) - profile.kernels.gap_s.value
            off[row["class"]].append(abs(seconds / (1e-6 * float(row["least_us"])) - 1))
    mean = {name: sum(values) / len(values) for name, values in off.items()}
    assert max(mean.values()) < 0.2
    assert {name for name, value in mean.items() if value > 0.1} == {"combine", "norm_bwd"}


@pytest.mark.parametrize(("head_dim", "within"), [(64, 0.08), (128, 0.08), (256, 0.12)])
@pytest.mark.parametrize("backward", [False, True])
def test_attention_with_a_bias_takes_what_it_took(head_dim: int, within: float, backward: bool) -> None:
    costs = Costs.from_profile(load_profile("h200-sxm-141gb"), find_framework("hugging_face", compile=True))
    columns = ("backward_us", "around_us") if backward else ("forward_us",)
    with (MEASURED / "masked-attention.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mask"] == "bias" and not row["dropout"]]
    for row in (row for row in rows if int(row["head_dim"]) == head_dim):
        batch, heads, seq = (int(row[key]) for key in ("batch", "heads", "seq"))
        kernel = Attention(batch, heads, heads, seq, seq, head_dim, causal=False, bias=True, backward=backward)
        measured_s = 1e-6 * sum(float(row[key]) for key in columns)
        assert costs.kernel_s(kernel, GPU) == pytest.approx(measured_s, rel=within)


def test_shortcuts_change_nothing() -> None:
    compare({"dp": 2}, framework=COMPILED, model=LLAMA, cluster="hgx_h200_8gpu")


def test_all_products_are_there_once() -> None:
    """Compiled layers have the products of eager ones."""
    eager, inductor = (models.layer(load(LLAMA, framework=name), turn=FIRST) for name in ("hugging_face", COMPILED))
    for kind in "FB":
        sizes = [
            sorted((op.kernel.m, op.kernel.n, op.kernel.k) for op in part.ops(kind) if _is_product(op))
            for part in (eager, inductor)
        ]
        assert sizes[0] == sizes[1]


def _is_product(op: Any) -> bool:
    return isinstance(op, Compute) and isinstance(op.kernel, Matmul)
