"""A transformer as kernels of its parts, with parameters, activation bytes and FLOPs.

Sizes of products are m, n and k, as in BLAS; formulas of papers have their letters.
"""

from simulator.models.flops import (
    active_parameters,
    hardware_flops_per_step,
    model_flops,
    model_flops_per_step,
    model_flops_per_step_causal,
    model_weights,
    parameters,
    trained_parameters,
)
from simulator.models.layer import layer
from simulator.models.model_warnings import warnings
from simulator.models.multi_token_prediction import predictor
from simulator.models.optimizer import (
    StateBytes,
    checks_every_pass,
    first_update_tensors,
    host_state_bytes,
    host_update_bytes,
    optimized_elements,
    optimizer_ops,
    optimizer_workspace_bytes,
    paged_state_bytes,
    rank_parts,
    replicated_gradient_ops,
    server_update_bytes,
    state_bytes,
    state_bytes_of,
)
from simulator.models.parts import Part, PassBytes, by_part, pass_bytes, swapped_bytes, weights_of
from simulator.models.routing import routing
from simulator.models.shapes import activation_bytes, passed_bytes, representative_seat
from simulator.models.stage import PartPool, StageKey, made_gradient_bytes, stage_keys, stage_parts
from simulator.models.vocabulary import embedding, head
from simulator.operations.nodes import Op, Tensor, unique
from simulator.operations.shapes import Seat, Turn

__all__ = [
    "Op",
    "Part",
    "PartPool",
    "PassBytes",
    "Seat",
    "StageKey",
    "StateBytes",
    "Tensor",
    "Turn",
    "activation_bytes",
    "active_parameters",
    "by_part",
    "checks_every_pass",
    "embedding",
    "first_update_tensors",
    "hardware_flops_per_step",
    "head",
    "host_state_bytes",
    "host_update_bytes",
    "layer",
    "made_gradient_bytes",
    "model_flops",
    "model_flops_per_step",
    "model_flops_per_step_causal",
    "model_weights",
    "optimized_elements",
    "optimizer_ops",
    "optimizer_workspace_bytes",
    "paged_state_bytes",
    "parameters",
    "pass_bytes",
    "passed_bytes",
    "predictor",
    "rank_parts",
    "replicated_gradient_ops",
    "representative_seat",
    "routing",
    "server_update_bytes",
    "stage_keys",
    "stage_parts",
    "state_bytes",
    "state_bytes_of",
    "swapped_bytes",
    "trained_parameters",
    "unique",
    "warnings",
    "weights_of",
]
