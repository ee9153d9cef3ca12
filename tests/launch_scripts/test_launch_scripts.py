"""Launch scripts: parallelism, batch and precision of each kind, what is assumed and ignored, and what is asked for.

Scripts here are made up; their constructs are those that people use.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulator.cli.app import main
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.launch_scripts import LaunchScript, read_script
from simulator.launch_scripts.completion import workload_data
from simulator.launch_scripts.script import Unsaid, flattened
from simulator.launch_scripts.shell import launch_command, options_of

MEGATRON = r"""#!/bin/bash
#SBATCH --nodes=4
export NCCL_DEBUG=WARN
GPUS_PER_NODE=8          # of a node
NNODES=${SLURM_NNODES:-"4"}
TP=${TP:-2}
PP=4
LAYERS_EACH=$((32 / PP / 2))
CKPT=$1
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096      # as Mistral's
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --seq-length 4096
    --swiglu --normalization RMSNorm --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0.0 --attention-dropout 0.0
#   --fp16
)
MOE_ARGS=(--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --moe-grouped-gemm)
DTYPE="bf16"
if [[ "$DTYPE" == "bf16" ]]; then
    MODEL_ARGS+=("--bf16" "--grad-reduce-in-bf16")
elif [ "$DTYPE" == "fp16" ]; then
    MODEL_ARGS+=(--fp16)
else
    exit 1
fi
if [ -n "${WANDB_KEY}" ]; then
    MODEL_ARGS+=(--clip-grad 5.0)
fi
for NODE in a b; do
    TP=8
done
LAYOUT=" --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} "
LAYOUT+="--num-layers-per-virtual-pipeline-stage ${LAYERS_EACH} --sequence-parallel --use-distributed-optimizer"
RUN="torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${MOE_ARGS[*]} $LAYOUT --overlap-grad-reduce \
    --micro-batch-size 1 --global-batch-size 256 --train-iters 1000 --lr 1e-4 --tokenizer-type Llama2Tokenizer \
    --recompute-granularity full --recompute-method block --recompute-num-layers 1 --save $CKPT --overlap-moe-magic"
eval $RUN 2>&1 | tee log.txt
"""
TORCHTITAN = """
# a preset for 64 H100 GPUs
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 2
seq_len = 8192
[compile]
enable = true
[parallelism]
tensor_parallel_degree = 4
data_parallel_shard_degree = -1
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8},
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 4
fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_offload_params: false, fsdp_activation_checkpointing: true}
"""
AXOLOTL = """
base_model: meta-llama/Llama-2-7b-hf
sequence_len: 2048
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
optimizer: adamw_torch_fused
bf16: auto
learning_rate: 0.0002
wandb_project:
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: full
deepspeed: configs/ds_z3.json
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
max_samples: 100
"""
TRAINER = """
STAGE=$2
if [ "$STAGE" == "" ]; then
  STAGE=2
fi
deepspeed --num_gpus=8 main.py --model_name_or_path meta-llama/Llama-2-13b-hf --per_device_train_batch_size 4 \\
  --max_seq_len 512 --gradient_accumulation_steps 2 --gradient_checkpointing --zero_stage $STAGE --deepspeed \\
  --output_dir $1 &> $1/log
"""
NEMO = """
trainer: {devices: 8, num_nodes: 2, precision: bf16, gradient_clip_val: 1.0, max_steps: 10}
model:
  micro_batch_size: 1
  global_batch_size: 64
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  encoder_seq_length: 2048
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 24
  hidden_size: 2048
  num_attention_heads: 16
  hidden_dropout: 0.0
  activation: fast-swiglu
  ffn_hidden_size: 5632
  normalization: rmsnorm
  bias: false
  sequence_parallel: true
  activations_checkpoint_granularity: selective
  tokenizer: {type: GPT2BPETokenizer}
  optim: {name: distributed_fused_adam}
