"""Parameters and floating-point operations of the whole model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from simulator.models.shapes import telling_seat
from simulator.models.stage import stage_parts
from simulator.operations.shapes import GATED, Seat
from simulator.program.kernels import causal_pairs
from simulator.program.ops import kernels_of

if TYPE_CHECKING:
    from simulator.config import Workload
    from simulator.config.model import Model, Moe


def _attention_weights(model: Model) -> int:
    """Elements of the weights of one layer's attention."""
    queries, context = model.heads * model.qk_head_dim, model.heads * model.v_head_dim
    if model.mla is None:
        keys = model.kv_heads * model.head_dim
        return model.hidden * (queries + 2 * keys + context)
    rank, kv = model.mla.q_lora_rank, model.mla.kv_lora_rank
    q = (model.hidden + queries) * rank if rank else model.hidden * queries
    down = model.hidden * (kv + model.mla.qk_rope_head_dim)
    up = kv * model.heads * (model.mla.qk_nope_head_dim + model.v_head_dim)
    return q + down + up + context * model.hidden


def _mlp_weights(model: Model, width: int) -> int:
    return model.hidden * width * (3 if model.activation in GATED else 2)


def _mixture_weights(model: Model, moe: Moe, routed: int) -> int:
    """Elements of the weights of one layer's router, shared experts and ``routed`` of its other experts."""
    expert, shared = _mlp_weights(model, moe.ffn_hidden), _mlp_weights(model, moe.shared_ffn_hidden)
    return moe.experts * model.hidden + shared + routed * expert


def _layers(model: Model) -> tuple[int, int]:
    """How many layers have a dense MLP and how many experts, without those of multi-token prediction."""
    mixed = sum(model.moe.here(layer) for layer in range(model.layers)) if model.moe else 0
    return model.layers - mixed, mixed


def _weights(model: Model, routed: int) -> int:
    """Elements of the linear layers' weights of all layers, with ``routed`` experts each where they have some."""
    dense, mixed = _layers(model)
    of_mixed = mixed * _mixture_weights(model, model.moe, routed) if model.moe else 0
    return model.layers * _attention_weights(model) + dense * _mlp_weights(model, model.ffn_hidden) + of_mixed


def parameters(workload: Workload) -> int:
    """Parameters of the model itself, each once, however it is laid out: vocabulary as the model has it, not padded,
    without copies of experts, and without multi-token prediction, which serves training only."""
    return _parameters(workload, workload.model.moe.experts if workload.model.moe else 0)


def active_parameters(workload: Workload) -> int:
    """Those of `parameters` that a token meets: of routed experts ``top_k``."""
    return _parameters(workload, workload.model.moe.top_k if workload.model.moe else 0)


def _parameters(workload: Workload, routed: int) -> int:
    model = workload.model
    per_norm = 2 if model.norm == "layernorm" else 1
    norms = model.layers * 2 * model.hidden + model.hidden
    if model.mla:
        norms += model.layers * ((model.mla.q_lora_rank or 0) + model.mla.kv_lora_rank)
    biases = 0
    if model.bias:
        dense, mixed = _layers(model)
        qkv = 0 if model.mla else model.head_dim * (model.heads + 2 * model.kv_heads)
        wide = 2 if model.activation in GATED else 1
        biases = model.layers * (qkv + model.hidden) + dense * (wide * model.ffn_hidden + model.hidden)
        if model.moe:
            shared = wide * model.moe.shared_ffn_hidden + model.hidden if model.moe.shared_experts else 0
            biases += mixed * (routed * (wide * model.moe.ffn_hidden + model.hidden) + shared)
    tables = model.vocab * model.hidden * (1 if model.tied_embeddings else 2)
    positions = workload.training.seq * model.hidden if model.position == "learned" else 0
    return _weights(model, routed) + per_norm * norms + biases + tables + positions


def _forward_flops_per_step(workload: Workload, pairs: float) -> float:
    """Forward FLOPs of a global batch: two per weight that a token meets, and two products of heads * head_dim for each
    of the query-key ``pairs`` of a sequence and layer. A module of multi-token prediction is a layer, a projection of
    two widths to one, and the vocabulary's once more."""
    model, seq = workload.model, workload.training.seq
    routed = model.moe.top_k if model.moe else 0
    vocabulary = model.hidden * model.padded_vocab(workload.parallelism.tp)
    weights, layers = _weights(model, routed) + vocabulary, model.layers
    for number in range(model.layers, model.layers + model.mtp_layers):
        mixture = model.moe if model.moe and model.moe.here(number) else None
        mlp = _mixture_weights(model, mixture, routed) if mixture else _mlp_weights(model, model.ffn_hidden)
        weights += _attention_weights(model) + mlp + 2 * model.hidden**2 + vocabulary
        layers += 1
    attention = layers * 2.0 * pairs * model.heads * (model.qk_head_dim + model.v_head_dim)
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
    seats = Counter(telling_seat(workload, Seat(cp, ep)) for cp in range(layout.cp) for ep in range(layout.ep))
    mean = sum(count * _flops_of_seat(workload, seat) for seat, count in seats.items()) / (layout.cp * layout.ep)
    return mean * layout.tp * layout.cp * layout.dp * workload.microbatches


def _flops_of_seat(workload: Workload, seat: Seat) -> float:
    """What a micro-batch costs the ranks at one seat of all stages."""
    flops = 0.0
    for stage in range(len(workload.parallelism.layers_per_stage)):
        for part in stage_parts(workload, stage, seat):
            ops = (*part.forward, *part.recompute, *part.backward)
            flops += sum(one.kernel.flops for op in ops for one in kernels_of(op))
    return flops
