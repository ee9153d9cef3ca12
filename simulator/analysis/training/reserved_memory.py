"""Reserved memory: a step replayed on PyTorch's caching allocator, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from simulator.analysis.training.activation_lifetimes import ActivationEvent, ActivationEvents, have_events
from simulator.analysis.training.caching_allocator import rounded
from simulator.analysis.training.memory_requests import MemoryRequests
from simulator.analysis.training.part_requests import ROUNDING_BYTES, PartRequests, request
from simulator.analysis.training.static_memory import BLAS_THREADS, StaticMemory
from simulator.arrays import Ints
from simulator.models import Part, swapped_bytes
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


@dataclass(frozen=True)
class _StageParts:
    """The parts of a stage with their requests, and where the slots of each begin, of ``n_slots`` for a micro-batch."""

    parts: tuple[Part, ...]
    requests: tuple[PartRequests, ...]
    first_slots: tuple[int, ...]
    n_slots: int


#: Requests of a part of a stage, by name as in `PartRequests`; parts are indices in the stage.
_PartRequest = tuple[int, str]


@dataclass(frozen=True)
class _Kept:
    """What is kept of a stage for a micro-batch; parts are indices in the stage.

    ``saved``: parts with tensors, and whether these are what their weight gradients need. ``swapped``: parts that have
    exchanged their tensors for these. ``early``: parts that are released before they are saved, as a pass of no length
    ends before it starts. They hold nothing.
    """

    saved: tuple[tuple[int, bool], ...] = ()
    swapped: frozenset[int] = frozenset()
    early: frozenset[int] = frozenset()


class _Change(NamedTuple):
    """What an event of a pass does: what is kept ``after`` it, the sequence of requests, if any, and its bytes.

    ``nbytes``: of activations, as the pass moves them.
    """

    after: _Kept
    requests: int | None
    nbytes: float


class _StepReplay:
    """Tensors alive during a step: those of passes, and (bytes, slot) of all others, such as gathered parameters.

    The requests of all parts of a pass are one sequence, described once for all micro-batches that it finds alike.
    """

    def __init__(self, static: StaticMemory, replayed: Container[int]) -> None:
        self.requests = MemoryRequests()
        self._stages = {stage: _stage_parts(parts) for stage, parts in static.parts.items()}
        self._replayed = replayed
        #: Rounded bytes of a tensor alone -> number of its request.
        self._allocations: dict[int, int] = {}
        self._release = self.requests.describe(request(0))
        #: Stage and requests of its parts in order -> their number as a sequence.
        self._sequences: dict[tuple[int, tuple[_PartRequest, ...]], int] = {}
        #: Stage and micro-batch -> their first slot, and what is kept of them.
        self._first_slots: dict[tuple[int, int], int] = {}
        self._kept: dict[tuple[int, int], _Kept] = {}
        #: Each `_Kept` so far, and what events do to it, by its identity.
        self._states: dict[_Kept, _Kept] = {}
        self._changes: dict[tuple[int, int, ActivationEvent | None, bool], _Change] = {}
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
        for stage, microbatch in self._kept:
            self._change(stage, microbatch, None)
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
        nbytes = self._change(stage, microbatch, event)
        match event.effect:
            case "save" | "begin swap":  # tensors of a swap are allocated when it begins
                self._allocate(moved - nbytes)
            case "swap":
                self._free(moved - nbytes)
            case "release":
                self._free(moved - nbytes)
                self._allocate(nbytes - moved)  # gradients that the pass leaves

    def _change(self, stage: int, microbatch: int, event: ActivationEvent | None) -> float:
        """Change what is kept of a stage for a micro-batch, by an event or at the end of a step; return its bytes."""
        place = stage, microbatch
        if place not in self._kept:
            self._first_slots[place] = self.requests.new_slots(self._stages[stage].n_slots)
            self._kept[place] = self._states.setdefault(_Kept(), _Kept())
        before, replayed = self._kept[place], microbatch in self._replayed
        key = stage, id(before), event, replayed
        change = self._changes.get(key)
        if change is None:
            change = self._changes[key] = self._changed(stage, before, event, replayed)
        self._kept[place] = change.after
        if change.requests is not None:
            self.requests.add(change.requests, self._first_slots[place])
        return change.nbytes

    def _changed(self, stage: int, before: _Kept, event: ActivationEvent | None, replayed: bool) -> _Change:
        """Work out what an event does, or the end of a step: tensors that are left are released."""
        saved, swapped, early = dict(before.saved), set(before.swapped), set(before.early)
        requests: list[_PartRequest] = []
        nbytes = 0.0
        if event is None:
            requests = [_released(saved, index) for index in [*saved]]
        else:
            indices = sorted(event.parts)
            parts = [self._stages[stage].parts[index] for index in indices]
            match event.effect:
                case "save":
                    nbytes = sum([part.saved_bytes for part in parts])
                    requests = _saves(saved, early, indices if replayed else ())
                case "begin swap":
                    nbytes = swapped_bytes(parts)[0]
                case "swap":
                    nbytes = swapped_bytes(parts)[1]
                    swapped.update(indices)
                    requests = _swaps(saved, indices if replayed else ())
                case "release":
                    kept = zip(indices, parts, strict=True)
                    nbytes = sum([part.held_bytes if at in swapped else part.saved_bytes for at, part in kept])
                    requests = _releases(saved, early, indices if replayed else ())
        after = _Kept(tuple(saved.items()), frozenset(swapped), frozenset(early))
        return _Change(self._states.setdefault(after, after), self._sequence(stage, requests), nbytes)

    def _sequence(self, stage: int, requests: Sequence[_PartRequest]) -> int | None:
        """Return the number of the sequence of ``requests`` of parts of a stage, in slots that count from 0."""
        key = stage, tuple(requests)
        if requests and key not in self._sequences:
            here = self._stages[stage]
            each = [getattr(here.requests[at], name) + np.array([here.first_slots[at], 0]) for at, name in requests]
            self._sequences[key] = self.requests.describe(np.concatenate(each))
        return self._sequences.get(key)

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


def _stage_parts(parts: tuple[Part, ...]) -> _StageParts:
    """Return the parts of a stage with their requests; equal layers share theirs."""
    requests = {id(part): PartRequests(part) for part in parts}
    first_slots = list(accumulate((requests[id(part)].n_slots for part in parts), initial=0))
    return _StageParts(parts, tuple([requests[id(part)] for part in parts]), tuple(first_slots[:-1]), first_slots[-1])


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