"""
#: Name of a file -> its text, what people add, and what the workload says.
SCRIPTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "megatron.sh": (
        MEGATRON,
        {},
        {
            "model.layers": 32, "model.kv_heads": 8, "model.vocab": 32000, "model.moe.experts": 8, "model.bias": False,
            "model.moe.ffn_hidden": 14336, "training.precision": "bf16", "training.grad_dtype": "bf16",
            "training.grad_clip": 1.0, "training.recompute": {"granularity": "full", "layers": 1},
            "training.global_batch": 256, "training.total_tokens": 1000 * 256 * 4096, "parallelism.tp": 2,
            "parallelism.pp": 4, "parallelism.vpp": 2, "parallelism.schedule": "interleaved", "parallelism.ep": 4,
            "parallelism.dp": 4, "parallelism.zero": 1, "parallelism.overlap.grad_reduce": True,
            "parallelism.overlap.param_gather": False,
        },
    ),
    "arguments.yaml": (
        "language_model: {num_layers: 4, hidden_size: 256, num_attention_heads: 4}\nseq_length: 128\nbf16: true\n"
        "vocab_size: 1000\nmicro_batch_size: 1\nmodel_parallel: {tensor_model_parallel_size: 2}\nhidden_dropout: 0.0\n",
        {"gpus": 4},
        {
            "model.layers": 4, "training.precision": "bf16", "training.global_batch": 2, "parallelism.tp": 2,
            "parallelism.dp": 2, "parallelism.sequence_parallel": False,
        },
    ),
    "nemo.yaml": (
        NEMO,
        {},
        {
            "model.layers": 24, "model.vocab": 50257, "model.activation": "swiglu", "model.norm": "rmsnorm",
            "model.bias": False, "training.seq": 2048, "training.global_batch": 64, "training.precision": "bf16",
            "training.recompute": "selective", "parallelism.tp": 4, "parallelism.pp": 2, "parallelism.dp": 2,
            "parallelism.zero": 1, "parallelism.sequence_parallel": True,
        },
    ),
    "titan.toml": (
        TORCHTITAN,
        {},
        {
            "model.preset": "llama3-70b", "framework.compile": True, "training.micro_batch": 2,
            "training.global_batch": 32, "training.precision": "bf16", "training.recompute": "ops",
            "training.grad_clip": 1.0, "parallelism.tp": 4, "parallelism.dp": 16, "parallelism.zero": 3,
        },
    ),
    "ds_config.json": (
        json.dumps(DEEPSPEED),
        {"model.preset": "llama2-7b", "training.seq": 1024, "gpus": 8},
        {
            "framework": "deepspeed", "training.micro_batch": 2, "training.global_batch": 2 * 4 * 8,
            "training.precision": "bf16", "parallelism.zero": 3, "parallelism.offload.optimizer": "cpu",
        },
    ),
    "accelerate.yaml": (
        ACCELERATE,
        {"model.preset": "qwen3-0.6b", "training.seq": 1024, "training.global_batch": 8},
        {
            "parallelism.dp": 4, "parallelism.zero": 3, "parallelism.reshard_after_forward": False,
            "training.precision": "bf16", "training.recompute": "full", "training.optimizer.master_weights": True,
        },
    ),
    "axolotl.yml": (
        AXOLOTL,
        {"gpus": 2},
        {
            "model.preset": "llama2-7b", "training.base": "nf4", "training.adapters.rank": 16,
            "training.adapters.targets": ["q", "v"], "training.adapters.dropout": 0.05, "training.micro_batch": 2,
            "training.global_batch": 2 * 4 * 2, "training.recompute": "full", "training.precision": "bf16",
            "training.optimizer.implementation": "fused", "parallelism.dp": 2,
        },
    ),
    "factory.yaml": (
        LLAMA_FACTORY,
        {"gpus": 8},
        {
            "model.preset": "qwen3-8b", "framework": "hugging_face_deepspeed", "training.seq": 4096,
            "training.global_batch": 64, "training.recompute": "full", "parallelism.zero": 3,
        },
    ),
    "trainer.sh": (
        TRAINER,
        {},
        {
            "model.preset": "llama2-13b", "framework": "deepspeed", "training.seq": 512, "training.global_batch": 64,
            "training.precision": "fp16", "parallelism.zero": 2, "parallelism.dp": 8, "training.recompute": "full",
        },
    ),
}  # fmt: skip


#: Name of a file -> a text of the same kind with values that are not simulated, switches that are off, and more names.
ODD = {
    "megatron.sh": MEGATRON.replace("--overlap-moe-magic", "--recompute-modules mlp --optimizer lamb --no-load-optim "
     "--attention-backend auto --fp8-recipe custom --fp8-format e4m3 --data-parallel-sharding-strategy optim "
     "--use-torch-fsdp2 --accumulate-allreduce-grads-in-bf16 --mtp-num-layers $2 --rotary-percent 0.5 --kv-channels 128 "
     "--moe-layer-freq [0,1] --moe-token-dispatcher-type allgather --train-samples 100 --q-lora-rank 8"),
    "arguments.yaml": SCRIPTS["arguments.yaml"][0] + "again: {seq_length: 128}\nnum_query_groups: 2\nswiglu: false\n"
     "recompute: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 3}\n",
    "nemo.yaml": NEMO + "  fp8: false\n  num_query_groups: ${.x}\n  data: {prefix: a}\n  new_key: 1\n  rampup: null\n"
     "exp_manager: {dir: a}\nother: {key: 1}\n",
    "titan.toml": TORCHTITAN.replace('"op"', '"3"').replace("[training]", "[training]\nglobal_batch_size = -1\n"
     "max_norm = 0.0\nmixed_precision_param = 'float8'\ndata_parallel_degree = 2") + "[optimizer]\nname = 'Muon'\n"
     "implementation = 'odd'\nfused = true\n[float8]\nrecipe_name = 'rowwise_with_gw_hp'\nenable_float8_linear = true\n"
     "filter_fqns = ['output']\n",
    "ds_config.json": json.dumps({**DEEPSPEED, "optimizer": {"type": "Lion", "params": {"lr": 1, "torch_adam": True}},
     "fp16": {"enabled": False, "loss_scale": 0}, "sequence_parallel_size": 1, "gradient_clipping": 0,
     "zero_optimization": {"offload_param": {"device": "none", "pin_memory": False}, "cpu_offload": True}}),
    "accelerate.yaml": "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config: {backend: TE}\nuse_cpu: true\n"
     "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, sharding_strategy: 9, offload_params: true, "
     "fsdp_backward_prefetch: NO_PREFETCH, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, odd: 1}\n",
    "axolotl.yml": AXOLOTL + "fsdp: [hybrid_shard, auto_wrap, offload]\nfsdp_config: {fsdp_state_dict_type: FULL}\n"
     "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true\ntensor_parallel_size: 1\nload_in_8bit: true\n"
     "lora_target_linear: false\nflash_attention: true\nfp16: true\n",
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


def script(tmp_path: Path, name: str, text: str | None = None) -> LaunchScript:
    path = tmp_path / name
    path.write_text(SCRIPTS[name][0] if text is None else text)
    return read_script(path)


def value_at(data: Any, key: str) -> Any:
    for name in key.split("."):
        data = data[name]
    return data


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_becomes_the_workload_that_it_runs(name: str, tmp_path: Path) -> None:
    """Replicas are GPUs over tp x pp x cp; the global batch is micro-batch x accumulation x replicas."""
    added = dict(SCRIPTS[name][1])
    gpus = added.pop("gpus", None)
    data = workload_data(script(tmp_path, name), "job", name, "dgx_h100", gpus, added)
    assert {key: value_at(data, key) for key in SCRIPTS[name][2]} == SCRIPTS[name][2]
    load_workload(data)


def test_what_is_not_simulated_is_named_and_what_changes_nothing_too(tmp_path: Path) -> None:
    megatron = script(tmp_path, "megatron.sh")
    assert megatron.gpus == 32
    assert megatron.ignored == ("overlap_moe_magic", "not followed: for NODE in a b")
    assert {"lr", "save", "moe_grouped_gemm"} <= set(megatron.neutral)
    assert "save" in megatron.neutral  # $1, which no one simulates anyway
    assert "parallelism.enable_async_tensor_parallel" in script(tmp_path, "titan.toml").ignored
    assert script(tmp_path, "ds_config.json").ignored == ("zero_optimization.reduce_bucket_size 500000000.0",)
    factory = script(tmp_path, "factory.yaml")
    assert [text for text in factory.assumed if "configs/ds_z3.json, which is not there" in text]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ds_z3.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert script(tmp_path, "factory.yaml").workload["parallelism"] == {"zero": 2}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_option_is_in_exactly_one_list(name: str, tmp_path: Path) -> None:
    """Of every kind of script: as it is, with values that are not simulated, with bad names, and with no values."""
    for text in (SCRIPTS[name][0], ODD[name]):
        read = script(tmp_path, name, text)
        understood = {entry.option for entry in read.understood}
        ignored = {re.split(r"[ :]", line)[0] for line in read.ignored if not line.startswith(("not followed", "adap"))}
        assert understood | set(read.neutral) | ignored == names_in(name, text)
        assert not (understood & set(read.neutral) or understood & ignored or ignored & set(read.neutral))
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
        ("trainer.sh", ("--gradient_checkpointing", "--optim adamw_bnb_8bit --label_smoothing_factor 0.1"),
         ("optim adamw_bnb_8bit", "label_smoothing_factor 0.1")),
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
    ("name", "options", "expected"),
    [
        ("megatron.sh", "--transformer-impl local --moe-router-topk 2", {
            "framework": "megatron_core_local", "model.attention": "unfused"}),
        ("megatron.sh", "--optimizer sgd", {"training.optimizer.name": "sgd_momentum", "framework": "megatron_core"}),
        ("megatron.sh", "--use-flash-attn --clip-grad 0", {"model.attention": "flash", "training.grad_clip": None}),
        ("megatron.sh", "--attention-backend unfused", {"model.attention": "unfused"}),
    ],
)  # fmt: skip
def test_options_that_decide_time_reach_the_workload(
    name: str, options: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    read = script(tmp_path, name, MEGATRON.replace("--overlap-moe-magic", options))
    assert {key: value_at(read.workload, key) for key in expected} == expected
    assert not {"transformer_impl", "optimizer", "use_flash_attn", "attention_backend"} & set(read.neutral)


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
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "expected"), EIGHT_BITS)
def test_training_in_8_bits_is_a_recipe_beside_bf16(
    name: str, change: tuple[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    """The workload loads: precision fp8 says nothing of casts and is refused."""
    text = SCRIPTS[name][0]
    assert change[0] in text
    added = {key: value for key, value in SCRIPTS[name][1].items() if key != "gpus"}
    data = workload_data(
        script(tmp_path, name, text.replace(*change)), "job", name, "dgx_h100", SCRIPTS[name][1].get("gpus"), added
    )
    training = {key: data["training"].get(key) for key in ("precision", "fp8")}
    assert training == {"precision": "bf16", "fp8": None, **expected}
    load_workload(data)


@pytest.mark.parametrize(
    ("words", "zero", "reshard"),
    [
        ("full_shard auto_wrap", 3, None),
        ("shard_grad_op auto_wrap", 3, False),
        ("hybrid_shard auto_wrap", 3, None),
        ("hybrid_shard_zero2 offload", 3, False),
        ("no_shard", 0, None),
    ],
)
def test_strategies_of_fsdp_are_one_in_all_kinds(words: str, zero: int, reshard: bool | None, tmp_path: Path) -> None:
    """The words of transformers' Trainer and the keys of accelerate come to the same; hybrid ones are told."""
    strategy = words.split()[0]
    offload = str("offload" in words).lower()
    trainer = f"torchrun --nproc_per_node 8 a.py --model_name_or_path m --bf16 --fsdp '{words}' --optim adamw_torch\n"
    section = f"{{fsdp_sharding_strategy: {strategy.upper()}, fsdp_offload_params: {offload}}}"
    accelerate = f"distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {section}\n"
    axolotl = AXOLOTL + f"fsdp: [{', '.join(words.split())}]\n"
    for name, text in (("a.sh", trainer), ("a.yaml", accelerate), ("a.yml", axolotl)):
        read = script(tmp_path, name, text)
        parallelism = read.workload["parallelism"]
        assert (parallelism["zero"], parallelism.get("reshard_after_forward")) == (zero, reshard)
        assert ("offload" in parallelism) is ("offload" in words)
        assert any("parallelism.hsdp" in line for line in read.ignored) is strategy.startswith("hybrid")


