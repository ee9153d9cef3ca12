"""Options of launch scripts: each ends in one list, and those that decide time or memory reach the workload."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulator.config import load_workload
from simulator.launch_scripts.completion import workload_data
from simulator.launch_scripts.script import flattened
from simulator.launch_scripts.shell import launch_command
from tests.launch_scripts.scripts import (
    AXOLOTL,
    DEEPSPEED,
    LLAMA_FACTORY,
    MEGATRON,
    NEMO,
    SCRIPTS,
    TORCHTITAN,
    TRAINER,
    script,
    value_at,
)
from tests.support.commands import command

#: Name of a file -> a text of the same kind with values that are not simulated, switches that are off, and more names.
ODD = {
    "megatron.sh": MEGATRON.replace("--overlap-moe-magic", "--recompute-modules mlp --optimizer lamb --no-load-optim "
     "--attention-backend auto --fp8-recipe custom --fp8-format e4m3 --data-parallel-sharding-strategy optim "
     "--use-torch-fsdp2 "
     "--accumulate-allreduce-grads-in-bf16 --mtp-num-layers $2 --rotary-percent 0.5 --kv-channels 128 "
     "--moe-layer-freq [0,1] --window-size 9,0 --window-attn-skip-freq [0,1] --cp-comm-type p2p "
     "--decoder-last-pipeline-num-layers $3 --moe-token-dispatcher-type allgather --train-samples 100 --q-lora-rank 8"),
    "arguments.yaml": SCRIPTS["arguments.yaml"][0] + "again: {seq_length: 128}\nnum_query_groups: 2\nswiglu: false\n"
     "recompute: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 3}\n",
    "nemo.yaml": NEMO + "  fp8: false\n  num_query_groups: ${.x}\n  data: {prefix: a}\n  new_key: 1\n  rampup: null\n"
     "exp_manager: {dir: a}\nother: {key: 1}\n",
    "titan.toml": TORCHTITAN.replace('"op"', '"3"').replace("[training]", "[training]\nglobal_batch_size = -1\n"
     "max_norm = 0.0\nmixed_precision_param = 'float8'\ndata_parallel_degree = 2") + "[optimizer]\nname = 'Muon'\n"
     "implementation = 'odd'\nfused = true\n"
     "[float8]\nrecipe_name = 'rowwise_with_gw_hp'\nenable_float8_linear = true\n"
     "filter_fqns = ['output']\n",
    "ds_config.json": json.dumps({**DEEPSPEED, "optimizer": {"type": "Lion", "params": {"lr": 1, "torch_adam": True}},
     "fp16": {"enabled": False, "loss_scale": 0}, "sequence_parallel_size": 1, "gradient_clipping": 0,
     "zero_optimization": {"offload_param": {"device": "none", "pin_memory": False}, "cpu_offload": True}}),
    "accelerate.yaml": "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config: {backend: TE}\nuse_cpu: true\n"
     "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, sharding_strategy: 9, offload_params: true, "
     "fsdp_backward_prefetch: NO_PREFETCH, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, odd: 1}\n",
    "axolotl.yml": AXOLOTL + "fsdp: [hybrid_shard, auto_wrap, offload]\nfsdp_config: {fsdp_state_dict_type: FULL}\n"
     "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true\ntensor_parallel_size: 1\n"
     "load_in_8bit: true\nlora_target_linear: false\nflash_attention: true\nfp16: true\n",
    "factory.yaml": LLAMA_FACTORY.replace("finetuning_type: full", "finetuning_type: lora\nuse_dora: true\n"
     "quantization_bit: 8\nquantization_method: hqq\nlora_target: odd,q_proj\npure_bf16: false\nflash_attn: fa2"),
    "trainer.sh": TRAINER.replace("--zero_stage $STAGE", "--zero_stage auto --offload --fsdp 'odd words' --use_peft "
     "--lora_target_modules all-linear --torch_dtype int8 --optim galore --max_length 3 --fsdp_config x.json "
     "--ddp_bucket_cap_mb 3"),
}  # fmt: skip


def names_in(name: str, text: str) -> set[str]:
    """Return the options of a script: of a shell command its words with two hyphens, else the keys of its file."""
    if name.endswith(".sh"):
        program = launch_command(text, Path(name)).words
        return {word.text[2:].split("=")[0].replace("-", "_") for word in program if word.text.startswith("--")} - {
            "nproc_per_node", "nnodes", "num_gpus"}  # fmt: skip
    data = tomllib.loads(text) if name.endswith(".toml") else yaml.safe_load(text)
    keys = {f"{key}" for key in flattened(data)}
    if name == "arguments.yaml":  # the last part of a name is Megatron-LM's, but of a second one
        keys = {key if text.count("seq_length") == 2 and key == "seq_length" else key.split(".")[-1] for key in keys}
    return keys


#: Beginnings of lines that are of no option.
ABOUT = ("not followed", "said twice", "adapters of", "sharding inside")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_option_is_in_exactly_one_list(name: str, tmp_path: Path) -> None:
    """Scripts of every kind hold this, as they are and with values that are not simulated."""
    for text in (SCRIPTS[name][0], ODD[name]):
        read = script(tmp_path, name, text)
        understood = {entry.option for entry in read.understood}
        ignored = {re.split(r"[ :]", line)[0] for line in read.ignored if not line.startswith(ABOUT)}
        assert understood | set(read.neutral) | ignored == names_in(name, text)
        assert understood & set(read.neutral) == understood & ignored == ignored & set(read.neutral) == set()
        assert len(set(read.neutral)) == len(read.neutral)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("megatron.sh", ("--recompute-method block --recompute-num-layers 1", "--recompute-method uniform "
         "--recompute-num-layers 4"), ("recompute_method uniform", "recompute_num_layers 4")),
        ("megatron.sh", ("--attention-dropout 0.0", "--attention-dropout 0.1"), ("attention_dropout 0.1",)),
        ("megatron.sh", ("--bf16\"", "--bf16\" --optimizer lamb --attention-backend local"),
         ("optimizer lamb", "attention_backend local")),
        ("megatron.sh", ("--bf16\"", "--bf16\" --attention-backend unfused --no-masked-softmax-fusion"),
         ("no_masked_softmax_fusion",)),
        ("ds_config.json", ('"bf16"', '"optimizer": {"type": "Lion"}, "bf16"'), ("optimizer.type Lion",)),
        ("trainer.sh", ("--gradient_checkpointing", "--optim adamw_torch_4bit --label_smoothing_factor 0.1"),
         ("optim adamw_torch_4bit", "label_smoothing_factor 0.1")),
        ("axolotl.yml", ("load_in_4bit: true", "load_in_8bit: true\nliger_rope: true"),
         ("load_in_8bit", "liger_rope")),
        ("accelerate.yaml", ("fsdp_offload_params: false", "fsdp_forward_prefetch: true"),
         ("fsdp_config.fsdp_forward_prefetch",)),
        ("nemo.yaml", ("activation: fast-swiglu", "activation: squared-relu"), ("model.activation squared-relu",)),
    ],
)  # fmt: skip
def test_a_value_that_is_not_simulated_is_named(
    name: str, change: tuple[str, str], told: tuple[str, ...], tmp_path: Path
) -> None:
    text = SCRIPTS[name][0].replace(*change)
    assert text != SCRIPTS[name][0]
    ignored = script(tmp_path, name, text).ignored
    assert [start for start in told if not any(line.startswith(start) for line in ignored)] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("transformer_impl: local", {"framework": "megatron_core_local", "model.attention": "unfused"}),
        ("transformer_impl: transformer_engine", {"framework": "megatron_core"}),
        ("optimizer: sgd", {"training.optimizer.name": "sgd_momentum", "framework": "megatron_core"}),
        ("use_flash_attn: true", {"model.attention": "flash"}),
        ("attention_backend: unfused", {"model.attention": "unfused"}),
        ("clip_grad: 0", {"training.grad_clip": None}),
    ],
)
def test_options_that_decide_time_reach_the_workload(line: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """The first of them is what local modules have alone; all load."""
    read = script(tmp_path, "arguments.yaml", f"{SCRIPTS['arguments.yaml'][0]}{line}\n")
    data = workload_data(read, "job", "arguments.yaml", "dgx_h100", 4, {})
    assert {key: value_at(data, key) for key in expected} == expected
    assert line.split(":")[0] in {entry.option for entry in read.understood}
    load_workload(data)


def test_options_of_accelerates_launcher_are_told(tmp_path: Path) -> None:
    """Options that say how a model is trained are not read; those of processes are."""
    command = (
        "accelerate launch --config_file a.yaml --mixed_precision=bf16 --num_processes 4 a.py --model_name_or_path m"
    )
    read = script(tmp_path, "a.sh", command)
    assert read.gpus == 4
    assert read.ignored[-2:] == ("accelerate launch's config_file", "accelerate launch's mixed_precision")


def test_values_from_outside_are_told_as_the_script_writes_them(tmp_path: Path) -> None:
    read = script(tmp_path, "megatron.sh", MEGATRON.replace("--overlap-moe-magic", "--mtp-num-layers 'a>$2/b'"))
    assert "mtp_num_layers (a>$2/b is not in the file)" in read.ignored


#: Name of a file -> a change of it, and the keys of training that it means. Sizes of products are as they were.
EIGHT_BITS: list[tuple[str, tuple[str, str], dict[str, Any]]] = [
    ("megatron.sh", ("--overlap-moe-magic", f"--fp8-format hybrid{recipe}"), {"precision": "bf16", "fp8": ours})
    for recipe, ours in {
        "": "te_delayed", " --fp8-recipe delayed": "te_delayed", " --fp8-recipe tensorwise": "te_current",
        " --fp8-recipe blockwise": "te_blockwise", " --fp8-recipe mxfp8": "te_mxfp8",
    }.items()
] + [
    ("titan.toml", ("[compile]", f"[float8]\n{keys}\n[compile]"), {"precision": "bf16", "fp8": ours})
    for keys, ours in {
        "enable_float8_linear = true": "torchao_tensorwise",
        "enable_float8_linear = true\nrecipe_name = 'rowwise'": "torchao_rowwise",
        "enable_float8_linear = true\nenable_fsdp_float8_all_gather = true": {
            "recipe": "torchao_tensorwise", "gather": "fp8"},
    }.items()
] + [
    ("titan.toml", ("flavor", "converters = ['quantize.linear.float8']\nflavor"), {"fp8": "torchao_tensorwise"}),
    ("accelerate.yaml", ("mixed_precision: bf16", "mixed_precision: fp8"), {"precision": "bf16"}),
    ("nemo.yaml", ("num_layers: 24", "num_layers: 24\n  fp8: true"), {"precision": "bf16", "fp8": "te_delayed"}),
    ("nemo.yaml", ("num_layers: 24", "num_layers: 24\n  fp8: false"), {"precision": "bf16"}),
    ("nemo.yaml", ("num_layers: 24", "num_layers: 24\n  fp4: e2m1"), {"precision": "bf16", "fp4": "te_nvfp4"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("components", "told"), [('["model", "loss"]', False), ('["loss", "model"]', False), ('["model"]', True)]
)
def test_what_torchtitan_compiles_anyway_is_no_news(components: str, told: bool, tmp_path: Path) -> None:
    """Layers and loss are compiled by default (``compile.components``); leaving one out is not simulated."""
    text = SCRIPTS["titan.toml"][0].replace("[compile]", f"[compile]\ncomponents = {components}")
    read = script(tmp_path, "titan.toml", text)
    assert any("components" in text for text in read.ignored) is told


@pytest.mark.parametrize(("name", "change", "expected"), EIGHT_BITS)
def test_training_in_8_bits_is_a_recipe_beside_bf16(
    name: str, change: tuple[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    """The workload loads: precision fp8 says nothing of casts and is refused."""
    text = SCRIPTS[name][0]
    assert change[0] in text
    added = {key: value for key, value in SCRIPTS[name][1].items() if key != "gpus"}
    blackwell = any(expected.get(key) in ("te_mxfp8", "te_nvfp4") for key in ("fp8", "fp4"))
    cluster = "dgx_b200" if blackwell else "dgx_h100"  # Hopper has no such matrix units
    data = workload_data(
        script(tmp_path, name, text.replace(*change)), "job", name, cluster, SCRIPTS[name][1].get("gpus"), added
    )
    training = {key: data["training"].get(key) for key in ("precision", "fp8", "fp4")}
    assert training == {"precision": "bf16", "fp8": None, "fp4": None, **expected}
    load_workload(data)


def test_a_path_is_written_as_seen_from_the_file_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`jobs/job.yaml` of a config in `models` begins with the folder above."""
    monkeypatch.chdir(tmp_path)
    for folder in ("jobs", "models"):
        Path(folder).mkdir()
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 2}
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, **sizes}
    Path("models/config.json").write_text(json.dumps(llama))
    options = "--model_name_or_path me/mine --per_device_train_batch_size 1 --max_seq_length 512 --bf16 true"
    Path("train.sh").write_text(f"torchrun --nproc_per_node 8 train.py {options}\n")
    named = ["--set", "model.hf_config=models/config.json", "--cluster", "dgx_h100", "--out", "jobs/job.yaml"]
    assert command("import", "train.sh", *named, "--quiet") == 0
    assert yaml.safe_load(Path("jobs/job.yaml").read_text())["model"] == {"hf_config": "../models/config.json"}
    load_workload("jobs/job.yaml")
