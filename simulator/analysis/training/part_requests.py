"""Requests of the passes of one part of a model to the allocator."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from simulator.analysis.training.caching_allocator import rounded
from simulator.arrays import Ints
from simulator.models import Part

#: Bytes that are the rounding of a sum, not a tensor.
ROUNDING_BYTES = 1.0


class PartRequests:
    """Requests of the passes of a part for one micro-batch: slots, which count from 0, and bytes.

    Saved tensors have the first slots. Behind them are those that a weight gradient needs, then tensors of a moment.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._first_held = len(part.saved)
        self._first_of_moment = self._first_held + len(part.held_for_weights)
        self.n_slots = self._first_of_moment + len(part.recomputed) + 1

    @cached_property
    def save(self) -> Ints:
        """Requests of a forward pass."""
        saved = [(slot, rounded(tensor.nbytes)) for slot, tensor in enumerate(self._part.saved)]
        return _requests([*saved, *self._moment([self._part.forward_bytes])])

    @cached_property
    def gradients(self) -> Ints:
        """Requests of any backward pass, for tensors that exist only while gradients are computed."""
        return _requests(self._moment([*(tensor.nbytes for tensor in self._part.recomputed), self._part.grad_bytes]))

    @cached_property
    def swap(self) -> Ints:
        """Requests at the end of an input gradient: saved tensors are exchanged for what the weight gradient needs."""
        saved, for_weights = self._saved_slots, self._held_slots
        new = [
            (self._first_held + at, rounded(tensor.nbytes))
            for at, tensor in enumerate(self._part.held_for_weights)
            if tensor.name not in saved
        ]
        return _requests([*new, *_freed(slot for name, slot in saved.items() if name not in for_weights)])

    @cached_property
    def release_saved(self) -> Ints:
        """Requests that free what a forward pass has saved."""
        return _requests(_freed(self._saved_slots.values()))

    @cached_property
    def release_held(self) -> Ints:
        """Requests that free what an input gradient has left."""
        return _requests(_freed(self._held_slots.values()))

    @property
    def _saved_slots(self) -> dict[str, int]:
        return {tensor.name: slot for slot, tensor in enumerate(self._part.saved)}

    @property
    def _held_slots(self) -> dict[str, int]:
        saved = self._saved_slots
        for_weights = enumerate(self._part.held_for_weights, self._first_held)
        return {tensor.name: saved.get(tensor.name, slot) for slot, tensor in for_weights}

    def _moment(self, sizes: Iterable[float]) -> list[tuple[int, int]]:
        """Return requests for tensors that are allocated together and freed at once."""
        sizes = [nbytes for nbytes in sizes if nbytes > ROUNDING_BYTES]
        slots = range(self._first_of_moment, self._first_of_moment + len(sizes))
        return [*zip(slots, map(rounded, sizes), strict=True), *_freed(slots)]


def _freed(slots: Iterable[int]) -> list[tuple[int, int]]:
    return [(slot, 0) for slot in slots]


def _requests(requests: Iterable[tuple[int, int]]) -> Ints:
    return np.array([*requests], dtype=np.int64).reshape(-1, 2)
