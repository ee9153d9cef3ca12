"""Settings of the software of published steps, which their tables do not say: dotted keys of workload files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Megatron-LM of 2021 and 2022: fused softmax, bias-GELU and bias-dropout-add kernels, dropout as in GPT-3's training,
#: sends and receives that block, gradients reduced after the last backward pass.
MEGATRON: dict[str, Any] = {
    "model.dropout": 0.1,
    "framework.name": "megatron_core",
    "training.grad_clip": 1.0,
    "parallelism.overlap": {"grad_reduce": False, "p2p": False},
}

#: Since sequence parallelism (Korthikanti et al.) Megatron-LM's own linear layers add the bias of queries, keys and
#: values by a kernel (``LinearWithGradAccumulationAndAsyncCommunication``). The zero-bubble authors had these layers,
#: whose repository is a fork of 2023. In 2021 the product added it (``F.linear`` of megatron/mpu/layers.py). The same
#: is assumed of vTrain's Megatron-DeepSpeed, whose version is not known. Later suites have Transformer Engine's layers.
ADDED_BIAS: dict[str, Any] = {"training.unfused": ["qkv_bias"]}

#: The zero-bubble authors' own runtime: sends and receives go on beside the passes.
BESIDE = {"grad_reduce": False, "p2p": True}

NORM_BY_OPS: dict[str, Any] = {"training.fused_rms_norm": False}
#: What Llamas of 7B and more are beside their sizes.
LLAMA: dict[str, Any] = {
    "model.activation": "swiglu",
    "model.norm": "rmsnorm",
    "model.position": "rope",
    "model.bias": False,
    "model.tied_embeddings": False,
}

#: Nemotron's squared ReLU, as a ReLU, and LayerNorm with rope (arXiv 2406.11704, table 1).
NEMOTRON: dict[str, Any] = LLAMA | {"model.activation": "relu", "model.norm": "layernorm"}

TIED_LLAMA = LLAMA | {"model.tied_embeddings": True}

#: PyTorch 1.13 to 2.1 without torch.compile; Composer clips gradients, and its AdamW has a kernel for each operation on
#: each tensor (composer/optim/decoupled_weight_decay.py). MPT's vocabulary is padded already.
LLM_FOUNDRY: dict[str, Any] = {
    "framework.name": "pytorch",
    "training.grad_clip": 1.0,
    "training.grad_dtype": "fp32",
    "training.optimizer": {"implementation": "for_loop"},
    "model.vocab_multiple": 1,
    # ``attn_impl: triton``, until 2024 the default of scripts/train/benchmarking/submit_benchmarks.py.
    "training.attention_kernel": "triton",
    # ``loss_fn: fused_crossentropy``, and two train metrics (llmfoundry/models/mpt/modeling_mpt.py).
    "training.loss": {"name": "fused", "metrics": 2},
}
#: Composer's mixed precision: PURE reduces gradients in bf16, DEFAULT (from 0.16 on) in fp32. Tables of 128 H100s and
#: more came with a default of ``attn_impl: flash``, in a package with FlashAttention 2.
COMPOSER: tuple[tuple[Mapping[str, str], Mapping[str, Any]], ...] = (
    *(({"gpu": "H100-80G", "n_gpus": n}, {"training.attention_kernel": "flash2"}) for n in ("128", "256", "512")),
    ({"mp_mode": "PURE"}, {"training.grad_dtype": "bf16"}),
    ({"sharding": "SHARD_GRAD_OP"}, {"parallelism.reshard_after_forward": False}),
)

#: KempnerForge (Kempner Institute), of April to July 2026: torch's fully_shard and DTensor around layers like
#: torchtitan's. Weights and AdamW's states are in bf16, and gradients are reduced in fp32 (distributed/parallel.py).
#: The loss is of bf16 logits, and not compiled (training/loss.py).
KEMPNER_FORGE: dict[str, Any] = LLAMA | {
    "framework.name": "torchtitan",
    "training.loss": "eager_narrow",
    "training.grad_dtype": "fp32",
    "training.grad_clip": 1.0,
    "training.optimizer": {"implementation": "fused", "master_weights": False, "state_dtype": "bf16"},
}

#: Sizes are those of huggingface.co/moonshotai/Moonlight-16B-A3B, config.json. The rest is Megatron-Bridge's, of
#: recipes/moonlight/moonlight_16b.py: exp_avg_dtype and exp_avg_sq_dtype bfloat16, moe_router_fusion False (router),
#: moe_shared_expert_overlap True. Of models/deepseek/deepseek_v3_bridge.py: apply_rope_fusion False (rotation),
#: moe_router_load_balancing_type seq_aux_loss with the coefficient of config.json, 0.001 (balancing_loss).
MOONLIGHT: dict[str, Any] = {
    "training.optimizer": {"state_dtype": "bf16"},
    "training.unfused": ["rotation", "router"],
    "parallelism.overlap": {"ep": True},
    "model.hidden": 2048,
    "model.heads": 16,
    "model.vocab": 163840,
    "model.ffn_hidden": 11264,
    "model.activation": "swiglu",
    "model.norm": "rmsnorm",
    "model.position": "rope",
    "model.bias": False,
    "model.tied_embeddings": False,
    "model.moe": {
        **{"experts": 64, "top_k": 6, "ffn_hidden": 1408, "shared_experts": 2, "first_dense_layers": 1},
        "balancing_loss": True,
    },
    "model.mla": {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}

#: Megatron-DeepSpeed of vTrain's runs, whose files state neither vocabulary nor precision: GPT-2's, padded, and fp16.
VTRAIN: dict[str, Any] = MEGATRON | {
    "framework.name": "deepspeed",
    "model.vocab": 51200,
    "model.attention": "unfused",
    "training.precision": "fp16",
    "training.grad_dtype": "fp16",
    "training.gradient_accumulation_fusion": False,
    "parallelism.sequence_parallel": False,
}


#: NeMo and Megatron-Bridge: Llamas, and models of other families.
NEMO: dict[str, Any] = LLAMA | {
    "framework.name": "megatron_core",
    "parallelism.zero": 1,
    "training.grad_dtype": "bf16",
    "training.grad_clip": 1.0,
}
NEMO_FAMILIES = (({"family": "gpt"}, dict.fromkeys(LLAMA)), ({"family": "nemotron"}, NEMOTRON))


def deepseek_experts(experts: int, top_k: int, ffn_hidden: int, shared: int) -> dict[str, Any]:
    """Return the experts of a truncated DeepSeek whose first layer is dense, in section ``model.moe``."""
    return {
        "experts": experts,
        "top_k": top_k,
        "ffn_hidden": ffn_hidden,
        "shared_experts": shared,
        "first_dense_layers": 1,
        "capacity_factor": 1.0,
        "balancing_loss": True,
    }
