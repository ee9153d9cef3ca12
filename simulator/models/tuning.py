"""Trained weights of a workload's model: kinds of weights that may be frozen, and adapters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from simulator.config import Workload
from simulator.models.weight_names import WORDS
from simulator.operations.tuning import ALL_TRAINED, AdapterPlan, Tuning
from simulator.operations.weights import Weight

#: Kind of weights that may be frozen -> their names within a part of the model. Tables and products that make inputs of
#: layers (Gemma 3n) are of the embedding, and what adds these within a layer is of its MLP. Residual streams (DeepSeek
#: V4) are mixed by weights of the block that they enter.
KINDS: Mapping[str, re.Pattern[str]] = {
    "embedding": re.compile(r"(embedding|layer_inputs)\."),
    "head": re.compile(r"(output_layer|head)\."),
    "norms": re.compile(r".*norm\.(weight|bias)$"),
    "layers": re.compile(r"(attention|attn|mixer|mlp|layer_input|mtp)\."),
    "attention": re.compile(r"(attention|attn|mixer)\."),
    "mlp": re.compile(r"(mlp|layer_input)\."),
    "experts": re.compile(r"mlp\.experts\."),
    "router": re.compile(r"mlp\.router\."),
}


#: Numbers that the embedding and the head have among the layers.
EMBEDDING, HEAD = -1, -2


def tuning_at(workload: Workload, number: int) -> Tuning:
    """Return which weights are trained in layer ``number`` of a workload's model, of its `EMBEDDING`, or of its `HEAD`.

    A stage behind the first gives back a gradient of its input, as its pipeline marks that as needing one.
    """
    training, model = workload.training, workload.model
    if not training.frozen:
        return ALL_TRAINED
    number = model.layers if number == HEAD else number
    counts = workload.parallelism.layers_per_stage
    reached = len(counts) > 1 and number >= counts[0]
    if number == EMBEDDING:
        reached = _has_trained_weights(workload, EMBEDDING)
    chosen, adapters = training.adapters, None
    if chosen is not None:
        adapters = AdapterPlan(
            rank=chosen.rank,
            targets=chosen.targets,
            dtype=training.trained_dtype,
            dropout=chosen.dropout,
            kind=chosen.method,
        )
    storage = training.base if training.base != training.precision else None
    reached = reached or any(
        _has_trained_weights(workload, earlier) for earlier in range(EMBEDDING, min(number, model.layers))
    )
    return Tuning(adapters, _frozen_kinds(training.frozen, number), storage or "", reached)


def is_of_kinds(weight: Weight, kinds: Iterable[str]) -> bool:
    """Return True of a weight of one of the ``kinds``; a tied one is of those of the other."""
    name = WORDS if weight.tied_to == WORDS else weight.name
    return any(KINDS[kind].match(name) for kind in kinds)


def kinds_of_weight(weight: Weight) -> frozenset[str]:
    """Return the kinds that ``weight`` belongs to, for each of which an optimizer can be chosen.

    ``matrices`` are those of layers, experts' among them; ``vectors`` are norms, biases and what else is no matrix.
    """
    kinds = {kind for kind in ("embedding", "head", "norms", "experts", "router") if is_of_kinds(weight, (kind,))}
    if "embedding" in kinds or "head" in kinds:
        return frozenset(kinds)
    if weight.name.endswith(".bias"):
        kinds.add("biases")
    return frozenset(kinds | {"matrices" if weight.gradient_product else "vectors"})


def _frozen_kinds(frozen: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the kinds that are frozen in layer ``number``, where ``layers 0-3`` means those of four layers."""
    kinds = []
    for kind in frozen:
        name, _, numbers = kind.partition(" ")
        first, _, last = numbers.partition("-")
        if not numbers or int(first) <= number <= int(last):
            kinds.append(name)
    return tuple(dict.fromkeys(kinds))


def _has_trained_weights(workload: Workload, number: int) -> bool:
    """Return True where layer ``number``, or the `EMBEDDING`, has a weight that is trained."""
    kinds, adapters = set(_frozen_kinds(workload.training.frozen, number)), workload.training.adapters
    if number == EMBEDDING:
        return "embedding" not in kinds
    if adapters and set(workload.model.targets(number)) & set(adapters.targets):
        return True
    return "layers" not in kinds and not {"attention", "mlp"} <= kinds
