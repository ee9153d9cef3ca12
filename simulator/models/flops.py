"""Parameters and floating-point operations of the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulator.config import Workload
from simulator.models.captured import captured_flops
from simulator.models.encoder import encoder_flops, encoder_parts
from simulator.models.layer import layer, layer_kind
from simulator.models.multi_token_prediction import predictor
from simulator.models.parts import Part
from simulator.models.shapes import representative_seat
from simulator.models.stage import stage_parts
from simulator.models.vocabulary import embedding, head
from simulator.models.weight_names import OUTPUT
from simulator.operations.shapes import Seat
from simulator.operations.weights import EXPERT_AXIS, Weight, prefixed
from simulator.program import kernels_of
from simulator.program.kernels import causal_pairs, chunked_pairs

#: Weights of the last product of a mixer.
_ENDS_OF_MIXERS = ("attention.proj.weight", "mixer.out.weight")


def model_weights(workload: Workload) -> Iterator[Weight]:
    """Yield the weights of the model itself, each once, with names that count from the whole model.

    Multi-token prediction is left out: it serves training only.
    """
    for name, weights in _weights_by_part(workload):
        yield from prefixed(weights, name) if name else weights


def _weights_by_part(workload: Workload) -> Iterator[tuple[str, Sequence[Weight]]]:
    """Yield the parts that `model_weights` are of: the name of a layer, else nothing, and its weights."""
    if workload.model.encoder:
        for number, part in enumerate(encoder_parts(workload, workload.model.encoder)):
            yield f"encoder.{number}", part.weights
    yield "", embedding(workload).weights
    for number in range(workload.model.layers):
        yield f"layers.{number}", layer(workload, number=number).weights
    yield "", [weight for weight in head(workload).weights if not weight.tied_to]


def _weights(workload: Workload) -> Iterator[Weight]:
    """Yield `model_weights`, each under its name in its layer, so that no weight is made anew."""
    for _, weights in _weights_by_part(workload):
        yield from weights


def parameters(workload: Workload) -> int:
    """Return the parameters of the model itself, however it is laid out: `model_weights` without padding or copies."""
    return sum(weight.whole_elements for weight in _weights(workload))


def trained_parameters(workload: Workload) -> int:
    """Return those of `parameters` that are trained."""
    return sum(weight.whole_elements for weight in _weights(workload) if weight.trainable)


def active_parameters(workload: Workload) -> int:
    """Return those of `parameters` that a token meets: of routed experts ``top_k``."""
    return _met_by_a_token(workload, _weights(workload))


def _met_by_a_token(workload: Workload, weights: Iterable[Weight]) -> int:
    """Return the elements of ``weights`` that a token meets."""
    top_k = workload.model.moe.top_k if workload.model.moe else 0
    return sum(
        weight.whole_elements // weight.whole[0] * top_k if weight.axis == EXPERT_AXIS else weight.whole_elements
        for weight in weights
    )


@dataclass
class _Walk:
    """Multiplications of a token with weights, added up from the first part of the model to the loss.

    A product takes as many again for the gradient of its weight, where this is trained. So it does for the gradient of
    its input, where something that is trained comes before. ``reached``: a trained weight has come before.
    """

    workload: Workload
    multiplied: int = 0
    reached: bool = False

    def part(self, part: Part, count: int = 1) -> None:
        """Add the products of ``count`` parts."""
        for place, weight in enumerate(part.weights):
            if weight.gradient_product:
                self._product(part, place, count * _met_by_a_token(self.workload, [weight]))
        self.reached |= any(weight.trainable for weight in part.weights)

    def vocabulary(self, part: Part) -> None:
        """Add the product of the head with the (padded) vocabulary. Nothing else is reached by what it trains."""
        model = self.workload.model
        place = next(place for place, weight in enumerate(part.weights) if weight.name == OUTPUT)
        self._product(part, place, model.hidden * model.padded_vocab(self.workload.parallelism.tp))

    def reaches_mixer(self, part: Part) -> bool:
        """Return whether the mixer of a layer, which comes before its last product, passes gradients on."""
        names = [weight.name for weight in part.weights]
        return self.reached or any(name in names[part.leading_weights :] for name in _ENDS_OF_MIXERS)

    def _product(self, part: Part, place: int, multiplied: int) -> None:
        passes_on = self.reached or place >= part.leading_weights
        self.multiplied += multiplied * (1 + passes_on + part.weights[place].trainable)


class ModelFlops(NamedTuple):
    """FLOPs of a step's matrix products and attention: with the ``whole`` square of attention, and with ``causal``.

    ``mixers``: those among the whole that attention and other mixers take beside products with weights.
    """

    whole: float
    causal: float
    mixers: float


#: Whether only what a causal mask leaves of attention counts.
_CAUSAL = (False, True)


def model_flops(workload: Workload) -> ModelFlops:
    """Return the FLOPs of a global batch forward and backward, which takes twice as many where all is trained.

    Forward they are two per weight that a token is multiplied by (`_Walk` has those of gradients). To these come those
    of mixers (`_mixer_flops`), of which two thirds are gradients of what enters them. The vocabulary is met once more
    in every module of multi-token prediction, beside a layer and a projection.
    """
    model, seq, batch = workload.model, workload.training.seq, workload.training.global_batch
    if captured := model.captured_model:
        samples = batch / workload.training.micro_batch
        full, masked = (samples * captured_flops(captured, model.layers, causal=causal) for causal in _CAUSAL)
        return ModelFlops(full, masked, full * captured.attention_share(model.layers))
    walk, end = _Walk(workload), head(workload)
    passes_of_mixers: list[tuple[int, int]] = []

    def add_layer(number: int, count: int) -> None:
        part = layer(workload, number=number)
        passes_of_mixers.append((number, count * (3 if walk.reaches_mixer(part) else 1)))
        walk.part(part, count)

    walk.part(embedding(workload))
    for number, count in _layers_of_kinds(workload):
        add_layer(number, count)
    walk.vocabulary(end)
    for module in range(model.mtp_layers):
        walk.part(next(part for part in predictor(workload, module) if part.name == "mtp projection"))
        add_layer(model.layers + module, 1)
        walk.vocabulary(end)
    images = 3 * encoder_flops(workload, model.encoder) if model.encoder else 0.0

    products = batch * (2.0 * seq * walk.multiplied + images)
    full, masked = (
        batch * sum(passes * _mixer_flops(workload, number, causal=causal) for number, passes in passes_of_mixers)
        for causal in _CAUSAL
    )
    return ModelFlops(products + full, products + masked, full)


def _layers_of_kinds(workload: Workload) -> list[tuple[int, int]]:
    """Return the number of the first layer of each kind, and how many are of that kind, in order."""
    first = dict[object, int]()
    kinds = [layer_kind(workload, number) for number in range(workload.model.layers)]
    for number, kind in enumerate(kinds):
        first.setdefault(kind, number)
    return [(first[kind], count) for kind, count in Counter(kinds).items()]


def _mixer_flops(workload: Workload, number: int, *, causal: bool) -> float:
    """Return the forward FLOPs of a layer's mixer on a sequence, beside those of weights.

    Attention takes two products of heads * head_dim for each pair of a query and a key, others what they declare.
    """
    model, seq = workload.model, workload.training.seq
    mixer, seen, heads = model.mixer(number), model.keys_seen(number, seq), model.heads_of(number)
    flops = 0.0
    if mixer.attends:
        whole = 2 * chunked_pairs(seq, seen.chunk) if seen.chunk else float(seq * (seen.window or seq))
        bounded = chunked_pairs(seq, seen.chunk) if seen.chunk else causal_pairs(seq, seq, window=seen.window)
        flops += 2.0 * (bounded if causal else whole) * heads.heads * (heads.head_dim + heads.v_head_dim)
    if mixer.flops is not None:
        flops += seq * mixer.flops(model.mixer_sizes(number), seq / 2 if causal else seq)
    return flops


def model_flops_per_step(workload: Workload) -> float:
    """Return the FLOPs of matrix products, the (padded) vocabulary's too, and of full attention, forward and backward.

    Attention has its window where it has one. Recomputation does not count.
    """
    return model_flops(workload).whole


def model_flops_per_step_causal(workload: Workload) -> float:
    """Return `model_flops_per_step` with the attention that a causal mask leaves: half of it without a window."""
    return model_flops(workload).causal


def hardware_flops_per_step(workload: Workload) -> float:
    """Return the FLOPs of the kernels of all GPUs in a step, recomputation and replicated work included.

    Causal flash kernels skip half of attention, so that these can be fewer than `model_flops_per_step`.

    For GELU, ffn 4h, unfused attention and full recomputation equation 3 of arXiv 2104.04473 gives them:

        96 B s l h^2 (1 + s / 6h + V / 16 l h)
    """
    layout = workload.parallelism
    seats = Counter(representative_seat(workload, Seat(cp, ep)) for cp in range(layout.cp) for ep in range(layout.ep))
    mean = sum(count * _flops_of_seat(workload, seat) for seat, count in seats.items()) / (layout.cp * layout.ep)
    return mean * layout.tp * layout.cp * layout.dp * workload.microbatches


def _flops_of_seat(workload: Workload, seat: Seat) -> float:
    """Return the FLOPs of a micro-batch on the ranks at one seat of all stages."""
    n_stages = len(workload.parallelism.layers_per_stage)
    parts = [part for stage in range(n_stages) for part in stage_parts(workload, stage, seat)]
    each = {id(part): part for part in parts}  # equal layers are one object
    flops = {number: _flops_of_part(part) for number, part in each.items()}
    return sum(flops[id(part)] for part in parts)


def _flops_of_part(part: Part) -> float:
    ops = (*part.forward, *part.recompute, *part.backward)
    return sum(one.kernel.flops for op in ops for one in kernels_of(op))
