"""Reserved memory: a step replayed on PyTorch's caching allocator, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class _Passed:
    """What is kept of a stage for a micro-batch, whose slots begin at ``first_slot``; parts are indices in the stage.

    ``saved``: part with tensors -> whether these are what its weight gradient needs. ``swapped``: parts that have
    exchanged their tensors for these. ``early``: parts that are released before they are saved, as a pass of no length
    ends before it starts. They hold nothing.
    """

    first_slot: int
    saved: dict[int, bool] = field(default_factory=dict)
    swapped: set[int] = field(default_factory=set)
    early: set[int] = field(default_factory=set)


#: Requests of a part, by name as in `PartRequests`.
_PartRequest = tuple[int, str]


class _StepReplay:
    """Tensors alive during a step: those of passes, and (bytes, slot) of all others, such as gathered parameters.

    The requests of all parts of a pass are one sequence, described once for all micro-batches.
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
        #: Stage and micro-batch -> what is kept of it.
        self._passed: dict[tuple[int, int], _Passed] = {}
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
        for (stage, _), passed in self._passed.items():
            self._add(stage, passed, [_released(passed, index) for index in [*passed.saved]])
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
        if (stage, microbatch) not in self._passed:
            self._passed[stage, microbatch] = _Passed(self.requests.new_slots(self._stages[stage].n_slots))
        passed, all_parts = self._passed[stage, microbatch], self._stages[stage].parts
        indices = sorted(event.parts)
        parts = [all_parts[index] for index in indices]
        replayed = indices if microbatch in self._replayed else []
        match event.effect:
            case "save":
                self._allocate(moved - sum([part.saved_bytes for part in parts]))
                self._add(stage, passed, _saves(passed, replayed))
            case "begin swap":  # its tensors are allocated with the swap
                self._allocate(moved - swapped_bytes(parts)[0])
            case "swap":
                passed.swapped.update(indices)
                self._add(stage, passed, _swaps(passed, replayed))
                self._free(moved - swapped_bytes(parts)[1])
            case "release":
                self._add(stage, passed, _releases(passed, replayed))
                kept = zip(indices, parts, strict=True)
                moved -= sum([part.held_bytes if at in passed.swapped else part.saved_bytes for at, part in kept])
                self._free(moved)
                self._allocate(-moved)  # gradients that the pass leaves

    def _add(self, stage: int, passed: _Passed, of_parts: Sequence[_PartRequest]) -> None:
        """Let requests of parts of a stage come one after another, in their slots for a micro-batch."""
        if not of_parts:
            return
        key = stage, tuple(of_parts)
        number = self._sequences.get(key)
        if number is None:
            here = self._stages[stage]
            each = [getattr(here.requests[at], name) + np.array([here.first_slots[at], 0]) for at, name in of_parts]
            number = self._sequences[key] = self.requests.describe(np.concatenate(each))
        self.requests.add(number, passed.first_slot)

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


def _saves(passed: _Passed, indices: Iterable[int]) -> list[_PartRequest]:
    """Save the tensors of parts, but of those that were released early; return their requests."""
    saved = [index for index in indices if index not in passed.early]
    passed.early.difference_update(indices)
    passed.saved.update(dict.fromkeys(saved, False))
    return [(index, "save") for index in saved]


def _swaps(passed: _Passed, indices: Iterable[int]) -> list[_PartRequest]:
    """Replace the saved tensors of parts by the tensors that their weight gradients need; return their requests."""
    swapped = [index for index in indices if index in passed.saved]
    passed.saved.update(dict.fromkeys(swapped, True))
    return [(index, name) for index in swapped for name in ("gradients", "swap")]


def _releases(passed: _Passed, indices: Sequence[int]) -> list[_PartRequest]:
    """Release what is kept of parts at the end of their backward passes; return their requests."""
    requests: list[_PartRequest] = []
    for index in reversed(indices):
        requests.append((index, "gradients"))
        if index in passed.saved:
            requests.append(_released(passed, index))
        else:
            passed.early.add(index)
    return requests


def _released(passed: _Passed, index: int) -> _PartRequest:
    """Forget the tensors of a part; return the request that frees them."""
    return index, "release_held" if passed.saved.pop(index) else "release_saved"
