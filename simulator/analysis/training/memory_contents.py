"""Contents of a rank's memory over a step: activations, and gradients that the step makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import numpy as np

from simulator.analysis.time.memory_curve import MemoryHistory
from simulator.analysis.training.activation_lifetimes import ActivationEvents, activation_events
from simulator.analysis.training.static_memory import StaticMemory
from simulator.arrays import Floats, is_any
from simulator.models import Tensor
from simulator.timeline import Timeline

#: Lanes on which gradients leave.
REDUCING = ("dp", "dp_replica", "d2h_grads", "push")
#: First word of a tensor's name -> its kind in a breakdown, where that is another word.
_KINDS = {"input": "layer inputs", "attn": "attention", "loss": "logits", "output gradient": "output gradients"}


@cache
def _kind(name: str) -> str:
    """Return the kind of the tensor of this ``name`` in a breakdown."""
    word = name.split(".")[0].rstrip(" 0123456789")
    return _KINDS.get(word, word)


def _by_kind(tensors: Iterable[Tensor]) -> dict[str, float]:
    nbytes: dict[str, float] = {}
    for tensor in tensors:
        kind = _kind(tensor.name)
        nbytes[kind] = nbytes.get(kind, 0.0) + tensor.nbytes
    return nbytes


def _negative(nbytes: Mapping[str, float]) -> dict[str, float]:
    return {kind: -size for kind, size in nbytes.items()}


def activation_changes(
    timeline: Timeline, curve: MemoryHistory, events: ActivationEvents, static: StaticMemory
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the changes of the activations held, in order: index of the curve's entry, and bytes by kind of tensor.

    ``events``: the `activation_events` of the curve's entries.
    """
    output_gradients: dict[tuple[int, int], float] = {}  # taken by input gradients that still run

    @cache
    def saved(stage: int, parts: tuple[int, ...]) -> dict[str, float]:
        return _by_kind(tensor for part in parts for tensor in static.parts[stage][part].saved)

    @cache
    def held_for_weights(stage: int, parts: tuple[int, ...]) -> dict[str, float]:
        return _by_kind(tensor for part in parts for tensor in static.parts[stage][part].held_for_weights)

    takes = (timeline.phase[curve.span] == "I") & (timeline.alloc_bytes[curve.span] != 0)
    entries = np.flatnonzero(takes | events.are_there)
    spans = curve.span[entries]
    columns = (curve.begins[entries], timeline.stage[spans], timeline.microbatch[spans], timeline.phase[spans])
    rows = zip(entries.tolist(), events.at(entries), spans.tolist(), *[one.tolist() for one in columns], strict=True)
    for entry, event, span, begins, stage, microbatch, phase in rows:
        key = stage, microbatch
        if phase == "I" and stage in static.parts and begins:
            nbytes = float(timeline.alloc_bytes[span])
            output_gradients[key] = output_gradients.get(key, 0.0) + nbytes
            yield entry, {"output gradients": nbytes}
        effect, parts = event or (None, ())
        if effect == "save":
            yield entry, saved(stage, parts)
        elif effect == "swap":
            yield entry, _negative(saved(stage, parts))
            yield entry, held_for_weights(stage, parts)
            yield entry, {"output gradients": -output_gradients.pop(key, 0.0)}
            yield entry, {"input gradients": sum(static.parts[stage][part].input_gradient_bytes for part in parts)}
        elif effect == "release":
            yield entry, _negative((held_for_weights if phase == "W" else saved)(stage, parts))


def activation_bytes(timeline: Timeline, curve: MemoryHistory, static: StaticMemory) -> Floats:
    """Return the bytes of activations after each entry of a curve.

    The remainder of its ``held`` bytes are parameters and gradients that are whole for a while.
    """
    if static.layers_offloaded or not static.parts:
        return curve.held_bytes
    changes = np.zeros(len(curve.times))
    events = activation_events(timeline, curve, static)
    for entry, change in activation_changes(timeline, curve, events, static):
        changes[entry] += sum(change.values())
    return np.minimum(np.cumsum(changes), curve.held_bytes)


def gradient_bytes(timeline: Timeline, curve: MemoryHistory, static: StaticMemory) -> Floats:
    """Return the bytes after each entry of a curve of gradients that the step has made and keeps."""
    beside = np.maximum(curve.held_bytes - activation_bytes(timeline, curve, static), 0.0)
    return np.minimum(beside, most_gradient_bytes(timeline, curve, static))


def most_gradient_bytes(timeline: Timeline, curve: MemoryHistory, static: StaticMemory) -> Floats:
    """Return the most bytes that gradients made in the step can take after each entry of a curve.

    A step begins without any. Whole ones wait from the first backward pass on, until reductions leave shards of them.
    """
    phase = timeline.phase[curve.span]
    backward = np.maximum.accumulate(is_any(phase, ("B", "W")) & (curve.begins == 1))
    reducing = [number for number, name in enumerate(timeline.lane_names) if name in REDUCING]
    leaves = is_any(timeline.lane[curve.span], reducing) & (curve.begins == 0)
    left = np.cumsum(np.where(leaves, timeline.free_bytes[curve.span], 0.0))
    waiting = np.maximum(static.accumulated - left, 0.0)
    reduced = 1 - waiting / static.accumulated if static.accumulated else 1.0
    has_any = backward if timeline.period_s is None else np.ones_like(backward)
    return np.where(has_any, static.step_gradients * reduced + waiting, 0.0)
