"""DeepSeek-V4: attention with one head of keys, compressed keys, and several residual streams."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import models
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.models import Part
from simulator.program import Compute, Matmul, Tiled, kernels_of
from tests.support.jobs import job
from tests.support.pattern_models import LLAMA, SEQ, V4

KINDS = ("shared_key", "heavily_compressed", "compressed_sparse")


def layer(kind: str, *, streams: int = 1, **more: Any) -> Part:
    model = LLAMA | V4 | {"mixers": [kind], "residual_streams": streams}
    return models.layer(load_workload(job(model=model, **more)))


def shapes(part: Part) -> dict[str, tuple[int, ...]]:
    return {weight.name: weight.shape for weight in part.weights if weight.name.startswith("mixer.")}


def kernel(part: Part, name: str) -> Any:
    ops = (*part.forward, *part.input_grad)
    (only,) = (one.kernel for op in ops for one in kernels_of(op) if one.name == name)
    return only


def test_kinds_of_layers_have_the_weights_of_transformers() -> None:
    """The model is 256 wide. Heads of a group have 4 x 32 columns. Compressed keys have a place for each of their
    tokens. Where an indexer chooses, keys and gates are two series, and its own too."""
    window, heavy, sparse = map(shapes, map(layer, KINDS))
    attention = {
        "mixer.q_down.weight": (64, 256),
        "mixer.q_down_norm.weight": (64,),
        "mixer.q_up.weight": (8 * 32, 64),
        "mixer.kv.weight": (32, 256),
        "mixer.kv_norm.weight": (32,),
        "mixer.sinks": (8,),
        "mixer.grouped.weight": (2 * 48, 4 * 32),
        "mixer.out.weight": (256, 2 * 48),
    }
    assert window == attention

    def compression(name: str, rate: int, width: int, series: int) -> dict[str, tuple[int, ...]]:
        product = (series * width, 256)
        return {
            f"mixer.{name}_kv.weight": product,
            f"mixer.{name}_gate.weight": product,
            f"mixer.{name}_places": (rate, series * width),
            f"mixer.{name}_norm.weight": (width,),
        }

    assert heavy == attention | compression("compress", 16, 32, 1)
    assert sparse == attention | compression("compress", 4, 32, 2) | compression("index", 4, 16, 2) | {
        "mixer.index_q.weight": (4 * 16, 64),
        "mixer.index_weights.weight": (4, 256),
    }


def test_queries_see_a_window_and_the_keys_before_them() -> None:
    """128 tokens. Windows of 32: 32^2 / 2 pairs at the beginning, then 96 x 32. Keys of 16 tokens: half of 128 x 128 /
    16. Of keys of 4 tokens a query sees all until there are 8, after 32 tokens: 32^2 / 2 / 4 pairs, then 96 x 8. Two
    products forward, five backward, of 8 heads of 32."""
    windows = 32 * 32 / 2 + 96 * 32
    pairs = {
        "shared_key": windows,
        "heavily_compressed": windows + SEQ * SEQ / 2 / 16,
        "compressed_sparse": windows + 32 * 32 / 2 / 4 + 96 * 8,
    }
    for kind, count in pairs.items():
        part = layer(kind)
        assert kernel(part, "mixer.attention").flops == 2 * 2 * count * 8 * 32, kind
        assert kernel(part, "mixer.attention bwd").flops == 5 * 2 * count * 8 * 32, kind
    scores = kernel(layer("compressed_sparse"), "mixer.scores")
    assert scores.flops == 2 * (SEQ * SEQ / 2 / 4) * 4 * 16  # of all keys before a query


def test_model_flops_of_a_layer_are_those_of_what_a_token_sees() -> None:
    """Not causal, a token sees 128 tokens: 8 keys of 16 beside its window, or 8 of the 32 keys of 4, all of which are
    scored. Backward takes twice as many, and so does a step of 16 sequences for each."""
    base, *larger = (
        models.model_flops_per_step(load_workload(job(model=LLAMA | V4 | {"mixers": [kind]}))) for kind in KINDS
    )
    attended = 4 * 8 * 32 * 8 * SEQ
    scored = 2 * 4 * 16 * 32 * SEQ
    weights = [
        sum(
            weight.elements
            for weight in layer(kind).weights
            if weight.gradient_product and ("compress" in weight.name or "index" in weight.name)
        )
        for kind in KINDS[1:]
    ]
    layers = LLAMA["layers"]
    heavy = 3 * 16 * layers * (attended + 2 * SEQ * weights[0])
    sparse = 3 * 16 * layers * (attended + scored + 2 * SEQ * weights[1])
    assert [one - base for one in larger] == pytest.approx([heavy, sparse])


def test_attention_keeps_keys_once_as_they_are_the_values() -> None:
    """For a token queries, context before and behind its rotation back, a key, and a statistic of each head in fp32.
    Norms and products keep their inputs: the normed row, 64 of compressed queries twice, raw queries, raw keys. Behind
    attention there are two groups of 48."""
    part = layer("shared_key")
    kept = {tensor.name: tensor.nbytes / SEQ for tensor in part.saved if tensor.name.startswith(("mixer.", "attn."))}
    q, key = 2 * 8 * 32, 2 * 32
    assert kept == {
        "attn.normed": 2 * 256,
        "mixer.q_down_norm input": 2 * 64,
        "mixer.q_down normed": 2 * 64,
        "mixer.q_norm input": q,
        "mixer.kv_norm input": key,
        "mixer.q": q,
        "mixer.kv": key,
        "mixer.context": q,
        "mixer.lse": 4 * 8,
        "mixer.turned context": q,
        "mixer.grouped": 2 * 2 * 48,
        "attn.output": 2 * 256,
    }


def test_the_indexer_passes_no_gradient_to_the_layer() -> None:
    """Its products have gradients of weights, and none of their inputs."""
    products = {
        op.name for op in (*layer("compressed_sparse").backward,) if isinstance(op, Compute) and "index_" in op.name
    }
    products = {name for name in products if isinstance(kernel_of(name), Matmul)}
    assert products == {f"mixer.index_{name} wgrad" for name in ("kv", "gate", "q", "weights")}


def kernel_of(name: str) -> Any:
    return next(op.kernel for op in layer("compressed_sparse").backward if isinstance(op, Compute) and op.name == name)


def test_blocks_read_and_mix_all_residual_streams() -> None:
    """4 streams of 256. A token has 4 numbers to read with, 4 to write with, 16 to mix with: 24 of 1,024 columns, 24
    that are added, 3 scales. Each block keeps its streams, what it reads of them, its output, and the numbers in fp32:
    24 and, as mixing takes them, 20."""
    one, four = layer("shared_key"), layer("shared_key", streams=4)
    added = {weight.name: weight.shape for weight in four.weights if "streams" in weight.name}
    assert added == {
        f"{block}.streams.{name}": shape
        for block in ("attn", "mlp")
        for name, shape in (("weight", (24, 1024)), ("base", (24,)), ("scale", (3,)))
    }
    row = 2 * SEQ * 256
    assert four.saved_bytes - one.saved_bytes == 2 * (4 * row + row + 4 * SEQ * (24 + 20) + row) - 2 * row
    product = kernel(four, "attn.streams")
    assert (product.m, product.n, product.k) == (SEQ, 24, 1024)
    mixed = kernel(four, "mlp.streams mix")
    assert (mixed.read_bytes, mixed.write_bytes) == (5 * row + 4 * SEQ * 20, 4 * row)


def test_stages_pass_on_all_streams_and_the_head_sums_them() -> None:
    """The head has one number for each of 4 streams, from all of them."""
    workload = load_workload(job(model=LLAMA | V4 | {"mixers": ["shared_key"]}))
    assert models.passed_bytes(workload) == 4 * 2 * SEQ * 256
    end = models.head(workload)
    assert [weight.shape for weight in end.weights[:3]] == [(4, 1024), (4,), (1,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallelism": {"tp": 2}}, "parallelism.tp: attention with one head of keys is not split"),
        ({"model": {"mtp_layers": 1}}, "model.mtp_layers: is not simulated with several residual streams"),
        ({"model": {"shared_key": V4["shared_key"] | {"output_groups": 3}}}, "output_groups: does not divide heads 8"),
        ({"framework": "torchtitan"}, r"mixers: \[.shared_key.\], residual_streams: 4"),
    ],
)
def test_what_is_not_simulated_is_refused(change: dict[str, Any], message: str) -> None:
    model = LLAMA | V4 | {"mixers": ["shared_key"]} | change.get("model", {})
    with pytest.raises(InputError, match=message):
        load_workload(job(**{**change, "model": model}))


def test_tiles_see_the_keys_of_a_query() -> None:
    """A window of 32 and 8 keys more; the speed is that of attention over as many."""
    assert [kernel(layer(kind), "mixer.attention").chunk for kind in KINDS] == [32, 40, 40]
    assert isinstance(kernel(layer("shared_key"), "mixer.attention"), Tiled)
