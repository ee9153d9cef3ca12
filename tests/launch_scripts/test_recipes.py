"""Recipes in Python: what their calls and attributes say, without running them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.config import load_workload
from simulator.errors import InputError
from simulator.launch_scripts import LaunchScript
from simulator.launch_scripts.completion import workload_data
from tests.launch_scripts.scripts import script, value_at

NEMO = """
import nemo_run as run
from nemo.collections import llm
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_mixed

TP = 2

def configure(nodes: int = 1, each: int = 8):
    recipe = llm.llama3_8b.pretrain_recipe(dir="/x", name="y", num_nodes=nodes, num_gpus_per_node=each)
    recipe.trainer.strategy.tensor_model_parallel_size = TP
    recipe.trainer.strategy.context_parallel_size = TP // 2
    recipe.data.global_batch_size = 256 if TP > 1 else 128
    recipe.trainer.plugins = bf16_with_fp8_mixed()
    return recipe

def main():
    recipe = configure(nodes=4)
    recipe.model.config.recompute_granularity = "selective"
    run.run(recipe, executor=run.LocalExecutor(ntasks_per_node=8))

if __name__ == "__main__":
    main()
"""
BRIDGE = """
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, GPTDatasetConfig, TrainingConfig

def small_pretrain_config(**user):
    sizes = {"tp": 4, **user}
    model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-30B-A3B").to_megatron_provider(load_weights=False)
    model.tensor_model_parallel_size = sizes.get("tp", 1)
    model.expert_model_parallel_size = 8
    model.sequence_parallel = True
    return ConfigContainer(
        model=model,
        train=TrainingConfig(global_batch_size=1024, micro_batch_size=2),
        dataset=GPTDatasetConfig(sequence_length=4096),
        ddp=dict(overlap_grad_reduce=True),
        mixed_precision="bf16_mixed",
    )
"""


def recipe(folder: Path, text: str) -> LaunchScript:
    return script(folder, "recipe.py", text)


def loaded(read: LaunchScript, gpus: int | None = None) -> dict[str, Any]:
    data = workload_data(read, "job", "recipe.py", "dgx_h100", gpus, {})
    load_workload(data)
    return data


def test_a_recipe_of_nemo_with_changes(tmp_path: Path) -> None:
    """Four nodes of eight GPUs over tp 2 make 16 replicas. The sequence is that of NeMo's own recipe, and is told."""
    read = recipe(tmp_path, NEMO)
    data = loaded(read)
    expected = {
        "model.preset": "llama3-8b",
        "parallelism.tp": 2,
        "parallelism.cp": 1,
        "parallelism.dp": 16,
        "parallelism.zero": 1,
        "training.seq": 8192,
        "training.global_batch": 256,
        "training.fp8": "te_delayed",
        "training.recompute": "selective",
    }
    assert {key: value_at(data, key) for key in expected} == expected
    assert "training.seq: 8192, as the recipe itself has it" in read.assumed
    assert read.ignored == ()


def test_a_configuration_of_megatron_bridge(tmp_path: Path) -> None:
    data = loaded(recipe(tmp_path, BRIDGE), gpus=64)
    assert data["model"] == {"preset": "qwen3-30b-a3b"}
    assert (data["parallelism"]["tp"], data["parallelism"]["ep"], data["parallelism"]["dp"]) == (4, 8, 16)
    assert (data["training"]["seq"], data["training"]["micro_batch"]) == (4096, 2)


def test_fine_tuning_has_adapters(tmp_path: Path) -> None:
    """LoRA of rank 32 beside all products unless the recipe says otherwise."""
    tune = (
        "from nemo.collections import llm\nrecipe = llm.llama3_8b.finetune_recipe(num_nodes=1, num_gpus_per_node=8)\n"
    )
    sizes = "recipe.data.seq_length = 2048\nrecipe.data.global_batch_size = 8\nrecipe.data.micro_batch_size = 1\n"
    usual = loaded(recipe(tmp_path, tune + sizes))["training"]["adapters"]
    assert usual == {"rank": 32, "targets": ["qkv", "o", "gate_up", "down"]}
    own = "from nemo.collections.llm.peft import LoRA\nrecipe.peft = LoRA(target_modules=['linear_qkv'], dim=8)\n"
    assert loaded(recipe(tmp_path, tune + sizes + own))["training"]["adapters"] == {"rank": 8, "targets": ["qkv"]}
    without = tune.replace("num_nodes=1", "num_nodes=1, peft_scheme=None")
    assert "adapters" not in loaded(recipe(tmp_path, without + sizes))["training"]


def test_a_value_from_outside_is_none(tmp_path: Path) -> None:
    """How many GPUs an argument says is asked for; a loop is named."""
    text = NEMO.replace("nodes=4", "nodes=args.nodes").replace("def main():", "def main():\n    for x in y: pass")
    read = recipe(tmp_path, text)
    assert any("for" in line and "not followed" in line for line in read.ignored)
    with pytest.raises(InputError, match="does not say how many GPUs"):
        loaded(read)


def test_nothing_is_run(tmp_path: Path) -> None:
    """A file that would end Python, write a file or never end does none of it."""
    harm = f"import os\nopen({str(tmp_path / 'there')!r}, 'w')\nos._exit(3)\nbig = 'a' * 10**9\n"
    harm += "def f(x): return f(x)\nf(1)\n"
    assert recipe(tmp_path, harm + NEMO).workload["model"] == {"preset": "llama3-8b"}
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def (:", "line 1: is no Python"),
        ("x = 1", "makes no recipe"),
        ("x = " + "(" * 5000 + ")" * 5000, "is no Python|nested too deeply"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        recipe(tmp_path, text)
