"""Contents of a rank's memory over a step: activations, and gradients that the step makes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from simulator.analysis.time.memory_curve import MemoryHistory, joined_entries
from simulator.analysis.training.activation_lifetimes import ActivationEffect, ActivationEvents, activation_events
from simulator.analysis.training.stage_numbers import StageNumbers
from simulator.analysis.training.static_memory import StaticMemory
from simulator.arrays import Floats, Ints, is_any, ranges, row_numbers
from simulator.models import Part, Tensor
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


class ActivationChanges(NamedTuple):
    """Changes of the activations that ranks hold, in order; a row of each column for one.

    ``entry``: of the ranks' curves, one behind another. ``kind``: place of the tensors' kind in ``kinds``. ``nbytes``:
    how many more there are from then on.
    """

    entry: Ints
    kind: Ints
    nbytes: Floats
    kinds: tuple[str, ...]

    def held_after(self, first: int, last: int) -> dict[str, float]:
        """Return the bytes of activations by kind behind the entries ``first`` to ``last``; nothing is held before."""
        start, end = np.searchsorted(self.entry, (first, last + 1))
        kind = self.kind[start:end]
        nbytes = np.bincount(kind, weights=self.nbytes[start:end], minlength=len(self.kinds)).tolist()
        return {self.kinds[one]: nbytes[one] for one in dict.fromkeys([0, *kind.tolist()]) if nbytes[one] > 0.5}


#: Kind of the gradients that input gradients take while they run.
_TAKEN = "output gradients"


def activation_changes(
    timeline: Timeline,
    curves: Sequence[MemoryHistory],
    events: Sequence[ActivationEvents],
    static: Sequence[StaticMemory],
) -> ActivationChanges:
    """Return the changes of the activations of some ranks. ``events``: those of the entries of their ``curves``."""
    rank, spans, begins = joined_entries(curves)
    event, numbered = np.concatenate([one.place for one in events]), StageNumbers(static)
    stage, phase = numbered.numbers_at(rank, timeline.stage[spans]), timeline.phase[spans]
    taken_bytes = np.where((phase == "I") & (stage >= 0) & (begins == 1), timeline.alloc_bytes[spans], 0.0)
    entry = np.flatnonzero((taken_bytes != 0) | (event >= 0))
    columns = (
        stage[entry],
        event[entry],
        (phase[entry] == "W").astype(np.int64),
        (taken_bytes[entry] != 0).astype(np.int64),
    )
    _, first, pattern = np.unique(row_numbers(*columns), return_index=True, return_inverse=True)
    kinds, patterns = {_TAKEN: 0}, []
    for number, place, is_weight, takes in np.stack(columns)[:, first].T.tolist():
        effect, parts = events[0].kinds[place] if place >= 0 else (None, ())
        changes = _changes(effect, [numbered.parts[number][part] for part in parts], takes=takes, is_weight=is_weight)
        patterns.append([(kinds.setdefault(kind, len(kinds)), nbytes) for kind, nbytes in changes])
    lengths = np.array([len(one) for one in patterns], dtype=np.int64)
    row = ranges((np.cumsum(lengths) - lengths)[pattern], lengths[pattern])
    kind, nbytes = np.array([change for one in patterns for change in one]).reshape(-1, 2).T[:, row]
    entry_of_row, takes_or_gives = np.repeat(entry, lengths[pattern]), np.isnan(nbytes)
    passes = np.stack((rank, timeline.stage[spans], timeline.microbatch[spans]))[:, entry_of_row[takes_or_gives]]
    nbytes[takes_or_gives] = _taken_or_given(passes, taken_bytes[entry_of_row[takes_or_gives]])
    return ActivationChanges(entry_of_row, kind.astype(np.int64), nbytes, tuple(kinds))


def _changes(
    effect: ActivationEffect | None, parts: Sequence[Part], *, takes: bool, is_weight: bool
) -> Iterator[tuple[str, float]]:
    """Yield the changes at the start or end of a pass by kind of tensor.

    Bytes of gradients that an input gradient ``takes``, and gives back, are not a number here. ``is_weight``: the pass
    is a weight gradient, which releases what it needed.
    """

    def moved(name: str, sign: int) -> Iterator[tuple[str, float]]:
        tensors = _by_kind(tensor for part in parts for tensor in getattr(part, name))
        return ((kind, sign * nbytes) for kind, nbytes in tensors.items())

    if takes:
        yield _TAKEN, math.nan
    match effect:
        case "save":
            yield from moved("saved", 1)
        case "swap":
            yield from moved("saved", -1)
            yield from moved("held_for_weights", 1)
            yield _TAKEN, math.nan
            yield "input gradients", sum(part.input_gradient_bytes for part in parts)
        case "release":
            yield from moved("held_for_weights" if is_weight else "saved", -1)


def _taken_or_given(passes: Ints, taken_bytes: Floats) -> list[float]:
    """Return the gradients that input gradients take when they start; at an end, negative, all that its pass has taken.

    ``passes``: rank, stage and micro-batch of each start and end. ``taken_bytes``: bytes that a
    start takes, 0 at an end.
    """
    still_taken: dict[tuple[int, ...], float] = {}
    changes = []
    for place, nbytes in zip(map(tuple, passes.T.tolist()), taken_bytes.tolist(), strict=True):
        changes.append(nbytes or -still_taken.pop(place, 0.0))
        if nbytes:
            still_taken[place] = still_taken.get(place, 0.0) + nbytes
    return changes


def activation_bytes(timeline: Timeline, curve: MemoryHistory, static: StaticMemory) -> Floats:
    """Return the bytes of activations after each entry of a curve.

    The remainder of its ``held`` bytes are parameters and gradients that are whole for a while.
    """
    if static.layers_offloaded or not static.parts:
        return curve.held_bytes
    changes = activation_changes(timeline, [curve], [activation_events(timeline, curve, static)], [static])
    each = np.bincount(changes.entry, weights=changes.nbytes, minlength=len(curve.times))
    return np.minimum(np.cumsum(each), curve.held_bytes)


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
