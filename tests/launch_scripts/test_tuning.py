"""Scripts of Hugging Face's libraries that train adapters, or with optimizers in 8 bits; and the models they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.config import load_workload
from simulator.launch_scripts.completion import workload_data
from simulator.launch_scripts.script import LaunchScript
from tests.launch_scripts.scripts import AXOLOTL, LLAMA_FACTORY, script, value_at

COMMAND = (
    "torchrun --nproc_per_node 8 sft.py --model_name_or_path meta-llama/Llama-2-7b-hf --max_length 2048 --bf16 True "
    "--per_device_train_batch_size 2 "
)
EVERY = ["q", "k", "v", "o", "gate", "up", "down"]


def understood(read: LaunchScript) -> dict[str, Any]:
    """Return what the script says of the keys of a workload."""
    return {entry.key: entry.value for entry in read.understood}


def test_four_bits_and_a_paged_optimizer_reach_the_workload(tmp_path: Path) -> None:
    """The options of a TRL script that make QLoRA come to what axolotl's keys do, and the job loads."""
    options = "--load_in_4bit True --use_peft True --lora_r 16 --lora_target_modules q_proj v_proj "
    trainer = script(tmp_path, "sft.sh", f"{COMMAND}{options}--lora_dropout 0.05 --optim paged_adamw_8bit\n")
    axolotl = script(tmp_path, "a.yml", AXOLOTL.replace("adamw_torch_fused", "paged_adamw_8bit"))
    expected = {"name": "adamw_8bit", "implementation": "bitsandbytes", "paged": True}
    for read in (trainer, axolotl):
        training = read.workload["training"]
        assert training["base"] == "nf4"
        assert {key: training["optimizer"][key] for key in expected} == expected
        assert training["adapters"] == {"rank": 16, "targets": ["q", "v"], "dropout": 0.05}
        assert not [line for line in read.ignored if line.startswith(("optim", "load_in_4bit"))]
        load_workload(workload_data(read, "job", "file", "dgx_h100", 8, {}))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw_bnb_8bit", {"name": "adamw_8bit", "implementation": "bitsandbytes"}),
        ("adamw_torch_8bit", {"name": "adamw_8bit", "implementation": "torchao"}),
        ("paged_adamw_32bit", {"name": "adamw", "implementation": "bitsandbytes", "paged": True}),
        ("paged_lion_8bit", {"name": "lion_8bit", "implementation": "bitsandbytes", "paged": True}),
        ("lion_32bit", {"name": "lion", "implementation": "bitsandbytes"}),
    ],
)
def test_optimizers_of_other_libraries_are_those_of_their_names(
    name: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    read = script(tmp_path, "sft.sh", f"{COMMAND}--torch_dtype bfloat16 --optim {name}\n")
    assert read.workload["training"]["optimizer"] == {**expected, "master_weights": False}
    load_workload(workload_data(read, "job", "file", "dgx_h100", 8, {}))


def test_products_that_nobody_names_are_the_library_s_and_assumed(tmp_path: Path) -> None:
    """PEFT's default is q_proj and v_proj, GPT-2's one product c_attn, and LLaMA-Factory's all; TRL's rank is 16."""
    gpt2 = COMMAND.replace("meta-llama/Llama-2-7b-hf", "gpt2-124m")
    factory = LLAMA_FACTORY.replace("finetuning_type: full", "finetuning_type: lora")
    axolotl = AXOLOTL.replace("lora_target_modules: [q_proj, v_proj]\n", "")
    for name, text, rank, targets in (
        ("trl.sh", f"{COMMAND}--use_peft\n", 16, ["q", "v"]),
        ("own.sh", f"{COMMAND}--use_lora\n", 8, ["q", "v"]),
        ("gpt2.sh", f"{gpt2}--use_peft\n", 16, ["qkv"]),
        ("f.yaml", factory, 8, EVERY),
        ("a.yml", axolotl, 16, ["q", "v"]),
    ):
        read = script(tmp_path, name, text)
        adapters = read.workload["training"]["adapters"]
        assert (adapters["rank"], adapters["targets"]) == (rank, targets), name
        assert any(line.startswith(f"training.adapters.targets: {', '.join(targets)}") for line in read.assumed)
        assert "targets" not in understood(read)["training.adapters"]
        load_workload(workload_data(read, "job", "file", "dgx_h100", 8, {}))
    named = script(tmp_path, "all.sh", f"{COMMAND}--use_peft --lora_target_modules all-linear\n")
    assert understood(named)["training.adapters"] == {"targets": EVERY}


def test_one_rule_says_what_weights_are_kept_in(tmp_path: Path) -> None:
    """Under FSDP accelerate makes weights fp32, whatever they are loaded in: that alone is told then."""
    for fsdp, dtype, master, is_ignored in (
        ("", "bfloat16", False, False),
        ("", "float32", True, False),
        ("--fsdp full_shard", "bfloat16", True, True),
        ("--fsdp full_shard", "float32", True, False),
        ("--fsdp no_shard", "bfloat16", False, False),
    ):
        read = script(tmp_path, "sft.sh", f"{COMMAND}{fsdp} --torch_dtype {dtype}\n")
        key = "training.optimizer.master_weights"
        assert value_at(read.workload, key) is master
        told = [*(entry.key for entry in read.understood), *(line.partition(":")[0] for line in read.assumed)]
        assert told.count(key) == 1
        assert any(line.startswith("torch_dtype") for line in read.ignored) is is_ignored


@pytest.mark.parametrize(
    ("checkpoint", "preset"),
    [
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", None),  # 32,768 words and no window
        ("Qwen/Qwen3.5-4B", None),  # layers of other kinds than Qwen3's
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2"),
        ("deepseek-ai/DeepSeek-V2-Lite", None),
    ],
)
def test_a_checkpoint_of_another_version_is_another_model(checkpoint: str, preset: str | None, tmp_path: Path) -> None:
    read = script(tmp_path, "sft.sh", COMMAND.replace("meta-llama/Llama-2-7b-hf", checkpoint) + "\n")
    assert read.workload.get("model", {}).get("preset") == preset
    told = f"model_name_or_path {checkpoint}: {checkpoint} is no model known here: give its config.json"
    assert (told in read.ignored) is (preset is None)


@pytest.mark.parametrize(
    ("model", "options", "precision", "master", "why"),
    [
        ("Qwen/Qwen3-8B", "--bf16", "bf16", False, "whose type transformers 5 keeps"),
        ("Qwen/Qwen3-8B", "", "bf16", False, "whose type transformers 5 keeps"),
        ("openai-community/gpt2-xl", "--bf16", "bf16", True, "its checkpoint is so"),
        ("openai-community/gpt2-xl", "", "fp32", None, ""),
        ("Qwen/Qwen3-8B", "--bf16 --packing", "bf16", True, "trl, whose option packing is"),
        ("Qwen/Qwen3-8B", "--dtype float32 --bf16", "bf16", True, "dtype says so"),
        ("Qwen/Qwen3-8B", "--torch_dtype bfloat16", "bf16", False, ""),
    ],
)
def test_weights_have_the_type_of_their_checkpoint(
    model: str, options: str, precision: str, master: bool | None, why: str, tmp_path: Path
) -> None:
    """transformers 5 keeps it, and trl asks for fp32; without a flag of mixed precision products are in that type."""
    command = f"python run_clm.py --model_name_or_path {model} --per_device_train_batch_size 1 --block_size 512"
    read = script(tmp_path, "a.sh", f"{command} {options}\n")
    training = read.workload["training"]
    assert training["precision"] == precision
    assert training.get("optimizer", {}).get("master_weights") is master
    assert any(why in line for line in read.assumed)


@pytest.mark.parametrize(("name", "kind"), [("sdpa", "flash"), ("flash_attention_2", "flash"), ("eager", "unfused")])
def test_attention_has_transformers_names(name: str, kind: str, tmp_path: Path) -> None:
    read = script(tmp_path, "a.sh", f"{COMMAND}--attn_implementation {name}\n")
    assert read.workload["model"]["attention"] == kind
    assert any("FlashAttention 2" in line for line in read.assumed) == (name == "flash_attention_2")
