"""A transformer as kernels of its parts, with parameters, activation bytes and FLOPs."""

from simulator.model.flops import (
    hardware_flops_per_step,
    model_flops_per_step,
    model_flops_per_step_causal,
    parameters,
)
from simulator.model.nodes import Tensor
from simulator.model.optimizer import StateBytes, optimizer_ops, rank_parts, replicated_gradient_ops, state_bytes
from simulator.model.parts import Part, PassBytes, embedding, head, layer, pass_bytes, stage_parts

__all__ = [
    "Part",
    "PassBytes",
    "StateBytes",
    "Tensor",
    "embedding",
    "hardware_flops_per_step",
    "head",
    "layer",
    "model_flops_per_step",
    "model_flops_per_step_causal",
    "optimizer_ops",
    "parameters",
    "pass_bytes",
    "rank_parts",
    "replicated_gradient_ops",
    "stage_parts",
    "state_bytes",
]
