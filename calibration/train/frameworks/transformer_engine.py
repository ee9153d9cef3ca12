"""Megatron-Core with Transformer Engine's modules, attention, rotation, permutation, grouped products and optimizer.

The loop is that of local modules. Products add gradients of weights to the buffers (``gradient_accumulation_fusion``),
but for the projection to the vocabulary, whose module is Megatron-Core's own and needs Apex for that.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from calibration.train.frameworks.limits import ENGINE_RECIPES
from calibration.train.frameworks.megatron_core import MegatronTrainer, settings_of
from simulator.config.workload import Workload


def settings_with_engine(workload: Workload) -> dict[str, object]:
    """Return the fields of ``TransformerConfig`` for a workload, with Transformer Engine's modules."""
    model, training = workload.model, workload.training
    settings = settings_of(workload) | {
        "qk_layernorm": bool(model.qk_norm),
        "apply_rope_fusion": model.position == "rope" and "rotation" not in training.unfused,
    }
    if model.moe is not None:
        settings |= {
            "moe_grouped_gemm": True,
            "moe_permute_fusion": training.fused_permutation,
            "moe_router_fusion": "router" not in training.unfused,
        }
    if training.fp8:
        settings |= {"fp8": "hybrid", "fp8_recipe": ENGINE_RECIPES[training.fp8.recipe]}
    return settings


class EngineTrainer(MegatronTrainer):
    """Trains a GPT of Megatron-Core with Transformer Engine on this rank."""

    settings = staticmethod(settings_with_engine)

    @staticmethod
    def mask(seq: int, device: torch.device) -> Tensor | None:
        """Return nothing: fused attention masks by itself."""
        return None

    @staticmethod
    def spec(config: TransformerConfig) -> Any:
        """Return the modules that a layer is made of."""
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )

    def _chunk(self, workload: Workload, config: Any, number: int, device: torch.device) -> Any:
        chunk = super()._chunk(workload, config, number, device)
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = bool(workload.training.gradient_accumulation_fusion)
        return chunk


TRAINER = EngineTrainer
