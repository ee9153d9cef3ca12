"""Reserved memory: a step replayed on PyTorch's caching allocator, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable
from typing import NamedTuple

import numpy as np

from simulator.analysis.time.memory_curve import MemoryHistory
from simulator.analysis.training.activation_lifetimes import ActivationEvent, ActivationEvents
from simulator.analysis.training.caching_allocator import rounded
from simulator.analysis.training.memory_requests import MemoryRequests
from simulator.analysis.training.part_requests import ROUNDING_BYTES
from simulator.analysis.training.replayed_stages import KeptParts, ReplayedStages
from simulator.analysis.training.static_memory import BLAS_THREADS, StaticMemory
from simulator.arrays import distinct, is_any
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
        self._stages = ReplayedStages()

    def cached_bytes(
        self,
        timeline: Timeline,
        curve: MemoryHistory,
        events: ActivationEvents,
        static: StaticMemory,
        in_flight: int,
        limit: float,
    ) -> float:
        """Return the most bytes reserved less the most allocated by one rank.

        ``events``: the `activation_events` of its ``curve``. ``in_flight``: most (micro-batch, stage) activations held
        at once. ``limit``: bytes that CUDA has for the allocator.
        """
        spans, begins = curve.span, curve.begins
        microbatch = timeline.microbatch[spans]
        numbers, first = distinct(microbatch[microbatch >= 0]), first_replayed(in_flight, max(len(static.parts), 1))
        chosen = frozenset((*numbers[:first].tolist(), *numbers[first:][-LAST:].tolist()))
        nbytes = np.where(begins, timeline.alloc_bytes[spans], timeline.free_bytes[spans])
        stage, workspace = timeline.stage[spans], timeline.workspace_bytes[spans]
        workspaces = np.where(begins & ~is_any(stage, static.parts), workspace, 0.0)
        counts = np.flatnonzero((nbytes != 0) | (workspaces != 0) | events.are_there)
        updates = timeline.phase[spans] == "O"
        columns = [column[counts] for column in (begins, stage, microbatch, nbytes, workspaces, updates)]
        key = id(static), limit, chosen, events.kinds, *[one.tobytes() for one in (*columns, events.place[counts])]
        if key not in self._replayed:
            self._static.append(static)
            moves = tuple(map(Move, *[column.tolist() for column in columns], events.at(counts)))
            most = step_requests(moves, static, chosen, self._stages).most_bytes(limit, compiled=self._compiled)
            self._replayed[key] = float(most.reserved - most.allocated)
        return self._replayed[key]


def step_requests(
    moves: Iterable[Move], static: StaticMemory, replayed: Container[int], stages: ReplayedStages
) -> MemoryRequests:
    """Return the requests of a rank before and in `STEPS` steps of ``moves``.

    Of passes they are those for tensors of the micro-batches that are ``replayed``. ``stages``: of all ranks of a job.
    """
    replay = _StepReplay(static, replayed, stages)
    for _ in range(STEPS):
        replay.step(moves)
    return replay.requests


class _StepReplay:
    """Tensors alive during a step: those of passes, and (bytes, slot) of all others, such as gathered parameters.

    ``stages``: of all ranks of a job.
    """

    def __init__(self, static: StaticMemory, replayed: Container[int], stages: ReplayedStages) -> None:
        self.requests = MemoryRequests(stages.sequences)
        self._stages = {stage: stages.stage_with(parts) for stage, parts in static.parts.items()}
        self._replayed = replayed
        self._alone = stages.alone
        #: Stage and micro-batch -> their first slot, and what is kept of them.
        self._first_slots: dict[tuple[int, int], int] = {}
        self._kept: dict[tuple[int, int], KeptParts] = {}
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
        beyond = moved - self._change(stage, microbatch, event)
        if abs(beyond) <= ROUNDING_BYTES:
            return
        match event.effect:
            case "save" | "begin swap":  # a swap, whose tensors count from here on, requests them at its end
                self._allocate(beyond)
            case "swap":
                self._free(beyond)
            case "release":
                self._free(beyond)
                self._allocate(-beyond)  # gradients that the pass leaves

    def _change(self, stage: int, microbatch: int, event: ActivationEvent | None) -> float:
        """Change what is kept of a stage for a micro-batch, by an event or at the end of a step; return its bytes."""
        place, here = (stage, microbatch), self._stages[stage]
        kept = self._kept.get(place)
        if kept is None:
            kept = here.nothing
            self._first_slots[place] = self.requests.new_slots(here.n_slots)
        change = here.change(kept, event, microbatch in self._replayed)
        self._kept[place] = change.after
        if change.requests is not None:
            self.requests.add(change.requests, self._first_slots[place])
        return change.nbytes

    def _new_tensor(self, nbytes: float) -> int:
        """Allocate a tensor; return its slot."""
        slot = self.requests.new_slots(1)
        self.requests.add(self._alone(rounded(nbytes)), slot)
        return slot

    def _free_tensor(self, slot: int) -> None:
        self.requests.add(self._alone(0), slot)

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