def test_a_false_value_is_a_value(tmp_path: Path) -> None:
    """With FSDP 2, ``fsdp_reshard_after_forward: false`` is SHARD_GRAD_OP, and that option alone is named."""
    text = ACCELERATE.replace("fsdp_sharding_strategy: SHARD_GRAD_OP", "fsdp_reshard_after_forward: false")
    read = script(tmp_path, "accelerate.yaml", text)
    assert read.workload["parallelism"]["reshard_after_forward"] is False
    named = {entry.option for entry in read.understood if entry.key.startswith("parallelism")}
    assert named == {"fsdp_config.fsdp_reshard_after_forward"}


def test_accelerate_reads_deepspeed_as_deepspeed_does(tmp_path: Path) -> None:
    text = """
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: none, gradient_clipping: 1.0,
  gradient_accumulation_steps: 4, zero3_init_flag: true}
"""
    read = script(tmp_path, "a.yaml", text)
    alone = script(tmp_path, "ds_config.json")
    assert read.workload["parallelism"] == alone.workload["parallelism"]
    assert (read.accumulation, read.workload["training"]["grad_clip"]) == (4, 1.0)
    assert "deepspeed_config.zero_stage" in {entry.option for entry in read.understood}
    with pytest.raises(InputError, match="is no stage of ZeRO"):
        script(tmp_path, "a.yaml", text.replace("zero_stage: 3", "zero_stage: 7"))


