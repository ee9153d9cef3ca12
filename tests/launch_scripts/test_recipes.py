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
ARGUMENTS = "import argparse\nargs = argparse.ArgumentParser().parse_args()\n"
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
    assert "the recipe itself" not in read.neutral


@pytest.mark.parametrize(
    ("name", "preset", "layout", "batch"),
    [
        ("llama31_8b", "llama3-8b", (1, 1, 1, 2, 4), (8192, 512)),
        ("llama31_70b", "llama3-70b", (4, 4, 5, 2, 1), (8192, 512)),
        ("mistral_7b", "mistral-7b", (1, 1, 1, 2, 4), (4096, 512)),
        ("mixtral_8x22b", "mixtral-8x22b", (2, 4, 14, 2, 8), (4096, 512)),
        ("gpt3_175b", "gpt3-175b", (4, 8, 6, 1, 16), (2048, 2048)),
    ],
)
def test_recipes_of_nemo_have_its_layouts(
    name: str, preset: str, layout: tuple[int, ...], batch: tuple[int, int], tmp_path: Path
) -> None:
    """Tensor, pipeline, chunks, context: as NeMo's file says them. Replicas: nodes of 8 GPUs over their product."""
    text = f"from nemo.collections import llm\nrecipe = llm.{name}.pretrain_recipe(dir='/x', name='y')\n"
    data = loaded(recipe(tmp_path, text))
    split = data["parallelism"]
    assert data["model"] == {"preset": preset}
    assert tuple(split.get(key, 1) for key in ("tp", "pp", "vpp", "cp", "dp")) == layout
    assert (data["training"]["seq"], data["training"]["global_batch"]) == batch


def test_the_batch_of_a_recipe_that_its_pipeline_cannot_share_is_told(tmp_path: Path) -> None:
    """Llama 3.1 405B: 512 sequences on 2 replicas of 9 stages are 256 micro-batches, which are no rounds of 9."""
    text = "from nemo.collections import llm\nrecipe = llm.llama31_405b.pretrain_recipe(dir='/x', name='y')\n"
    with pytest.raises(InputError, match="256 micro-batches"):
        loaded(recipe(tmp_path, text))


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
    """How many GPUs an argument says is asked for; not even the nodes that NeMo's own recipe has count."""
    text = f"{ARGUMENTS}{NEMO.replace('nodes=4', 'nodes=args.nodes')}"
    with pytest.raises(InputError, match="does not say how many GPUs"):
        loaded(recipe(tmp_path, text))


@pytest.mark.parametrize("source", ["argparse.ArgumentParser().parse_args()", "OmegaConf.load('job.yaml')"])
def test_no_branch_of_a_condition_from_outside_is_taken(source: str, tmp_path: Path) -> None:
    """tp stays at the 2 that the file says in any case; as many nodes as an attribute from outside says are unsaid."""
    head = f"import argparse\nfrom omegaconf import OmegaConf\nargs = {source}\n"
    change = "    if args.performance:\n        recipe.trainer.strategy.tensor_model_parallel_size = 8\n"
    change += "    recipe.trainer.num_nodes = args.nodes\n"
    read = recipe(tmp_path, head + NEMO.replace("    run.run", f"{change}    run.run"))
    assert value_at(read.workload, "parallelism.tp") == 2
    assert [line for line in read.ignored if line.startswith("not followed")] == [
        "not followed: line 22: if args.performance"
    ]
    with pytest.raises(InputError, match="does not say how many GPUs"):
        loaded(read)


@pytest.mark.parametrize(
    ("change", "dp"),
    [
        ("recipe.trainer.num_nodes = 2\n    recipe.trainer.num_nodes *= 4", 32),
        ("recipe.trainer.num_nodes = 14\n    recipe.trainer.num_nodes += TP", 64),
        ("if TP:\n        return\n    recipe.trainer.num_nodes = 9", 16),
    ],
)
def test_changes_of_a_value_are_followed(change: str, dp: int, tmp_path: Path) -> None:
    """Eight GPUs to a node over tp 2: 8 nodes make 32 replicas, 16 make 64. Behind a return the 4 of before stay."""
    read = recipe(tmp_path, NEMO.replace("    run.run", f"    {change}\n    run.run"))
    assert value_at(loaded(read), "parallelism.dp") == dp
    assert read.ignored == ()


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("for x in y:\n    TP = 8", "for x in y"),
        ("async def later():\n    pass", "async def later()"),
        ("class Sizes:\n    TP = 8", "class Sizes"),
        ("match TP:\n    case _:\n        TP = 8", "match TP"),
        ("sizes = {}\nsizes['tp'] = 8", "sizes['tp'] = 8"),
        ("TP %= 3", "TP %= 3"),
        ("y.tp = 8", "y.tp = 8"),
    ],
)
def test_what_is_not_followed_is_named(statement: str, line: str, tmp_path: Path) -> None:
    read = recipe(tmp_path, f"{NEMO}{statement}\n")
    number = len(NEMO.splitlines()) + (2 if "sizes[" in statement else 1)
    assert read.ignored == (f"not followed: line {number}: {line}",)


@pytest.mark.parametrize(
    ("precision", "key", "recipe_name"),
    [
        ("bf16_with_nvfp4_mixed", "fp4", "te_nvfp4"),
        ("nemotron_3_super_bf16_with_nvfp4_mixed", "fp4", "te_nvfp4"),
        ("bf16_with_mxfp8_mixed", "fp8", "te_mxfp8"),
        ("bf16_with_fp8_current_scaling_mixed", "fp8", "te_current"),
        ("bf16_with_fp8_subchannel_scaling_mixed", "fp8", "te_blockwise"),
    ],
)
def test_precisions_become_recipes_of_products(precision: str, key: str, recipe_name: str, tmp_path: Path) -> None:
    """A precision is given by its name, or by a call of the function of that name."""
    named = recipe(tmp_path, BRIDGE.replace("bf16_mixed", precision))
    call = f"from megatron.bridge.training.mixed_precision import {precision}\n" + BRIDGE
    called = recipe(tmp_path, call.replace('"bf16_mixed"', f"{precision}()"))
    for read in (named, called):
        assert value_at(read.workload, f"training.{key}") == recipe_name
        assert value_at(read.workload, "training.precision") == "bf16"
        assert read.ignored == ()


@pytest.mark.parametrize("precision", ["bf16_with_mxfp4_mixed", "fp8_mx"])
def test_an_unknown_precision_is_named(precision: str, tmp_path: Path) -> None:
    read = recipe(tmp_path, BRIDGE.replace("bf16_mixed", precision))
    assert not {"fp8", "fp4"} & read.workload["training"].keys()
    assert [line for line in read.ignored if precision in line and "mixed_precision" in line] == [*read.ignored]
    assert len(read.ignored) == 1


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
