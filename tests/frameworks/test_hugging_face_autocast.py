"""Hugging Face's modules with weights in fp32 under torch.autocast: what is cast, what is kept, and the state."""

from __future__ import annotations

from typing import Any

from simulator import models
from simulator.models.optimizer import optimizer_ops, rank_parts, state_bytes
from simulator.models.parts import weights_of
from simulator.models.vocabulary import embedding
from simulator.operations.weights import elements
from tests.support.exact import compare
from tests.support.hugging_face import (
    FFN,
    FIRST,
    GPT2,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    HUGGING_FACE,
    KV_HEADS,
    LLAMA,
    TOKENS,
    VOCAB,
    kinds,
    load,
    memory_kernels,
)

#: Elements of the seven products of a layer of Llama, and of the four of one of GPT-2 with their biases.
LLAMA_WEIGHTS = 2 * HIDDEN * HEADS * HEAD_DIM + 2 * HIDDEN * KV_HEADS * HEAD_DIM + 3 * HIDDEN * FFN
GPT2_WEIGHTS = 12 * HIDDEN * HIDDEN + (3 + 1 + 4 + 1) * HIDDEN


def autocast(model: dict[str, Any], compile: bool = False) -> Any:
    optimizer = {"master_weights": True}
    return load(model, training={"optimizer": optimizer}, framework={"name": HUGGING_FACE, "compile": compile})


def test_state_is_weights_and_gradients_in_fp32() -> None:
    """16 bytes a parameter: the weight, its gradient, and two states. No copy in 16 bits is part of the state, and the
    optimizer casts nothing."""
    work = autocast(LLAMA)
    weights = weights_of(rank_parts(work, 0))
    assert work.training.grad_dtype == "fp32"
    assert state_bytes(work, 0).total == 16 * elements(weights)
    assert [op.name for op in optimizer_ops(work, weights)] == ["optimizer.adam"]


def test_every_product_casts_what_it_reads() -> None:
    """Seven weights are cast, and the inputs of five products, which read normed rows in fp32: q, k, v, gate, up. Those
    of the other two are in 16 bits. Norms cast nothing: two kernels less each."""
    plain, cast = models.layer(load(LLAMA), turn=FIRST), models.layer(autocast(LLAMA), turn=FIRST)
    forward, backward = memory_kernels(cast, "F"), memory_kernels(cast, "B")
    weights = {f"{name} weight cast" for name in _products()}
    inputs = {f"{name} input cast" for name in _products() if name not in ("attn.proj", "mlp.fc2")}
    assert {name for name in forward if name.endswith("cast") and "rope" not in name} == weights | inputs
    back = {name.replace(" cast", " grad cast") for name in weights | inputs}
    assert back <= set(backward)
    # Of the rotation, queries and keys are cast for attention: two more.
    assert kinds(cast.forward) - kinds(plain.forward) == {"memory": len(weights | inputs) + 2 - 2 * 2}
    assert kinds(cast.forward)["product"] == kinds(plain.forward)["product"]


def test_casts_are_from_four_bytes_to_two_and_back() -> None:
    forward, backward = (memory_kernels(models.layer(autocast(LLAMA), turn=FIRST), kind) for kind in "FB")
    size = HIDDEN * FFN
    up = forward["mlp.up weight cast"], backward["mlp.up weight grad cast"]
    assert [(kernel.read_bytes, kernel.write_bytes) for kernel in up] == [(4 * size, 2 * size), (2 * size, 4 * size)]


def test_bytes_that_a_llama_layer_keeps() -> None:
    """Two norms keep the input of a row, and what their weights multiply, in fp32: 4 x 4 bytes. Casts of it for five
    products: 5 x 2. Attention keeps what it keeps in 16 bits. The MLP keeps gate, up, SiLU's result and the product.
    Casts of all weights stay."""
    part = models.layer(autocast(LLAMA))
    attention = 2 * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 4 * HEADS
    assert part.saved_bytes == TOKENS * (26 * HIDDEN + attention + 4 * 2 * FFN) + 2 * LLAMA_WEIGHTS


