"""Requests to the allocator from passes through a stage; ranks and micro-batches that are alike share them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from simulator.analysis.training.activation_lifetimes import ActivationEvent
from simulator.analysis.training.memory_requests import RequestSequences
from simulator.analysis.training.part_requests import PartRequests
from simulator.arrays import Floats, Ints
from simulator.models import Part, swapped_bytes

#: Steps that are replayed. States of the optimizer come into what the passes of the first step have left free. Tensors
#: of the second one may not fit into the pieces between them.
STEPS = 2

#: Requests of a part of a stage, by name as in `PartRequests`; parts are indices in the stage.
_PartRequest = tuple[int, str]


class StageHistory(NamedTuple):
    """Effects of the events of a micro-batch on a stage, in `STEPS` steps.

    ``requests``: number of each event's sequence of requests, -1 where it has none; shape (steps, events).
    ``left``: likewise of tensors that are released at the end of each step. ``nbytes``: of activations, as the passes
    move them, shape as ``requests``.
    """

    requests: Ints
    left: tuple[int, ...]
    nbytes: Floats


class ReplayedStage:
    """A stage and all histories of its micro-batches so far, each of which has ``n_slots`` there.

    The requests of all parts of a pass are one sequence.
    """

    def __init__(self, parts: tuple[Part, ...], sequences: RequestSequences) -> None:
        self._parts, self._sequences = parts, sequences
        requests = {id(part): PartRequests(part) for part in parts}  # equal layers are one object
        self._requests = [requests[id(part)] for part in parts]
        *self._first_slots, self.n_slots = accumulate((one.n_slots for one in self._requests), initial=0)
        self._numbers: dict[tuple[_PartRequest, ...], int] = {}
        self._histories: dict[tuple[tuple[ActivationEvent, ...], bool], StageHistory] = {}

    def history(self, events: tuple[ActivationEvent, ...], is_replayed: bool) -> StageHistory:
        """Return what the ``events`` of a micro-batch's passes do, which are equal in each step.

        Micro-batches that are not replayed request no tensors.
        """
        key = events, is_replayed
        if key not in self._histories:
            self._histories[key] = self._history(events, is_replayed)
        return self._histories[key]

    def _history(self, events: Sequence[ActivationEvent], is_replayed: bool) -> StageHistory:
        kept, requests, nbytes, left = _Kept(), [], [], []
        for _ in range(STEPS):
            for event in events:
                indices = sorted(event.parts)
                nbytes.append(self._moved_bytes(event, indices, kept))
                requests.append(self._sequence(kept.change(event, indices, is_replayed)))
            left.append(self._sequence(kept.leave()))
        shape = STEPS, len(events)
        return StageHistory(
            np.array(requests, dtype=np.int64).reshape(shape), tuple(left), np.array(nbytes, dtype=float).reshape(shape)
        )

    def _moved_bytes(self, event: ActivationEvent, indices: Sequence[int], kept: _Kept) -> float:
        """Return the bytes of activations that a pass moves by an event of the parts at ``indices``."""
        parts = [self._parts[index] for index in indices]
        match event.effect:
            case "save":
                return sum([part.saved_bytes for part in parts])
            case "begin swap":
                return swapped_bytes(parts)[0]
            case "swap":
                return swapped_bytes(parts)[1]
            case "release":
                places = zip(indices, parts, strict=True)
                return sum([part.held_bytes if at in kept.swapped else part.saved_bytes for at, part in places])

    def _sequence(self, requests: Sequence[_PartRequest]) -> int:
        """Return the number of the sequence of ``requests`` of parts, in slots that count from 0; -1 of none."""
        key = tuple(requests)
        if requests and key not in self._numbers:
            each = [getattr(self._requests[at], name) + np.array([self._first_slots[at], 0]) for at, name in requests]
            self._numbers[key] = self._sequences.describe(np.concatenate(each))
        return self._numbers.get(key, -1)


class _Kept:
    """Tensors that are kept of a stage for a micro-batch; parts are indices in the stage.

    ``saved``: parts with tensors, and whether these are what their weight gradients need. ``swapped``: parts that have
    exchanged their tensors for these. ``early``: parts that are released before they are saved, as a pass of no length
    ends before it starts. They hold nothing.
    """

    def __init__(self) -> None:
        self.saved: dict[int, bool] = {}
        self.swapped: set[int] = set()
        self.early: set[int] = set()

    def change(self, event: ActivationEvent, indices: Sequence[int], is_replayed: bool) -> list[_PartRequest]:
        """Return the requests of an event of the parts at ``indices``."""
        replayed = indices if is_replayed else ()
        match event.effect:
            case "save":
                return self._save(replayed)
            case "begin swap":
                return []
            case "swap":
                self.swapped.update(indices)
                return self._swap(replayed)
            case "release":
                self.swapped.difference_update(indices)
                return self._release(replayed)

    def leave(self) -> list[_PartRequest]:
        """Return the requests at the end of a step: tensors that are left are released."""
        return [self._released(index) for index in [*self.saved]]

    def _save(self, indices: Iterable[int]) -> list[_PartRequest]:
        """Save the tensors of parts, but of those that were released early."""
        new = [index for index in indices if index not in self.early]
        self.early.difference_update(indices)
        self.saved.update(dict.fromkeys(new, False))
        return [(index, "save") for index in new]

    def _swap(self, indices: Iterable[int]) -> list[_PartRequest]:
        """Replace the saved tensors of parts by the tensors that their weight gradients need."""
        swapped = [index for index in indices if index in self.saved]
        self.saved.update(dict.fromkeys(swapped, True))
        return [(index, name) for index in swapped for name in ("gradients", "swap")]

    def _release(self, indices: Sequence[int]) -> list[_PartRequest]:
        """Release what is kept of parts at the end of their backward passes."""
        requests: list[_PartRequest] = []
        for index in reversed(indices):
            requests.append((index, "gradients"))
            if index in self.saved:
                requests.append(self._released(index))
            else:
                self.early.add(index)
        return requests

    def _released(self, index: int) -> _PartRequest:
        """Forget the tensors of a part; return the request that frees them."""
        return index, "release_held" if self.saved.pop(index) else "release_saved"
