"""Rules of adapters, frozen weights and quantized weights: keys that are legal, and errors of the others."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config import load_workload
from simulator.errors import InputError

BASE: dict[str, Any] = {
    "model": {"preset": "llama2-7b"},
    "training": {"seq": 4096, "global_batch": 32},
    "cluster": {"name": "dgx_h100", "nodes": 1},
}
LORA = {"rank": 8, "targets": ["q"]}
EVERYTHING = ["embedding", "head", "norms", "layers"]


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"model.quantization": "nf4"}, "model.quantization", "fix:     training.base"),
        ({"model.load_in_4bit": True}, "model.load_in_4bit", "fix:     training.base: nf4"),
        ({"model.lora": {"rank": 16}}, "model.lora", "fix:     training.adapters"),
        ({"training.adapters": LORA | {"base": "nf4"}}, "training.adapters.base", "fix:     training.base: nf4"),
        (
            {"training.adapters": LORA | {"dora": True}},
            "training.adapters.dora",
            "fix:     method: dora instead of dora",
        ),
        ({"training.dora": LORA}, "training.dora", "fix:     adapters instead of dora"),
        ({"training.adapters": LORA | {"use_dora": True}}, "training.adapters.use_dora", "fix:     method: dora"),
        ({"training.optimizer": "muon"}, "training.optimizer", "fix:     training.optimizer.name=muon"),
        ({"training.optimizer": "momentum"}, "training.optimizer", "allowed: a mapping of keys"),
        ({"training.base": "nf4"}, "training.base", "fix:     freeze: [layers]"),
        ({"training.adapters": {"rank": 8}}, "training.adapters.targets", "required"),
        ({"training.adapters": LORA | {"alpha": 16}}, "training.adapters", "changes neither time nor memory"),
        (
            {"training.adapters": LORA | {"target_modules": ["q"]}},
            "training.adapters.target_modules",
            "targets instead",
        ),
        ({"training.adapters": LORA | {"targets": []}}, "training.adapters.targets", "at least 1"),
        (
            {"training.adapters": LORA | {"targets": ["q", "q_down"]}},
            "training.adapters.targets",
            "found:   ['q_down']",
        ),
        ({"training.adapters": LORA | {"targets": ["qkv", "q"]}}, "training.adapters.targets", "q once"),
        ({"training.adapters": LORA | {"targets": ["v", "v"]}}, "training.adapters.targets", "v once"),
        ({"training.adapters": LORA | {"method": "dora"}}, "training.adapters.method", "framework: pytorch"),
        (
            {"training.adapters": LORA, "training.recompute": "ops", "framework": "pytorch"},
            "training.recompute.granularity",
            "none, selective or full, beside training.adapters",
        ),
        (
            {
                "training.freeze": ["layers"],
                "training.base": "nf4",
                "training.recompute": "ops",
                "framework": "pytorch",
            },
            "training.recompute.granularity",
            "none, selective or full, beside training.base",
        ),
        ({"training.freeze": ["layer"]}, "training.freeze[0]", "layers 0-15"),
        ({"training.freeze": ["embeddings"]}, "training.freeze[0]", "fix:     embedding"),
        ({"training.freeze": ["layers 4"]}, "training.freeze[0]", "fix:     layers 4-4"),
        ({"training.freeze": ["layers 4-2"]}, "training.freeze[0]", "the first layer comes after the last"),
        ({"training.freeze": ["layers 4-2"]}, "training.freeze[0]", "fix:     layers 2-4"),
        ({"training.freeze": ["layers 0-40"]}, "training.freeze", "layers 0-31, or layers"),
        ({"training.freeze": EVERYTHING}, "training.freeze", "nothing is left to train"),
        ({"training.freeze": ["embedding", "head", "norms", "layers 0-31"]}, "training.freeze", "nothing is left"),
        ({"training.freeze": ["experts"]}, "training.freeze", "no experts"),
        ({"training.freeze": ["head"], "model.tied_embeddings": True}, "training.freeze", "one tensor"),
        (
            {"training.adapters": LORA, "training.freeze": ["norms"]},
            "training.freeze",
            "with layers, or with attention",
        ),
        (
            {"training.adapters": LORA | {"dtype": "fp32"}, "training.freeze": ["layers"]},
            "training.adapters.dtype",
            "other weights are trained too",
        ),
        (
            {"training.adapters": LORA | {"dtype": "fp32"}, "training.optimizer": {"master_weights": True}},
            "training.optimizer.master_weights",
            "no copy in fp32",
        ),
        (
            {"training.adapters": LORA, "training.precision": "fp16", "training.base": "bf16"},
            "training.base",
            "of the precision, fp16",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        load_workload(BASE, changes)
    assert key in str(refusal.value)
    assert words in str(refusal.value)


@pytest.mark.parametrize("product", ["q", "k", "v", "o", "gate", "up", "down"])
def test_modules_of_peft_are_told_as_products(product: str) -> None:
    targets = ["qkv", f"{product}_proj"]
    with pytest.raises(InputError) as refusal:
        load_workload(BASE, {"training.adapters": LORA | {"targets": targets}})
    assert f"fix:     targets[1]: {product}" in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"parallelism.tp": 2}, "parallelism.tp"), ({"training.adapters.dropout": 0.1}, "training.adapters.dropout")],
)
def test_dora_is_of_whole_products_without_dropout(changes: dict[str, Any], key: str) -> None:
    dora = {"training.adapters": LORA | {"method": "dora"}, "framework": "pytorch"}
    load_workload(BASE, dora)
    with pytest.raises(InputError, match=key.replace(".", r"\.")):
        load_workload(BASE, dora | changes)


def test_what_adapters_freeze() -> None:
    """Everything, unless told otherwise; what is then trained in fp32 has no copy in fp32."""
    assert not load_workload(BASE).training.frozen
    assert list(load_workload(BASE, {"training.adapters": LORA}).training.frozen) == EVERYTHING
    chosen = load_workload(BASE, {"training.adapters": LORA, "training.freeze": ["layers"]})
    assert chosen.training.frozen == ("layers",)
    wide = load_workload(BASE, {"training.adapters": LORA | {"dtype": "fp32"}})
    assert not wide.training.optimizer.master_weights
    assert load_workload(BASE, {"training.adapters": LORA}).training.optimizer.master_weights


def test_targets_of_latent_attention_and_of_experts() -> None:
    """Products that compress and expand have their own names; of experts the shared ones can be targets."""
    deepseek = BASE | {"model": {"preset": "deepseek-v2"}, "parallelism": {"tp": 8}}
    targets = ["q_down", "q_up", "kv_down", "kv_up", "o", "gate", "up", "down"]
    assert load_workload(deepseek, {"training.adapters": LORA | {"targets": targets}}).training.adapters is not None
    mixtral = BASE | {"model": {"preset": "mixtral-8x7b"}}
    with pytest.raises(InputError, match="the model has no such products"):
        load_workload(mixtral, {"training.adapters": LORA | {"targets": ["q", "down"]}})
