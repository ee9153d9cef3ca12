"""Megatron-Core's own model, DDP, optimizer and schedules, with its local modules: no Transformer Engine, no Apex.

The loop is that of ``pretrain_gpt.py``: ``get_forward_backward_func``, gradients finished behind the last micro-batch,
the optimizer's step. Flags that need Apex or Transformer Engine are off, others as Megatron-LM's arguments have them.
`calibration.train.frameworks.transformer_engine` has the same with Transformer Engine's modules.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from calibration.train.frameworks.tokens import LEARNING_RATE, replica_tokens
from calibration.train.process_groups import ProcessGroups
from simulator.config.workload import Workload


def settings_of(workload: Workload) -> dict[str, object]:
    """Return the fields of ``TransformerConfig`` for a workload, with local modules."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    gated = model.activation == "swiglu"
    chunks = layout.n_stages // layout.pp
    beside = bool(layout.overlap.p2p) and chunks > 1
    recompute: Mapping[str, object] = {}
    if training.recompute.granularity == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif training.recompute.granularity == "selective":
        recompute = {"recompute_granularity": "selective"}
    return {
        **_experts(workload),
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_hidden,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "gated_linear_unit": gated,
        "activation_func": F.silu if gated else F.gelu,
        "add_bias_linear": bool(model.bias),
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
        "bias_activation_fusion": bool(model.bias) or gated,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "overlap_p2p_comm": beside,
        "batch_p2p_comm": not beside,
        "sequence_parallel": bool(layout.sequence_parallel) and layout.tp > 1,
        "deallocate_pipeline_outputs": True,
        **recompute,
    }


def _experts(workload: Workload) -> Mapping[str, object]:
    """Return the settings of a mixture of experts: dropless, permuted by PyTorch's kernels.

    Tokens choose experts at random, as in published benchmarks of Megatron-Core. Without that a job that sees one batch
    again and again sends most tokens to few experts.
    """
    moe, layout = workload.model.moe, workload.parallelism
    if moe is None:
        return {}
    shared: Mapping[str, object] = {}
    if moe.shared_experts:
        shared = {"moe_shared_expert_intermediate_size": moe.shared_ffn_hidden}
    return {
        "num_moe_experts": moe.experts,
        "moe_ffn_hidden_size": moe.ffn_hidden,
        "moe_router_topk": moe.top_k,
        "moe_router_dtype": "fp32" if moe.router_dtype == "fp32" else None,
        "moe_router_load_balancing_type": "none",
        "moe_router_force_load_balancing": True,
        "moe_token_dispatcher_type": "allgather" if layout.dispatcher == "all_gather" else "alltoall",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        **shared,
    }


class MegatronTrainer:
    """Trains a GPT of Megatron-Core on this rank."""

    settings = staticmethod(settings_of)

    def __init__(self, workload: Workload, groups: ProcessGroups, device: torch.device) -> None:
        training, layout = workload.training, workload.parallelism
        config = TransformerConfig(**self.settings(workload))
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            config.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(workload.seed + 1)
        chunks = [self._chunk(workload, config, number, device) for number in range(layout.n_stages // layout.pp)]
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=bool(layout.overlap.grad_reduce),
            overlap_param_gather=bool(layout.overlap.param_gather) and layout.zero == 1,
            use_distributed_optimizer=layout.zero == 1,
        )
        self._chunks = [
            DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=0.01,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=layout.zero == 1,
            clip_grad=training.grad_clip or 0.0,
            overlap_param_gather=settings.overlap_param_gather,
        )
        self._optimizer = get_megatron_optimizer(optimizer, self._chunks, use_gloo_process_groups=False)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        if settings.overlap_grad_reduce and layout.dp > 1:
            waits = [chunk.no_sync for chunk in self._chunks]
            config.no_sync_func = waits if len(waits) > 1 else waits[0]
        self._run = get_forward_backward_func()
        self._workload, self._device = workload, device
        tokens = replica_tokens(workload, groups.place["dp"]).to(device)
        self._batches = tokens.split(training.micro_batch)
        self._positions = torch.arange(training.seq, device=device).expand(training.micro_batch, -1)
        self._mask = self.mask(training.seq, device)

    @staticmethod
    def mask(seq: int, device: torch.device) -> Tensor | None:
        """Return what pretrain_gpt.py makes in its loader; True where a key may not be seen."""
        square = torch.ones((1, 1, seq, seq), dtype=torch.bool, device=device)
        return torch.triu(square, diagonal=1)

    @staticmethod
    def spec(config: TransformerConfig) -> Any:
        """Return the modules that a layer is made of."""
        return get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)

    def _chunk(self, workload: Workload, config: Any, number: int, device: torch.device) -> Any:
        model, layout = workload.model, workload.parallelism
        stage = None if layout.n_stages == layout.pp else number
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=self.spec(config),
            vocab_size=model.padded_vocab(layout.tp),
            max_sequence_length=workload.training.seq,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type="rope" if model.position == "rope" else "learned_absolute",
            vp_stage=stage,
        )
        return Float16Module(config, chunk.to(device))

    def _forward(self, batches: Iterator[Tensor], chunk: Any) -> tuple[Tensor, Any]:
        tokens = next(batches)
        output = chunk(tokens[:, :-1].contiguous(), self._positions, self._mask, labels=tokens[:, 1:].contiguous())
        return output, partial(_mean)

    def step(self) -> Tensor:
        """Make one optimizer step; return the last micro-batch's loss."""
        workload = self._workload
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        several = len(self._chunks) > 1
        losses = self._run(
            forward_step_func=self._forward,
            data_iterator=[iter(self._batches) for _ in self._chunks] if several else iter(self._batches),
            model=self._chunks if several else self._chunks[0],
            num_microbatches=workload.microbatches,
            seq_length=workload.training.seq,
            micro_batch_size=workload.training.micro_batch,
            forward_only=False,
        )
        self._optimizer.step()
        return losses[-1]["loss"] if losses else torch.zeros((), device=self._device)

    def close(self) -> None:
        """Free what the run has left behind."""
        del self._chunks, self._optimizer, self._run, self._batches
        parallel_state.destroy_model_parallel()
        gc.collect()


def _mean(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


TRAINER = MegatronTrainer
