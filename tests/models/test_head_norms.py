"""Norms of queries and keys, head by head (Qwen3), under every framework."""

from __future__ import annotations

from typing import Any

import pytest

from simulator import models
from simulator.config import load_workload
from simulator.config.hugging_face import from_hugging_face
from simulator.config.presets import presets
from simulator.errors import InputError
from simulator.program import Compute, Memory
from tests.support.frameworks import STACKS
from tests.support.jobs import job

QWEN = {"layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 48, "norm": "rmsnorm", "position": "rope", "bias": False}


def layer(framework: Any, *, qk_norm: bool, **changes: Any) -> models.Part:
    return models.layer(
        load_workload(
            job(framework=framework, **{f"model__{k}": v for k, v in QWEN.items()}, model__qk_norm=qk_norm, **changes)
        )
    )


@pytest.mark.parametrize("framework", STACKS)
@pytest.mark.parametrize("tp", [1, 2])
def test_they_add_two_norms_over_the_width_of_a_head(framework: Any, tp: int) -> None:
    """A kernel each forward over a rank's 8 / tp and 4 / tp heads of every token, and two weights of a head's width."""
    plain, normed = (layer(framework, qk_norm=norm, parallelism__tp=tp) for norm in (False, True))
    before = {op.name for op in plain.forward if isinstance(op, Compute)}
    added = [op for op in normed.forward if isinstance(op, Compute) and op.name not in before]
    assert [op.name for op in added] == ["attn.q_norm", "attn.k_norm"]
    moved = [op.kernel.bytes for op in added if isinstance(op.kernel, Memory)]
    assert moved == [2 * 2 * 128 * heads // tp * 48 for heads in (8, 4)]
    weights = {weight.name: weight for weight in normed.weights}
    names = ("attention.q_norm.weight", "attention.k_norm.weight")
    assert {weight.name for weight in normed.weights} - {weight.name for weight in plain.weights} == set(names)
    # With tensor parallelism every rank has a part of the gradient of each of its elements.
    assert [(weights[name].shape, weights[name].partial_rows) for name in names] == [((48,), 48 if tp > 1 else 0)] * 2


@pytest.mark.parametrize("framework", STACKS)
def test_they_keep_queries_and_keys_as_they_came(framework: Any) -> None:
    """Two bytes of each element of 8 + 4 heads. Where operations rotate, values are a view of the product of all
    three and have kept it already."""
    plain, normed = (layer(framework, qk_norm=norm) for norm in (False, True))
    more = normed.saved_bytes - plain.saved_bytes
    assert more == (0 if framework == "pytorch" else 2 * 128 * (8 + 4) * 48)


def test_presets_and_configurations_of_qwen3_have_them() -> None:
    """Gemma 3 has them too; Llama 3 and Qwen2.5 have none."""
    with_norms = {name for name, keys in presets().items() if keys.get("qk_norm")}
    for family, has in (("qwen3", True), ("gemma3", True), ("llama3", False), ("qwen2.5", False)):
        assert {name in with_norms for name in presets() if name.startswith(family)} == {has}
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    words = {"vocab_size": 256, "hidden_act": "silu"}
    kinds = {
        kind: from_hugging_face({"model_type": kind, **sizes, **words}, "config.json") for kind in ("llama", "qwen3")
    }
    assert {kind: keys.get("qk_norm", False) for kind, keys in kinds.items()} == {"llama": False, "qwen3": True}


def test_latent_attention_has_none() -> None:
    mla = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    with pytest.raises(InputError, match="compressed forms"):
        load_workload(job(model__mla=mla, model__qk_norm=True))
