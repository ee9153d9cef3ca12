"""Training refuses a workload for which it has no code, before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from calibration.__main__ import main
from calibration.train.limits import refusal, refusals
from simulator.config import load_workload
from tests.support.train_command import ENVIRONMENT, ROOT
from tests.support.training import EIGHT, JOBS, LLAMA, MOE, TRAINING, workload

pytest.importorskip("torch")


REFUSED = {
    "training.precision": ({}, {}, {"precision": "fp16", "grad_dtype": "fp16"}),
    "training.grad_dtype": ({}, {"dp": 2}, {"precision": "bf16", "grad_dtype": "fp32"}),
    "training.recompute": ({}, {}, {"recompute": "ops"}),
    "training.optimizer.implementation": ({}, {}, {"optimizer": {"implementation": "fused"}}),
    "model.sliding_window": ({"sliding_window": 4}, {}, {}),
    "model.attention": ({"attention": "unfused"}, {}, {}),
    "parallelism.cp": ({}, {"cp": 2}, {}),
    "parallelism.zero": ({}, {"dp": 2, "zero": 1}, {}),
    "parallelism.schedule": ({}, {"pp": 2, "schedule": "zb_h1"}, {}),
    "parallelism.overlap.grad_reduce": ({}, {"pp": 2, "dp": 2, "schedule": "zb_v"}, {}),
    "model.tied_embeddings": ({"tied_embeddings": True}, {"pp": 2}, {}),
    "training.fused_rms_norm": ({}, {}, {"fused_rms_norm": False}),
    "training.attention_kernel": ({}, {}, {"attention_kernel": "flash2", "precision": "bf16"}),
    "parallelism.copy_to_buckets": ({}, {"dp": 2, "copy_to_buckets": True}, {}),
    "parallelism.collective_algorithm": ({}, {"dp": 2, "collective_algorithm": "ring"}, {}),
    "parallelism.prefetch": ({}, {"dp": 2, "zero": 3, "prefetch": 0}, {}),
    "parallelism.overlap.param_gather": ({}, {"dp": 2, "zero": 3, "overlap": {"param_gather": False}}, {}),
    "parallelism.overlap.tp": ({}, {"tp": 2, "overlap": {"tp": True}}, {}),
    "model.moe.router_dtype": (MOE | {"moe": MOE["moe"] | {"router_dtype": "fp16"}}, {}, {}),
    "model.bias": (MOE | {"bias": True}, {}, {}),
    "parallelism.offload.activations": ({}, {"offload": {"activations": "cpu"}}, {}),
    "parallelism.overlap.p2p": ({}, {"pp": 2, "overlap": {"p2p": False}}, {}),
    "parallelism.deallocate_pipeline_outputs": ({}, {"pp": 2, "deallocate_pipeline_outputs": True}, {}),
}

#: Stacks that are not trained -> the key that says so.
STACKS: dict[str, Any] = {
    "framework": {"name": "pytorch", "compile": True},
    "framework.version": {"name": "pytorch", "version": "2.11"},
}


@pytest.mark.parametrize("key", [*REFUSED, *STACKS])
def test_what_is_not_written_is_refused_by_its_key(key: str) -> None:
    model, layout, training = REFUSED.get(key, ({}, {}, {}))
    framework = STACKS.get(key, "pytorch")
    made = {
        "model": LLAMA | model,
        "parallelism": layout,
        "training": {**TRAINING, **training},
        "framework": framework,
        "cluster": "dgx_h100",
    }
    (reason,) = refusals(load_workload(made))
    assert reason.key == key
    assert reason.allowed


#: Key of a workload with adapters that refuses it -> what is changed of training and layout.
UNTRAINED_ADAPTERS: dict[str, Any] = {
    "training.freeze": ({"freeze": ["embedding", "head", "norms", "layers"]}, {}),
    "parallelism.dp": ({"global_batch": 8}, {"dp": 2}),
}


@pytest.mark.parametrize("key", UNTRAINED_ADAPTERS)
def test_adapters_are_trained_on_one_gpu_beside_what_is_frozen(key: str) -> None:
    training, layout = UNTRAINED_ADAPTERS[key]
    tuned = {"seq": 64, "global_batch": 4, "adapters": {"rank": 8, "targets": ["q", "v"]}} | training
    made = {"model": LLAMA, "parallelism": layout, "training": tuned, "cluster": "dgx_h100"}
    (reason,) = refusals(load_workload(made | {"framework": "hugging_face"}))
    assert reason.key == key


def test_adapters_are_trained_beside_4_bit_weights() -> None:
    training = {"seq": 64, "global_batch": 4, "adapters": {"rank": 8, "targets": ["q", "v"]}, "base": "nf4"}
    made = {"model": LLAMA, "training": training, "cluster": "dgx_h100", "framework": "hugging_face"}
    assert not list(refusals(load_workload(made)))


def test_gemma_2_without_caps_is_told_which_it_lacks() -> None:
    """Gemma 2 caps scores and logits, and has norms behind blocks as well."""
    layers = LLAMA | {"activation": "geglu", "norm_place": "both", "attention_softcap": 50.0}
    made = {"model": layers, "training": {"seq": 64, "global_batch": 4}, "cluster": "dgx_h100"}
    reasons = [reason.key for reason in refusals(load_workload(made | {"framework": "hugging_face"}))]
    assert [key for key in reasons if key.endswith("softcap") or key == "model.qk_norm"] == ["model.logit_softcap"]


def test_a_config_json_is_trained_whole_and_sizes_of_its_like_are_not(tmp_path: Path) -> None:
    """Phi-3's config.json says all of it. Its sizes alone would be made into a Llama, with products of their own."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "phi3", **sizes, "num_key_value_heads": 2, "vocab_size": 256, "sliding_window": None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    made = {"training": {"seq": 64, "global_batch": 4}, "cluster": "dgx_h100", "framework": "hugging_face"}
    whole = load_workload(made | {"model": {"hf_config": str(path), "layers": 1}})
    assert whole.model.inherited.config == str(path)
    assert not list(refusals(whole))
    alone = load_workload(made | {"model": LLAMA | {"joined_products": True}})
    assert [reason.key for reason in refusals(alone)] == ["model.joined_products"]


