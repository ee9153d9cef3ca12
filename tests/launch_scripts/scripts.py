"""Made-up launch scripts of every kind; their constructs are those that people use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simulator.launch_scripts import LaunchScript, read_script

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
#: Of Megatron-LM with what no job can do without; options stand behind it.
COMMAND = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --vocab-size 50257 --bf16 "
)
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
  --max_steps 300 --output_dir $1 &> $1/log
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
            "training.total_tokens": 300 * 64 * 512,
        },
    ),
}  # fmt: skip


def script(tmp_path: Path, name: str, text: str | None = None) -> LaunchScript:
    path = tmp_path / name
    path.write_text(SCRIPTS[name][0] if text is None else text)
    return read_script(path)


def value_at(data: Any, key: str) -> Any:
    for name in key.split("."):
        data = data[name]
    return data
