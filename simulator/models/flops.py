"""Parameters and floating-point operations of the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from simulator.config import Workload
from simulator.models.layer import layer
from simulator.models.multi_token_prediction import predictor
from simulator.models.shapes import representative_seat
from simulator.models.stage import stage_parts
from simulator.models.vocabulary import embedding, head
from simulator.operations.shapes import Seat
from simulator.operations.weights import EXPERT_AXIS, Weight, prefixed
from simulator.program import kernels_of
from simulator.program.kernels import causal_pairs


def model_weights(workload: Workload) -> Iterator[Weight]:
    """Yield the weights of the model itself, each once, with names that count from the whole model.

    Multi-token prediction is left out: it serves training only.
    """
    yield from embedding(workload).weights
    for number in range(workload.model.layers):
        yield from prefixed(layer(workload, number=number).weights, f"layers.{number}")
    yield from (weight for weight in head(workload).weights if not weight.tied_to)


def parameters(workload: Workload) -> int:
    """Return the parameters of the model itself, however it is laid out: `model_weights` without padding or copies."""
    return sum(weight.whole_elements for weight in model_weights(workload))


def trained_parameters(workload: Workload) -> int:
    """Return those of `parameters` that are trained."""
    return sum(weight.whole_elements for weight in model_weights(workload) if weight.trainable)


def active_parameters(workload: Workload) -> int:
    """Return those of `parameters` that a token meets: of routed experts ``top_k``."""
    return _met_by_a_token(workload, model_weights(workload))


def _met_by_a_token(workload: Workload, weights: Iterable[Weight]) -> int:
    """Return the elements of ``weights`` that a token meets."""
    top_k = workload.model.moe.top_k if workload.model.moe else 0
    return sum(
        weight.whole_elements // weight.whole[0] * top_k if weight.axis == EXPERT_AXIS else weight.whole_elements
        for weight in weights
    )


def _multiplied(workload: Workload) -> tuple[int, int]:
    """Return the elements of the weights that a token is multiplied by, and of those among them that are frozen.

    The (padded) vocabulary's are met once more in every module of multi-token prediction, beside a layer and a
    projection.
    """
    model = workload.model
    modules = range(model.mtp_layers)
    parts = [layer(workload, number=number) for number in range(model.layers + model.mtp_layers)]
    parts += [part for number in modules for part in predictor(workload, number) if part.name == "mtp projection"]
    products = [weight for part in parts for weight in part.weights if weight.gradient_product]
    vocabulary = model.hidden * model.padded_vocab(workload.parallelism.tp)
    outside = vocabulary * (1 + model.mtp_layers)
    trained = any(weight.trainable for weight in head(workload).weights if weight.gradient_product)
    frozen = _met_by_a_token(workload, (weight for weight in products if not weight.trainable))
    return _met_by_a_token(workload, products) + outside, frozen + (0 if trained else outside)


def _flops_per_step(workload: Workload, pairs: float) -> float:
    """Return the FLOPs of a global batch forward and backward, which takes twice as many.

    Forward they are two per weight that a token is multiplied by. To these come two products of heads * head_dim for
    each of the query-key ``pairs`` of a sequence and layer. Of frozen weights no gradients are computed, which takes
    another two per weight.
    """
    model, seq = workload.model, workload.training.seq
    layers = model.layers + model.mtp_layers
    attention = layers * 2.0 * pairs * model.heads * (model.qk_head_dim + model.v_head_dim)
    multiplied, frozen = _multiplied(workload)
    forward = float(workload.training.global_batch * (2.0 * seq * multiplied + attention))
    return 3 * forward - workload.training.global_batch * 2.0 * seq * frozen


def model_flops_per_step(workload: Workload) -> float:
    """Return the FLOPs of matrix products, the (padded) vocabulary's too, and of full attention, forward and backward.

    Attention has its window where it has one. Recomputation does not count.
    """
    seq = workload.training.seq
    return _flops_per_step(workload, float(seq * (workload.model.window(seq) or seq)))


def model_flops_per_step_causal(workload: Workload) -> float:
    """Return `model_flops_per_step` with the attention that a causal mask leaves: half of it without a window."""
    seq = workload.training.seq
    return _flops_per_step(workload, causal_pairs(seq, seq, window=workload.model.window(seq)))


def hardware_flops_per_step(workload: Workload) -> float:
    """Return the FLOPs of the kernels of all GPUs in a step, recomputation and replicated work included.

    For GELU, ffn 4h, unfused attention and full recomputation equation 3 of arXiv 2104.04473 gives them:

        96 B s l h^2 (1 + s / 6h + V / 16 l h)
    """
    layout = workload.parallelism
    seats = Counter(representative_seat(workload, Seat(cp, ep)) for cp in range(layout.cp) for ep in range(layout.ep))
    mean = sum(count * _flops_of_seat(workload, seat) for seat, count in seats.items()) / (layout.cp * layout.ep)
    return mean * layout.tp * layout.cp * layout.dp * workload.microbatches


def _flops_of_seat(workload: Workload, seat: Seat) -> float:
    """Return the FLOPs of a micro-batch on the ranks at one seat of all stages."""
    flops = 0.0
    for stage in range(len(workload.parallelism.layers_per_stage)):
        for part in stage_parts(workload, stage, seat):
            ops = (*part.forward, *part.recompute, *part.backward)
            flops += sum(one.kernel.flops for op in ops for one in kernels_of(op))
    return flops
