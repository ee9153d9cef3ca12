"""Recomputation op by op."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from simulator import models
from simulator.config import load_workload
from simulator.program import Attention, Beside, Comm, Compute, GroupedMatmul, Matmul
from tests.support.frameworks import MEGATRON, PYTORCH


def test_recompute_by_op_keeps_attention_and_every_second_product() -> None:
    """Per token and in 2 bytes: the layer's input, q, v, the context, gate and down, 4 h + kv + ffn wide together, and
    4 bytes of log-sum-exp per head; k, the product after attention and up run again, as does what is no product."""
    sizes = {"layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn_hidden": 4096, "vocab": 32_000}
    llama = {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False}
    job = {
        "name": "tiny",
        "model": sizes | llama,
        "training": {"seq": 512, "global_batch": 1, "recompute": "ops"},
        "cluster": "dgx_h100",
    }
    part = models.layer(load_workload(job))
    assert part.saved_bytes == 512 * (2 * (4 * 1024 + 256 + 4096) + 4 * 16)
    again = [op for op in part.recompute if isinstance(op, Compute)]
    products = {op.name: op.kernel.n for op in again if isinstance(op.kernel, Matmul)}
    assert products == {"attn.qkv": 256, "attn.proj": 1024, "mlp.fc1": 4096}
    assert not any(isinstance(op.kernel, Attention) for op in again)
    assert all(op.phase == "R" for op in again)


def _by_op(**keys: Any) -> models.Part:
    sizes = {"layers": 2, "hidden": 1024, "heads": 16, "ffn_hidden": 4096, "vocab": 32_000}
    llama = {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False}
    job = {
        "name": "tiny",
        "model": sizes | llama | keys.pop("model", {}),
        "training": {"seq": 512, "global_batch": 8, "recompute": "ops"} | keys.pop("training", {}),
        "framework": keys.pop("framework", MEGATRON),
        "parallelism": keys.pop("parallelism", {}),
        "cluster": "dgx_h100",
    }
    return models.layer(load_workload(job))


LATENT = {"q_lora_rank": 384, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}

MIXTURE = {"experts": 8, "top_k": 2, "ffn_hidden": 1024, "shared_experts": 1}


def test_recompute_by_op_counts_products_of_latent_attention_and_shared_experts() -> None:
    """In torchtitan's order: q down (kept), q up, kv down (kept), kv up, out (kept), shared gate, shared up (kept),
    shared down. The router's product is not counted; it, grouped products and the copies of tokens run again."""
    part = _by_op(model={"mla": LATENT, "moe": MIXTURE})
    again = [op for op in part.recompute if isinstance(op, Compute)]
    products = {op.name: op.kernel.n for op in again if isinstance(op.kernel, Matmul)}
    assert products == {
        "attn.q_up": 16 * 64,
        "attn.kv_up": 16 * (32 + 64),
        "moe.router": 8,
        "shared.fc1": 1024,
        "shared.fc2": 1024,
    }
    assert {op.name for op in again if isinstance(op.kernel, GroupedMatmul)} == {"moe.fc1", "moe.fc2"}
    # Input, q down, kv down with the keys' rotary part, context, out, shared up; 4 bytes of log-sum-exp per head.
    width = 1024 + 384 + (128 + 32) + 16 * 64 + 1024 + 1024
    assert part.saved_bytes == 512 * (2 * width + 4 * 16)


def test_recompute_by_op_keeps_what_came_from_other_ranks() -> None:
    """Dispatch and combine (ep 4) keep what they received: 2 copies of every token each, with probabilities in fp32.

    Sums of tensor parallelism keep the rank's rows. Gathered rows are gathered again.
    """
    part = _by_op(model={"moe": MIXTURE}, parallelism={"dp": 4, "ep": 4})
    whole = _by_op(model={"moe": MIXTURE}, parallelism={"dp": 4})
    assert part.saved_bytes - whole.saved_bytes == 2 * 512 * 2 * 1024 * 2 + 2 * 512 * 4
    assert not [op for op in part.recompute if isinstance(op, Comm) and op.op == "all_to_all"]
    split = _by_op(parallelism={"tp": 2, "sequence_parallel": True})
    kept = {tensor.name: tensor.nbytes for tensor in split.saved}
    assert kept["tp.reduce_scatter attn out"] == kept["tp.reduce_scatter mlp out"] == 512 / 2 * 1024 * 2
    assert [op.op for op in split.recompute if isinstance(op, Comm)] == ["all_gather", "all_gather"]


def test_recompute_by_op_gathers_nothing_for_a_product_that_is_kept() -> None:
    """Of a GPT the first product of the MLP is the fifth, and kept: its input is gathered again neither by itself nor,
    with ``overlap.tp``, in a ring beside it."""
    gpt = {"activation": "gelu", "position": "learned"}
    for overlapped in (False, True):
        layout = {"tp": 2, "sequence_parallel": True, "overlap": {"tp": overlapped}}
        part = _by_op(model=gpt, parallelism=layout)
        names = {op.name for op in part.recompute if not isinstance(op, Beside)}
        beside = {kernel.name for op in part.recompute if isinstance(op, Beside) for kernel in op.kernels}
        assert not {"tp.all_gather mlp", "mlp.fc1"} & (names | beside)


def test_recompute_by_op_of_other_attention() -> None:
    """Batched products are not ``aten.mm``: unfused attention runs again whole; fused attention never does, in a ring
    of ranks neither."""
    unfused = _by_op(model={"attention": "unfused"})
    assert {"attn.scores", "attn.context"} <= {op.name for op in unfused.recompute if isinstance(op, Compute)}
    ring = _by_op(parallelism={"cp": 2, "cp_method": "ring"})
    assert not [op for op in ring.recompute if isinstance(op, Beside) or getattr(op, "axis", "") == "cp"]
    ulysses = _by_op(parallelism={"cp": 2, "cp_method": "ulysses"})
    assert not [op for op in ulysses.recompute if isinstance(op, Compute) and isinstance(op.kernel, Attention)]
    assert {"cp.all_to_all q out", "cp.all_to_all context out"} <= {tensor.name for tensor in ulysses.saved}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"model": {"attention": "unfused", "kv_heads": 4}},
        {"model": {"mla": LATENT, "moe": MIXTURE}},
        {"model": {"moe": MIXTURE}, "parallelism": {"dp": 4, "ep": 4}},
        {"parallelism": {"tp": 4, "sequence_parallel": True, "overlap": {"tp": True}}},
        {"framework": PYTORCH},
    ],
)
def test_recompute_by_op_makes_what_it_does_not_keep(keys: dict[str, Any]) -> None:
    """Between keeping all and recomputing all: it keeps less than the first and more than the second, and what it keeps
    and makes again covers what the backward pass reads, tensor by tensor."""
    layer = _by_op(**keys)
    training = dict(keys.get("training", {}))
    none, full = (_by_op(**{**keys, "training": {**training, "recompute": how}}) for how in ("none", "full"))
    assert full.saved_bytes < layer.saved_bytes < none.saved_bytes
    here: Counter[str] = Counter()
    for tensor in (*layer.saved, *layer.recomputed):
        here[tensor.name] += int(tensor.nbytes)
    assert all(here[tensor.name] >= tensor.nbytes for tensor in none.saved)
    assert 0 < len(layer.recompute) < len(none.forward)
