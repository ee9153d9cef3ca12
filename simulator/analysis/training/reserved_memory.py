"""Reserved memory: a step replayed on PyTorch's caching allocator, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulator.analysis.training.activation_lifetimes import ActivationEvent, ActivationEvents, have_events
from simulator.analysis.training.caching_allocator import rounded
from simulator.analysis.training.memory_requests import MemoryRequests
from simulator.analysis.training.part_requests import ROUNDING_BYTES, PartRequests, request
from simulator.analysis.training.static_memory import BLAS_THREADS, StaticMemory
from simulator.arrays import Ints
from simulator.models import swapped_bytes
from simulator.timeline import Timeline

#: Of a long step, the micro-batches in flight are replayed this many times from the start; later ones repeat them.
ROUNDS = 2
#: Last micro-batches that are replayed.
LAST = 2
#: Steps that are replayed. States of the optimizer come into what the passes of the first step have left free. Tensors
#: of the second one may not fit into the pieces between them.
STEPS = 2


def first_replayed(in_flight: int, chunks: int) -> int:
    """Return how many of the first micro-batches are replayed.

    ``in_flight``: most (micro-batch, stage) activations held at once. ``chunks``: stages of the rank.
    """
    return ROUNDS * math.ceil(in_flight / chunks) + 2


def replay_microbatches(in_flight: int, chunks: int) -> int:
    """Return the micro-batches of a step whose replay equals that of any longer step.

    The first ones are released before the last ones are saved. Arguments as in `first_replayed`.
    """
    return first_replayed(in_flight, chunks) + math.ceil(in_flight / chunks) + LAST


class Move(NamedTuple):
    """Start or end of a span in a replay: its pass, bytes that it moves, and its effect on activations, if any.

    ``updates``: the span is the optimizer's.
    """

    starts: int
    stage: int
    microbatch: int
    nbytes: float
    workspace_bytes: float
    updates: bool
    event: ActivationEvent | None


class CachedMemory:
    """Memory that the allocator keeps of ranks; those that do the same in the same order are replayed once.

    ``compiled``: on the allocator in C.
    """

    def __init__(self, *, compiled: bool) -> None:
        self._compiled = compiled
        self._replayed: dict[Hashable, float] = {}
        self._static: list[StaticMemory] = []  # kept, so that no others have their ids

    def cached_bytes(
        self,
        timeline: Timeline,
        spans: Ints,
        begins: Ints,
        events: ActivationEvents,
        static: StaticMemory,
        in_flight: int,
        limit: float,
    ) -> float:
        """Return the most bytes reserved less the most allocated by one rank.

        ``spans``: spans of the rank in the order of their starts (``begins`` is 1) and ends (0). ``events``: its
        `activation_events`. ``in_flight``: most (micro-batch, stage) activations held at once. ``limit``: bytes that
        CUDA has for the allocator.
        """
        microbatch = timeline.microbatch[spans]
        numbers, first = np.unique(microbatch[microbatch >= 0]), first_replayed(in_flight, max(len(static.parts), 1))
        chosen = frozenset((*numbers[:first].tolist(), *numbers[first:][-LAST:].tolist()))
        nbytes = np.where(begins, timeline.alloc_bytes[spans], timeline.free_bytes[spans])
        stage, workspace = timeline.stage[spans], timeline.workspace_bytes[spans]
        workspaces = np.where(begins & ~np.isin(stage, list(static.parts)), workspace, 0.0)
        counts = (nbytes != 0) | (workspaces != 0) | have_events(events, spans, begins)
        updates = timeline.phase[spans] == "O"
        columns = [column[counts].tolist() for column in (begins, stage, microbatch, nbytes, workspaces, updates)]
        effects = map(events.get, zip(spans[counts].tolist(), columns[0], strict=True))
        moves = tuple(map(Move, *columns, effects))
        key = id(static), limit, chosen, moves
        if key not in self._replayed:
            self._static.append(static)
            most = step_requests(moves, static, chosen).most_bytes(limit, compiled=self._compiled)
            self._replayed[key] = float(most.reserved - most.allocated)
        return self._replayed[key]


def step_requests(moves: Iterable[Move], static: StaticMemory, replayed: Container[int]) -> MemoryRequests:
    """Return the requests of a rank before and in `STEPS` steps of ``moves``.

    Of passes they are those for tensors of the micro-batches that are ``replayed``.
    """
    replay = _StepReplay(static, replayed)
    for _ in range(STEPS):
        replay.step(moves)
    return replay.requests


#: Stage, micro-batch, and index of a part in the stage.
_Passed = tuple[int, int, int]


@dataclass(frozen=True)
class _NumberedPart:
    """Numbers of a part's requests, under the names of `PartRequests`, and its slots for a micro-batch."""

    n_slots: int
    save: int
    gradients: int
    swap: int
    release_saved: int
    release_held: int


