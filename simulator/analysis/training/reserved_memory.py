"""Reserved memory: a step replayed on PyTorch's caching allocator, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable
from typing import NamedTuple

import numpy as np

from simulator.analysis.training.activation_lifetimes import ActivationEvent, ActivationEvents, have_events
from simulator.analysis.training.caching_allocator import CachedBlock, CachingAllocator
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
#: Bytes that are the rounding of a sum, not a tensor.
_ROUNDING_BYTES = 1.0


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
    """Memory that the allocator keeps of ranks; those that do the same in the same order are replayed once."""

    def __init__(self) -> None:
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
            self._replayed[key] = _replayed_bytes(moves, static, chosen, limit)
        return self._replayed[key]


def _replayed_bytes(moves: Iterable[Move], static: StaticMemory, replayed: Container[int], limit: float) -> float:
    """Return the most bytes reserved less the most allocated, of the micro-batches that are ``replayed``."""
    replay = _AllocatorReplay(CachingAllocator(limit), static, replayed)
    for _ in range(STEPS):
        replay.step(moves)
    return float(replay.allocator.most_reserved - replay.allocator.most_allocated)


class _AllocatorReplay:
    """Blocks alive during a step: tensors of passes, and (bytes, block) of all others, such as gathered parameters."""

    def __init__(self, allocator: CachingAllocator, static: StaticMemory, replayed: Container[int]) -> None:
        self.allocator = allocator
        self._parts = static.parts
        self._replayed = replayed
        #: (stage, micro-batch, index of a part) -> name of a tensor -> block.
        self._saved: dict[tuple[int, int, int], dict[str, CachedBlock]] = {}
        self._swapped: set[tuple[int, int, int]] = set()
        #: Parts that are released before they are saved: a pass of no length ends before it starts. They hold nothing.
        self._early: set[tuple[int, int, int]] = set()
        self._other_blocks: list[tuple[float, CachedBlock]] = []
        state = static.state
        for nbytes in (
            *(state.weights, static.gradients, state.optimizer - sum(static.first_update_tensors)),
            *(static.placeholders, static.bucket, static.receives),
            *(static.workspaces / BLAS_THREADS,) * BLAS_THREADS,
        ):
            if nbytes > _ROUNDING_BYTES:
                allocator.malloc(nbytes)

        self._first_update_tensors = static.first_update_tensors

    def step(self, moves: Iterable[Move]) -> None:
        """Replay one step."""
        for blocks in self._saved.values():
            self._release(blocks.values())
        self._saved.clear()
        for move in moves:
            if move.updates:
                self._make_states()
            if move.event is not None:
                self.activations(move.event, move.stage, move.microbatch, move.nbytes)
            elif move.starts:
                self.allocate(move.nbytes)
                self.touch((move.workspace_bytes,))
            else:
                self.free(move.nbytes)
        self._make_states()

    def _make_states(self) -> None:
        """Allocate the states that the first update makes."""
        for nbytes in self._first_update_tensors:
            self.allocator.malloc(nbytes)
        self._first_update_tensors = ()

    def activations(self, event: ActivationEvent, stage: int, microbatch: int, moved: float) -> None:
        """Replay an event of a pass that moves ``moved`` bytes; bytes beyond its activations are other blocks."""
        parts = {(stage, microbatch, index): self._parts[stage][index] for index in sorted(event.parts)}
        replayed = parts if microbatch in self._replayed else {}
        if event.effect == "save":
            self.allocate(moved - sum(part.saved_bytes for part in parts.values()))
            for key, part in replayed.items():
                if key in self._early:
                    self._early.remove(key)
                else:
                    self._saved[key] = self._forward(part)
            return
        allocated, freed = swapped_bytes(tuple(parts.values())) if "swap" in event.effect else (0.0, 0.0)
        if event.effect == "begin swap":  # its tensors are allocated with the swap
            self.allocate(moved - allocated)
            return
        if event.effect == "swap":
            self._swapped |= parts.keys()
            for key, part in replayed.items():
                if key in self._saved:
                    self._saved[key] = self._input_gradient(part, self._saved[key])
            self.free(moved - freed)
            return
        for key, part in reversed(replayed.items()):
            self.touch((*(tensor.nbytes for tensor in part.recomputed), part.grad_bytes))
            if key not in self._saved:
                self._early.add(key)
            self._release(self._saved.pop(key, {}).values())
        moved -= sum(part.held_bytes if key in self._swapped else part.saved_bytes for key, part in parts.items())
        self.free(moved)
        self.allocate(-moved)  # gradients that the pass leaves

    def allocate(self, nbytes: float) -> None:
        """Allocate one block that is no activation, such as gathered parameters."""
        if nbytes > _ROUNDING_BYTES:
            self._other_blocks.append((nbytes, self.allocator.malloc(nbytes)))

    def free(self, nbytes: float) -> None:
        """Free ``nbytes`` that are no activation: the youngest block of this size, else the youngest smaller ones.

        A part of the youngest block is freed for the rest. A step of no length ends before it starts, and frees
        nothing.
        """
        same_size = [at for at, (size, _) in enumerate(self._other_blocks) if abs(size - nbytes) <= _ROUNDING_BYTES]
        for at in same_size[-1:] or range(len(self._other_blocks) - 1, -1, -1):
            if self._other_blocks[at][0] <= nbytes + _ROUNDING_BYTES:
                size, block = self._other_blocks.pop(at)
                self.allocator.free(block)
                nbytes -= size
        if nbytes > _ROUNDING_BYTES and self._other_blocks:
            size, block = self._other_blocks.pop()
            self.allocator.free(block)
            self.allocate(size - nbytes)

    def touch(self, sizes: Iterable[float]) -> None:
        """Allocate tensors together and free them at once."""
        self._release([self.allocator.malloc(nbytes) for nbytes in sizes if nbytes > _ROUNDING_BYTES])

    def _forward(self, part: Part) -> dict[str, CachedBlock]:
        blocks = {tensor.name: self.allocator.malloc(tensor.nbytes) for tensor in part.saved}
        self.touch((part.forward_bytes,))
        return blocks

    def _input_gradient(self, part: Part, blocks: dict[str, CachedBlock]) -> dict[str, CachedBlock]:
        """Replace the saved tensors of a part by the tensors that its weight gradient needs."""
        self.touch((*(tensor.nbytes for tensor in part.recomputed), part.grad_bytes))
        swapped = {
            tensor.name: blocks.get(tensor.name) or self.allocator.malloc(tensor.nbytes)
            for tensor in part.held_for_weights
        }
        self._release(block for name, block in blocks.items() if name not in swapped)
        return swapped

    def _release(self, blocks: Iterable[CachedBlock]) -> None:
        for block in blocks:
            self.allocator.free(block)