def test_a_path_of_deepspeed_is_told_from_a_switch(tmp_path: Path) -> None:
    """``--deepspeed`` is a switch of DeepSpeedExamples and a path of transformers' Trainer."""
    (tmp_path / "z.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "odd_key": 1}))
    command = "torchrun --nproc_per_node 8 a.py --model_name_or_path m --bf16 --deepspeed"
    assert "deepspeed" in script(tmp_path, "a.sh", f"{command}\n").ignored
    assert script(tmp_path, "a.sh", f"{command} True\n").workload["framework"] == "hugging_face"
    read = script(tmp_path, "a.sh", f"{command} z.json\n")
    assert (read.workload["framework"], read.workload["parallelism"]["zero"]) == ("hugging_face_deepspeed", 2)
    assert read.ignored == ("model_name_or_path m: m is no shipped model", "deepspeed.odd_key 1")


def test_gpus_are_read_from_comments_alone(tmp_path: Path) -> None:
    text = TORCHTITAN.replace("# a preset for 64 H100 GPUs", '[job]\ndescription = "for 32 GPUs"')
    assert script(tmp_path, "titan.toml", text).gpus is None
    assert script(tmp_path, "titan.toml").gpus == 64


@pytest.mark.parametrize(("kind", "recompute"), [("1", "full"), ("2", "ops"), ("3", "ops"), ("op", "ops")])
def test_whole_layers_that_are_recomputed(kind: str, recompute: str, tmp_path: Path) -> None:
    """Every layer whole is full recomputation; one of every three has nothing that is like it, and is told so."""
    read = script(tmp_path, "titan.toml", TORCHTITAN.replace('"op"', f'"{kind}"'))
    assert read.workload["training"]["recompute"] == recompute
    nearest = [line for line in read.assumed if "nearest" in line]
    told = [f"training.recompute: ops, the nearest to one whole layer of every {kind}"]
    assert nearest == (told if kind in "23" else [])


@pytest.mark.parametrize(
    ("name", "added", "told"),
    [
        ("megatron.sh", [], "the machines: the script does not say it"),
        ("ds_config.json", ["--cluster", "dgx_h100"], "the model: the script does not say it"),
        ("axolotl.yml", ["--cluster", "dgx_h100"], "does not say how many GPUs it runs on"),
        ("megatron.sh", ["--cluster", "dgx_h100", "--gpus", "12"], "12 GPUs are no multiple of tp 2 x pp 4 x cp 1"),
        ("megatron.sh", ["--cluster", "dgx_h100", "--gpus", "0"], "out of range"),
        ("megatron.sh", ["--node", "dgx_h100"], "--cluster dgx_h100"),
        ("megatron.sh", ["--cluster", "dgx_h10"], "no cluster file of this name"),
    ],
)
def test_what_a_script_does_not_say_is_asked_for(
    name: str, added: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path, name)
    with pytest.raises(SystemExit) as caught:
        main(["import", str(tmp_path / name), *added])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("none.sh", "echo hello\nA=1\n", "starts no training"),
        ("other.sh", "python train.py --alpha 1 --beta 2\n", "a training that is not known here"),
        ("bad.toml", "[model\n", "is not TOML"),
        ("list.json", "[1, 2]", "must hold"),
        ("empty.sh", "", "is empty"),
        ("long.sh", 'A="' + "x\n" * 100_001, "is too long for a launch script"),
        ("open.sh", 'A="' + "x\n" * 1000, "starts no training"),
        ("model.json", '{"architectures": ["LlamaForCausalLM"]}', "hf_config"),
        ("other.yaml", "a: 1\n", "is no launch script that is known here"),
        ("clip.sh", MEGATRON.replace("--overlap-moe-magic", "--clip-grad abc"), "clip_grad: is no number"),
        ("drop.sh", MEGATRON.replace("--hidden-dropout 0.0", "--hidden-dropout much"), "is no number"),
        ("experts.sh", MEGATRON.replace("--overlap-moe-magic", "--moe-expert-capacity-factor x"), "is no number"),
        ("norm.toml", TORCHTITAN.replace("seq_len", "max_norm = 'x'\nseq_len"), "training.max_norm: is no number"),
        ("norm.yml", AXOLOTL + "max_grad_norm: x\n", "max_grad_norm: is no number"),
        ("rate.yml", AXOLOTL.replace("0.05", "x"), "lora_dropout: is no number"),
        ("clip.json", json.dumps({**DEEPSPEED, "gradient_clipping": "x"}), "gradient_clipping: is no number"),
        ("clip.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: x}\n", "is no number"),
        ("endless.sh", MEGATRON.replace("--num-layers 32", "--num-layers inf"), "is no whole number"),
        ("nemo.yaml", NEMO.replace("gradient_clip_val: 1.0", "gradient_clip_val: x"), "trainer.gradient_clip_val"),
        ("word.sh", MEGATRON.replace("--num-layers 32", "--num-layers many"), "is no whole number"),
        ("rl.yaml", AXOLOTL + "rl: dpo\n", "one loss per token"),
        ("stage.json", '{"zero_optimization": {"stage": 7}}', "is no stage of ZeRO"),
        ("frozen.yaml", LLAMA_FACTORY.replace(": full", ": freeze"), "is no way of finetuning"),
    ],
)
def test_a_bad_file_gets_one_sentence(name: str, text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        script(tmp_path, name, text)
    assert told in str(caught.value)


def test_the_written_file_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A workload file with what is assumed above it, the same workload in the JSON, and a run of it."""
    script(tmp_path, "trainer.sh")
    out, result = tmp_path / "job.yaml", tmp_path / "job.json"
    options = ["--cluster", "dgx_h100", "--out", str(out), "--json", str(result)]
    with pytest.raises(SystemExit) as caught:
        main(["import", str(tmp_path / "trainer.sh"), *options])
    assert caught.value.code == 0
    assert "8 GPUs" in capsys.readouterr().out
    assert out.read_text().startswith("# Read by llmsim import from trainer.sh (Hugging Face Trainer arguments).")
    told = json.loads(result.read_text())
    assert load_workload(out) == load_workload({**told["workload"], "name": load_workload(out).name})
    assert {"option": "zero_stage", "key": "parallelism.zero", "value": 2} in told["understood"]


def test_a_job_of_slurm_whose_command_is_in_a_variable(tmp_path: Path) -> None:
    """Nodes and tasks are Slurm's; options are one quoted text, as in scripts of Megatron-LM's first versions."""
    text = """
#SBATCH -p big --nodes=16 --exclusive --ntasks-per-node=8
opts=" \\
  --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 \\
  --tensor-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 64 --vocab-file <a file> \\
  --fp16 --checkpoint-activations "
cmd="python -u ${DIR}/pretrain.py $@ ${opts}"
srun -l --output=$DIR/%x.log sh -c "${cmd}"
"""
    data = workload_data(
        script(tmp_path, "slurm.sh", text), "job", "slurm.sh", "dgx_a100", None, {"model.vocab": 51200}
    )
    assert data["parallelism"]["dp"] == 16
    assert data["training"]["recompute"] == "full"
    assert data["training"]["precision"] == "fp16"
    assert script(tmp_path, "slurm.sh", text).ignored == ()


def test_variables_of_a_shell() -> None:
    text = 'A=2\nB=$((A * 3 + 1))\nC="x ${B}"\npython t.py --a $A --b ${B:-9} --c $C --d $D --e ${E:-"5"} --f $(date)'
    text += ' --g "a>$D/b" --h $((D + 1))\n'
    options = options_of(launch_command(text, Path("s.sh")).words)
    assert options == {
        "a": "2", "b": "7", "c": "x 7", "d": Unsaid("$D"), "e": "5", "f": Unsaid("$(date)"), "g": Unsaid("a>$D/b"),
        "h": Unsaid("$((D + 1))"),
    }  # fmt: skip
