"""Requests to the allocator from passes through a stage; ranks and micro-batches that are alike share them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from simulator.analysis.training.activation_lifetimes import ActivationEvent
from simulator.analysis.training.memory_requests import RequestSequences
from simulator.analysis.training.part_requests import PartRequests, request
from simulator.models import Part, swapped_bytes
from simulator.same_objects import SameObjects

#: Requests of a part of a stage, by name as in `PartRequests`; parts are indices in the stage.
_PartRequest = tuple[int, str]


@dataclass(frozen=True)
class KeptParts:
    """Tensors that are kept of a stage for a micro-batch; parts are indices in the stage.

    ``saved``: parts with tensors, and whether these are what their weight gradients need. ``swapped``: parts that have
    exchanged their tensors for these. ``early``: parts that are released before they are saved, as a pass of no length
    ends before it starts. They hold nothing.
    """

    saved: tuple[tuple[int, bool], ...] = ()
    swapped: frozenset[int] = frozenset()
    early: frozenset[int] = frozenset()


class KeptChange(NamedTuple):
    """Effect of an event of a pass.

    ``after``: what is kept behind the event. ``requests``: number of its sequence of requests, if it has one.
    ``nbytes``: of activations, as the pass moves them.
    """

    after: KeptParts
    requests: int | None
    nbytes: float


class ReplayedStages:
    """The stages of a job; equal ones, whose parts are the very same, are one. ``sequences``: all their requests."""

    def __init__(self) -> None:
        self.sequences = RequestSequences()
        self._stages = SameObjects[ReplayedStage]()
        self._alone: dict[int, int] = {}

    def stage_with(self, parts: tuple[Part, ...]) -> ReplayedStage:
        """Return the stage that has ``parts``."""
        return self._stages.get((parts,), lambda: ReplayedStage(parts, self.sequences))

    def alone(self, nbytes: int) -> int:
        """Return the number of the request for a tensor alone, of rounded bytes; 0 bytes free it."""
        if nbytes not in self._alone:
            self._alone[nbytes] = self.sequences.describe(request(nbytes))
        return self._alone[nbytes]


class ReplayedStage:
    """A stage and all that events of its passes do so far. A micro-batch has ``n_slots`` there, ``nothing`` at first.

    The requests of all parts of a pass are one sequence.
    """

    def __init__(self, parts: tuple[Part, ...], sequences: RequestSequences) -> None:
        self.nothing = KeptParts()
        self._parts, self._sequences = parts, sequences
        requests = {id(part): PartRequests(part) for part in parts}  # equal layers are one object
        self._requests = [requests[id(part)] for part in parts]
        *self._first_slots, self.n_slots = accumulate((one.n_slots for one in self._requests), initial=0)
        self._numbers: dict[tuple[_PartRequest, ...], int] = {}
        self._kept = {self.nothing: self.nothing}
        #: What is kept before, by its identity, the event, and whether the micro-batch is replayed.
        self._changes: dict[tuple[int, ActivationEvent | None, bool], KeptChange] = {}

    def change(self, before: KeptParts, event: ActivationEvent | None, is_replayed: bool) -> KeptChange:
        """Return what an event does, or None, the end of a step: tensors that are left are released.

        ``before``: `nothing`, or what is kept after another change. Micro-batches that are not replayed request no
        tensors.
        """
        key = id(before), event, is_replayed
        if key not in self._changes:
            self._changes[key] = self._changed(before, event, is_replayed)
        return self._changes[key]

    def _changed(self, before: KeptParts, event: ActivationEvent | None, is_replayed: bool) -> KeptChange:
        saved, swapped, early = dict(before.saved), set(before.swapped), set(before.early)
        requests: list[_PartRequest] = []
        nbytes = 0.0
        if event is None:
            requests = [_released(saved, index) for index in [*saved]]
        else:
            indices = sorted(event.parts)
            parts = [self._parts[index] for index in indices]
            match event.effect:
                case "save":
                    nbytes = sum([part.saved_bytes for part in parts])
                    requests = _saves(saved, early, indices if is_replayed else ())
                case "begin swap":
                    nbytes = swapped_bytes(parts)[0]
                case "swap":
                    nbytes = swapped_bytes(parts)[1]
                    swapped.update(indices)
                    requests = _swaps(saved, indices if is_replayed else ())
                case "release":
                    kept = zip(indices, parts, strict=True)
                    nbytes = sum([part.held_bytes if at in swapped else part.saved_bytes for at, part in kept])
                    swapped.difference_update(indices)
                    requests = _releases(saved, early, indices if is_replayed else ())
        after = KeptParts(tuple(saved.items()), frozenset(swapped), frozenset(early))
        return KeptChange(self._kept.setdefault(after, after), self._sequence(requests), nbytes)

    def _sequence(self, requests: Sequence[_PartRequest]) -> int | None:
        """Return the number of the sequence of ``requests`` of parts, in slots that count from 0."""
        key = tuple(requests)
        if requests and key not in self._numbers:
            each = [getattr(self._requests[at], name) + np.array([self._first_slots[at], 0]) for at, name in requests]
            self._numbers[key] = self._sequences.describe(np.concatenate(each))
        return self._numbers.get(key)


def _saves(saved: dict[int, bool], early: set[int], indices: Iterable[int]) -> list[_PartRequest]:
    """Save the tensors of parts, but of those that were released early; return their requests."""
    new = [index for index in indices if index not in early]
    early.difference_update(indices)
    saved.update(dict.fromkeys(new, False))
    return [(index, "save") for index in new]


def _swaps(saved: dict[int, bool], indices: Iterable[int]) -> list[_PartRequest]:
    """Replace the saved tensors of parts by the tensors that their weight gradients need; return their requests."""
    swapped = [index for index in indices if index in saved]
    saved.update(dict.fromkeys(swapped, True))
    return [(index, name) for index in swapped for name in ("gradients", "swap")]


def _releases(saved: dict[int, bool], early: set[int], indices: Sequence[int]) -> list[_PartRequest]:
    """Release what is kept of parts at the end of their backward passes; return their requests."""
    requests: list[_PartRequest] = []
    for index in reversed(indices):
        requests.append((index, "gradients"))
        if index in saved:
            requests.append(_released(saved, index))
        else:
            early.add(index)
    return requests


def _released(saved: dict[int, bool], index: int) -> _PartRequest:
    """Forget the tensors of a part; return the request that frees them."""
    return index, "release_held" if saved.pop(index) else "release_saved"