def test_bytes_that_a_gpt2_layer_keeps() -> None:
    """The inputs of two norms in fp32, and a cast for each of two products: 2 x (4 + 2) bytes. The product of queries,
    keys and values, attention's output, a number per head, and a byte for what both blocks drop. Of gelu_new half of
    its input in 16 bits, and in fp32 its input, the tangent and one more than that; the cast of its result:
    (2 + 3 x 4 + 2) bytes of 4 h. Casts of all weights and biases."""
    part = models.layer(autocast(GPT2))
    row = 12 * HIDDEN + 8 * HIDDEN + 4 * HEADS + 2 * HIDDEN + 16 * 4 * HIDDEN
    assert part.saved_bytes == TOKENS * row + 2 * GPT2_WEIGHTS


def test_normed_heads_are_turned_in_fp32() -> None:
    """A weight in fp32 makes what it multiplies fp32, so that their casts for attention are the only ones."""
    kernels = memory_kernels(models.layer(autocast(LLAMA | {"qk_norm": True}), turn=FIRST), "F")
    q = TOKENS * HEADS * HEAD_DIM
    turned, cast = kernels["attn.q_norm.weight"], kernels["attn.rope q cast"]
    assert (turned.read_bytes, turned.write_bytes) == (2 * q, 4 * q)
    assert (cast.read_bytes, cast.write_bytes) == (4 * q, 2 * q)
    assert kernels["attn.q_norm.float"].read_bytes == 2 * q


def test_sums_of_blocks_are_in_fp32() -> None:
    """A block's output in 16 bits is added to fp32. The rows of the embedding, and its gradient, are fp32 too."""
    add = memory_kernels(models.layer(autocast(LLAMA), turn=FIRST), "F")["attn.residual"]
    rows = TOKENS * HIDDEN
    assert (add.read_bytes, add.write_bytes) == (6 * rows, 4 * rows)
    words = embedding(autocast(LLAMA), FIRST)
    assert memory_kernels(words, "F")["embedding.lookup"].write_bytes == 4 * rows
    assert memory_kernels(words, "B")["embedding.lookup zero grad"].write_bytes == 4 * VOCAB * HIDDEN


def test_compiled_norms_cast_on_the_way() -> None:
    """Weights are cast by kernels of their own, inputs are not. The norm reads a sum in fp32 and a block's output in 16
    bits. It writes a sum in fp32, and 16 bits for the products."""
    part = models.layer(autocast(LLAMA, compile=True), turn=FIRST)
    kernels, rows = memory_kernels(part, "F"), TOKENS * HIDDEN
    assert sum(name.endswith("weight cast") for name in kernels) == len(_products())
    assert not any(name.endswith("input cast") for name in kernels)
    assert (kernels["mlp.norm"].read_bytes, kernels["mlp.norm"].write_bytes) == (6 * rows, 6 * rows)


def test_bytes_that_a_compiled_layer_keeps() -> None:
    """Both norms keep their input in fp32, the products behind them theirs in 16 bits: 2 x (4 + 2) bytes. Attention
    keeps keys and values of all heads, the MLP three tensors; casts of weights stay."""
    part = models.layer(autocast(LLAMA, compile=True))
    attention = 2 * 4 * HEADS * HEAD_DIM + 4 * HEADS
    assert part.saved_bytes == TOKENS * (12 * HIDDEN + attention + 3 * 2 * FFN) + 2 * LLAMA_WEIGHTS


def test_shortcuts_change_nothing() -> None:
    training = {"seq": 128, "global_batch": 4, "optimizer": {"master_weights": True}}
    compare({"dp": 2}, framework=HUGGING_FACE, model=LLAMA, cluster="hgx_h200_8gpu", training=training)


def _products() -> list[str]:
    return ["attn.q", "attn.k", "attn.v", "attn.proj", "mlp.gate", "mlp.up", "mlp.fc2"]
