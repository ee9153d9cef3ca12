"""Parameters and floating-point operations of the whole model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from simulator.model.parts import stage_parts
from simulator.model.shapes import GATED, Seat, telling_seat
from simulator.program.kernels import causal_pairs
from simulator.program.ops import kernels_of

if TYPE_CHECKING:
    from simulator.config import Workload


def _layer_weights(workload: Workload) -> int:
    """Elements of the linear layers' weights of one transformer layer."""
    model = workload.model
    qkv = model.hidden * model.head_dim * (model.heads + 2 * model.kv_heads)
    proj = model.hidden * model.head_dim * model.heads
    mlp = model.hidden * model.ffn_hidden * (3 if model.activation in GATED else 2)
    return int(qkv + proj + mlp)


def parameters(workload: Workload) -> int:
    """Parameters of the model itself, each once, however it is laid out: vocabulary as the model has it, not padded."""
    model = workload.model
    norm = model.hidden * (2 if model.norm == "layernorm" else 1)
    biases = 0
    if model.bias:
        qkv = model.head_dim * (model.heads + 2 * model.kv_heads)
        fc1 = model.ffn_hidden * (2 if model.activation in GATED else 1)
        biases = qkv + fc1 + 2 * model.hidden
    tables = model.vocab * model.hidden * (1 if model.tied_embeddings else 2)
    positions = workload.training.seq * model.hidden if model.position == "learned" else 0
    return int(model.layers * (_layer_weights(workload) + 2 * norm + biases) + norm + tables + positions)


def _forward_flops_per_step(workload: Workload, pairs: float) -> float:
    """Forward FLOPs of a global batch: two per weight and token, and two products of heads * head_dim for each of the
    query-key ``pairs`` of a sequence and layer."""
    model, seq = workload.model, workload.training.seq
    weights = model.layers * _layer_weights(workload) + model.hidden * model.padded_vocab(workload.parallelism.tp)
    attention = model.layers * 4.0 * pairs * model.heads * model.head_dim
    return float(workload.training.global_batch * (2.0 * seq * weights + attention))


def model_flops_per_step(workload: Workload) -> float:
    """Forward and backward of the model, three times the forward: matrix products with the (padded) vocabulary's, full
    attention (of its window where it has one), no recomputation."""
    seq = workload.training.seq
    return 3 * _forward_flops_per_step(workload, float(seq * (workload.model.window(seq) or seq)))


def model_flops_per_step_causal(workload: Workload) -> float:
    """`model_flops_per_step` with the part of attention that a causal mask leaves: half of it without a window."""
    seq = workload.training.seq
    return 3 * _forward_flops_per_step(workload, causal_pairs(seq, seq, window=workload.model.window(seq)))


def hardware_flops_per_step(workload: Workload) -> float:
    """What the kernels of all GPUs compute in a step, recomputation and replicated work included.

    For GELU, ffn 4h, unfused attention and full recomputation this is 96 B s l h^2 (1 + s / 6h + V / 16 l h)
    (arXiv 2104.04473, equation 3).
    """
    layout = workload.parallelism
    seats = Counter(telling_seat(workload, Seat(cp=cp)) for cp in range(layout.cp))
    per_replica = sum(count * _flops_of_seat(workload, seat) for seat, count in seats.items())
    return per_replica * layout.tp * layout.dp * workload.microbatches


def _flops_of_seat(workload: Workload, seat: Seat) -> float:
    """What a micro-batch costs the ranks at one seat of all stages."""
    flops = 0.0
    for stage in range(len(workload.parallelism.layers_per_stage)):
        for part in stage_parts(workload, stage, seat):
            ops = (*part.forward, *part.recompute, *part.backward)
            flops += sum(one.kernel.flops for op in ops for one in kernels_of(op))
    return flops