@pytest.mark.parametrize("biases", [["qkv", "o"], ["mlp"]])
def test_biases_are_qwen2s(biases: list[str]) -> None:
    layers = {key: value for key, value in LLAMA.items() if key != "bias"}
    made = {"training": {"seq": 64, "global_batch": 4}, "cluster": "dgx_h100", "framework": "hugging_face"}
    assert not list(refusals(load_workload(made | {"model": layers | {"biases": ["qkv"]}})))
    (reason,) = refusals(load_workload(made | {"model": layers | {"biases": biases}}))
    assert reason.key == "model.biases"


@pytest.mark.parametrize(
    ("layers", "key"),
    [
        ({"activation": "geglu"}, "model.norm_place"),  # Gemma 1 and 2
        ({"sliding_window": 8, "mixers": ["window", "attention"]}, "model.mixers"),
        ({"sliding_window": 8, "qk_norm": True}, "model.sliding_window"),
    ],
)
def test_windows_are_mistrals_and_gemma_3s(layers: dict[str, Any], key: str) -> None:
    made = {"model": LLAMA | layers, "training": {"seq": 64, "global_batch": 4}, "cluster": "dgx_h100"}
    assert key in [reason.key for reason in refusals(load_workload(made | {"framework": "hugging_face"}))]


def test_all_that_is_in_the_way_is_said_at_once() -> None:
    """Each key has a line, those of the layout too. A key that follows from another one has none.

    Under ``framework: deepspeed`` pipelines deallocate outputs, as Megatron's do. FSDP would reduce in the type of
    parameters that are not its masters. Nobody has asked for these.
    """
    made = workload("llama one") | {"parallelism": {"pp": 2, "dp": 2, "zero": 3, "prefetch": 0}}
    made["model"] = LLAMA | {"sliding_window": 4}
    made["training"], made["framework"] = {"seq": 16, "global_batch": 8, "attention_kernel": "flash2"}, "deepspeed"
    said = refusal(load_workload(made))
    assert said.splitlines()[:2] == [
        "cannot be trained here:",
        "  framework: is not plain PyTorch; found: 'deepspeed'; allowed: pytorch",
    ]
    assert [line.split(":")[0].strip() for line in said.splitlines()[1:]] == [
        "framework",
        "model.sliding_window",
        "training.attention_kernel",
        "parallelism.prefetch",
        "parallelism.zero",
    ]


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"model": {"attention": "unfused"}}, "model.attention"),
        ({"training": {"fp8": {"recipe": "te_mxfp8"}}}, "training.fp8"),
        ({"training": {"loss": "eager"}}, "training.loss.name"),
        (
            {"training": {"optimizer": {"name": "adamw", "implementation": "foreach"}}},
            "training.optimizer.implementation",
        ),
        ({"parallelism": {"cp": 2}}, "parallelism.cp"),
    ],
)
def test_what_transformer_engine_is_not_trained_with_is_refused(changed: dict[str, Any], key: str) -> None:
    """The narrow Llama whose hosts were measured is trained. Each change of it is refused by its key."""
    path = ROOT / "calibration" / "runs" / "hosts" / "eh1_llama_l16.yaml"
    made = yaml.safe_load(path.read_text())
    made["training"] |= {"seq": 128}
    made["cluster"] = "dgx_b200"  # has MXFP8
    assert list(refusals(load_workload(made))) == []
    for section, keys in changed.items():
        made[section] = made[section] | keys
    assert key in [reason.key for reason in refusals(load_workload(made))]


@pytest.mark.slow
def test_the_workload_to_begin_with_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workload of the README is trained. Without any of the keys that the README explains it is refused.

    The usual framework is trained too, but with another optimizer than is usual.
    """
    text = (ROOT / "calibration" / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    explained = [line.split(":")[0].strip() for line in text.splitlines() if "#" in line]
    keys = ["framework", "training.grad_dtype", "training.optimizer.state_dtype"]
    assert explained == [key.rpartition(".")[2] for key in keys]
    for key, name in zip(keys, explained, strict=True):
        without = [line for line in text.splitlines() if line.split(":")[0].strip() != name]
        path = tmp_path / f"{name}.yaml"
        path.write_text("\n".join(without))
        said = "training.optimizer.implementation" if key == "framework" else key
        assert f"\n  {said}: " in refusal(load_workload(path))
    path = tmp_path / "my_run.yaml"
    path.write_text(text)
    monkeypatch.chdir(ROOT)  # the other rank and the workers are processes
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    assert main(["train", str(path), "--device", "cpu", "--smoke", "--gpus", "2", "--out", str(tmp_path / "out")]) == 0


def test_fsdp_without_overlap_is_refused() -> None:
    layout = {"dp": 2, "zero": 3, "overlap": {"grad_reduce": False}}
    (reason,) = refusals(load_workload(workload("llama one") | {"parallelism": layout}))
    assert reason.key == "parallelism.overlap.grad_reduce"


@pytest.mark.parametrize("job", [*JOBS, *EIGHT])
def test_what_is_trained_here_is_not_refused(job: str) -> None:
    assert not refusal(load_workload(workload(job)))


def test_the_set_of_runs_is_not_refused() -> None:
    for path in sorted((ROOT / "calibration" / "runs").glob("*/*.yaml")):
        assert not refusal(load_workload(path)), path.name
