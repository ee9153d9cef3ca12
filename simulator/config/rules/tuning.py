"""Adapters, frozen weights, and what frozen ones are stored in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.adapters import ADAPTERS
from simulator.config.training import EVERYTHING
from simulator.errors import InputError
from simulator.frameworks import FRAMEWORKS

if TYPE_CHECKING:
    from simulator.config.training import Adapters
    from simulator.config.workload import Workload

#: A product of several side by side -> those.
TOGETHER = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
#: Targets in attention; the others are in the MLP.
IN_ATTENTION = frozenset(("q", "k", "v", "qkv", "o", "q_down", "q_up", "kv_down", "kv_up"))


def problems(workload: Workload) -> Iterator[InputError]:
    """Adapters that have no place, weights that cannot be frozen apart, and quantized ones that are trained."""
    training = workload.training
    if training.adapters is not None:
        yield from _target_problems(workload, training.adapters)
        yield from _dtype_problems(workload, training.adapters)
        yield from _kind_problems(workload, training.adapters)
    yield from _freeze_problems(workload)
    if training.base is None or training.base == training.precision:
        return
    if training.base == "bf16":
        yield InputError(
            f"weights that are not quantized are of the precision, {training.precision}",
            key="training.base",
            found=training.base,
            allowed=f"null, nf4, or precision: {training.base}",
        )
    elif not {"layers", "attention", "mlp"} & set(training.frozen):
        yield InputError(
            "weights that are trained are not quantized, and no product of layers is frozen",
            key="training.base",
            found=training.base,
            allowed="null, or with training.adapters or training.freeze",
            fix="freeze: [layers]",
        )


def _target_problems(workload: Workload, adapters: Adapters) -> Iterator[InputError]:
    """Targets that the model lacks, or that name the same product twice."""
    model, targets = workload.model, adapters.targets
    there = list(dict.fromkeys(name for layer in range(model.layers) for name in model.targets(layer)))
    if not (model.joined_products or workload.software.joins_projections(model.position)):
        there = [name for name in there if name not in TOGETHER]
    key = "training.adapters.targets"
    if missing := [name for name in targets if name not in there]:
        yield InputError("the model has no such products", key=key, found=missing, allowed=", ".join(there))
    twice = [name for name in dict.fromkeys(targets) if targets.count(name) > 1]
    twice += [one for name, parts in TOGETHER.items() if name in targets for one in parts if one in targets]
    if twice:
        yield InputError("a product has one adapter", key=key, found=list(targets), allowed=f"{twice[0]} once")


def _kind_problems(workload: Workload, adapters: Adapters) -> Iterator[InputError]:
    """A kind of adapters that the framework lacks, and what the kind cannot have."""
    kind, key = ADAPTERS[adapters.method], "training.adapters.method"
    have = workload.software.adapter_kinds
    if kind.name not in have:
        able = " or ".join(name for name, one in FRAMEWORKS.items() if kind.name in one.adapter_kinds)
        yield InputError(
            f"{kind.title} of {workload.framework.title} is not simulated",
            key=key,
            found=kind.name,
            allowed=", or ".join([*([", ".join(have)] if have else []), f"framework: {able}"]),
        )
    if workload.parallelism.tp > 1 and not kind.splits:
        yield InputError(
            f"{kind.title} needs whole rows of a product",
            key="parallelism.tp",
            found=workload.parallelism.tp,
            allowed="1",
        )
    if adapters.dropout and not kind.takes_dropout:
        yield InputError(
            f"{kind.title} is simulated without dropout",
            key="training.adapters.dropout",
            found=adapters.dropout,
            allowed="0",
        )


def _dtype_problems(workload: Workload, adapters: Adapters) -> Iterator[InputError]:
    training = workload.training
    if adapters.dtype in (None, training.precision) or set(EVERYTHING) <= set(training.frozen):
        return
    yield InputError(
        f"other weights are trained too, in {training.precision}, and all that is trained is of one type",
        key="training.adapters.dtype",
        found=adapters.dtype,
        allowed=f"{training.precision}, or without training.freeze",
    )


def _freeze_problems(workload: Workload) -> Iterator[InputError]:
    """Kinds that the model lacks or cannot freeze apart, products with adapters that are trained, and nothing left."""
    training, model = workload.training, workload.model
    frozen, adapters, key = set(training.frozen), training.adapters, "training.freeze"
    if training.freeze is None:
        return
    if missing := [kind for kind in ("experts", "router") if kind in frozen and model.moe is None]:
        yield InputError("the model has no experts", key=key, found=missing)
    outside = [kind for kind in training.freeze if " " in kind and int(kind.partition("-")[2]) >= model.layers]
    if outside:
        last = model.layers - 1
        yield InputError(f"the last layer is {last}", key=key, found=outside, fix=f"layers 0-{last}, or layers")
    if model.tied_embeddings and len(frozen & {"embedding", "head"}) == 1:
        yield InputError(
            "embedding and head are one tensor (model.tied_embeddings)",
            key=key,
            found=list(training.freeze),
            allowed="both or none of embedding, head",
        )
    if adapters is not None:
        kinds = {"attention" if target in IN_ATTENTION else "mlp" for target in adapters.targets}
        if trained := [kind for kind in sorted(kinds) if not {"layers", kind} & frozen]:
            yield InputError(
                f"adapters stand beside frozen products, and those of {' and '.join(trained)} are trained",
                key=key,
                found=list(training.freeze),
                allowed=f"with layers, or with {', '.join(trained)}",
            )
    elif {"norms", "head"} <= frozen and "embedding" in frozen and _all_layers(workload):
        yield InputError("nothing is left to train", key=key, found=list(training.freeze))


def _all_layers(workload: Workload) -> bool:
    frozen = set(workload.training.frozen)
    if "layers" in frozen or {"attention", "mlp"} <= frozen:
        return True
    spans = [kind.removeprefix("layers ").split("-") for kind in frozen if " " in kind]
    covered = {number for first, last in spans for number in range(int(first), int(last) + 1)}
    return covered >= set(range(workload.model.layers))