class _StepReplay:
    """Tensors alive during a step: those of passes, and (bytes, slot) of all others, such as gathered parameters."""

    def __init__(self, static: StaticMemory, replayed: Container[int]) -> None:
        self.requests = MemoryRequests()
        self._parts = static.parts
        self._replayed = replayed
        #: Rounded bytes of a tensor alone -> number of its request.
        self._allocations: dict[int, int] = {}
        self._release = self.requests.describe(request(0))
        #: Part, by its identity -> numbers of its requests.
        self._numbered: dict[int, _NumberedPart] = {}
        self._first_slots: dict[_Passed, int] = {}
        #: Part with tensors of a micro-batch -> whether these are what its weight gradient needs.
        self._saved: dict[_Passed, bool] = {}
        self._swapped: set[_Passed] = set()
        #: Parts that are released before they are saved: a pass of no length ends before it starts. They hold nothing.
        self._early: set[_Passed] = set()
        self._other_tensors: list[tuple[float, int]] = []
        state = static.state
        for nbytes in (
            *(state.weights, static.gradients, state.optimizer - sum(static.first_update_tensors)),
            *(static.placeholders, static.bucket, static.receives),
            *(static.workspaces / BLAS_THREADS,) * BLAS_THREADS,
        ):
            if nbytes > ROUNDING_BYTES:
                self._new_tensor(nbytes)

        self._first_update_tensors = static.first_update_tensors

    def step(self, moves: Iterable[Move]) -> None:
        """Replay one step."""
        for key in [*self._saved]:
            self._release_tensors(key)
        for move in moves:
            if move.updates:
                self._make_states()
            if move.event is not None:
                self._pass(move.event, move.stage, move.microbatch, move.nbytes)
            elif move.starts:
                self._allocate(move.nbytes)
                if move.workspace_bytes > ROUNDING_BYTES:
                    self._free_tensor(self._new_tensor(move.workspace_bytes))
            else:
                self._free(move.nbytes)
        self._make_states()

    def _make_states(self) -> None:
        """Allocate the states that the first update makes."""
        for nbytes in self._first_update_tensors:
            self._new_tensor(nbytes)
        self._first_update_tensors = ()

    def _pass(self, event: ActivationEvent, stage: int, microbatch: int, moved: float) -> None:
        """Replay an event of a pass that moves ``moved`` bytes; bytes beyond its activations are other tensors."""
        keys = [(stage, microbatch, index) for index in sorted(event.parts)]
        parts = [self._parts[stage][index] for _, _, index in keys]
        replayed = keys if microbatch in self._replayed else []
        match event.effect:
            case "save":
                self._allocate(moved - sum(part.saved_bytes for part in parts))
                self._save(replayed)
            case "begin swap":  # its tensors are allocated with the swap
                self._allocate(moved - swapped_bytes(parts)[0])
            case "swap":
                self._swapped.update(keys)
                self._swap(replayed)
                self._free(moved - swapped_bytes(parts)[1])
            case "release":
                self._release_parts(replayed)
                kept = zip(keys, parts, strict=True)
                moved -= sum(part.held_bytes if key in self._swapped else part.saved_bytes for key, part in kept)
                self._free(moved)
                self._allocate(-moved)  # gradients that the pass leaves

    def _save(self, keys: Iterable[_Passed]) -> None:
        for key in keys:
            if key in self._early:
                self._early.remove(key)
            else:
                self._saved[key] = False
                self._add(key, self._numbers(key).save)

    def _swap(self, keys: Iterable[_Passed]) -> None:
        """Replace the saved tensors of parts by the tensors that their weight gradients need."""
        for key in keys:
            if key in self._saved:
                self._saved[key] = True
                self._add(key, self._numbers(key).gradients)
                self._add(key, self._numbers(key).swap)

    def _release_parts(self, keys: Sequence[_Passed]) -> None:
        for key in reversed(keys):
            self._add(key, self._numbers(key).gradients)
            if key in self._saved:
                self._release_tensors(key)
            else:
                self._early.add(key)

    def _release_tensors(self, key: _Passed) -> None:
        numbers = self._numbers(key)
        self._add(key, numbers.release_held if self._saved.pop(key) else numbers.release_saved)

    def _numbers(self, key: _Passed) -> _NumberedPart:
        """Return the numbers of the requests of a part; equal layers are one."""
        stage, _, index = key
        part = self._parts[stage][index]
        if id(part) not in self._numbered:
            requests, describe = PartRequests(part), self.requests.describe
            self._numbered[id(part)] = _NumberedPart(
                requests.n_slots,
                save=describe(requests.save),
                gradients=describe(requests.gradients),
                swap=describe(requests.swap),
                release_saved=describe(requests.release_saved),
                release_held=describe(requests.release_held),
            )
        return self._numbered[id(part)]

    def _add(self, key: _Passed, number: int) -> None:
        """Let a sequence of a part's requests come, in the part's slots for a micro-batch."""
        if key not in self._first_slots:
            self._first_slots[key] = self.requests.new_slots(self._numbers(key).n_slots)
        self.requests.add(number, self._first_slots[key])

    def _new_tensor(self, nbytes: float) -> int:
        """Allocate a tensor; return its slot."""
        size = rounded(nbytes)
        if size not in self._allocations:
            self._allocations[size] = self.requests.describe(request(size))
        slot = self.requests.new_slots(1)
        self.requests.add(self._allocations[size], slot)
        return slot

    def _free_tensor(self, slot: int) -> None:
        self.requests.add(self._release, slot)

    def _allocate(self, nbytes: float) -> None:
        """Allocate one tensor that is no activation, such as gathered parameters."""
        if nbytes > ROUNDING_BYTES:
            self._other_tensors.append((nbytes, self._new_tensor(nbytes)))

    def _free(self, nbytes: float) -> None:
        """Free ``nbytes`` that are no activation: the youngest tensor of this size, else the youngest smaller ones.

        A part of the youngest tensor is freed for the rest. A step of no length ends before it starts, and frees
        nothing.
        """
        tensors = self._other_tensors
        same_size = [at for at, (size, _) in enumerate(tensors) if abs(size - nbytes) <= ROUNDING_BYTES]
        for at in same_size[-1:] or range(len(tensors) - 1, -1, -1):
            if tensors[at][0] <= nbytes + ROUNDING_BYTES:
                size, slot = tensors.pop(at)
                self._free_tensor(slot)
                nbytes -= size
        if nbytes > ROUNDING_BYTES and tensors:
            size, slot = tensors.pop()
            self._free_tensor(slot)
            self._allocate(size - nbytes)
