"""A step replayed on PyTorch's caching allocator, tensor by tensor: what it reserves beyond what tensors take."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

import numpy as np

from simulator.analysis.training.activation_lifetimes import Turning, among, turns
from simulator.analysis.training.caching_allocator import Block, CachingAllocator
from simulator.analysis.training.static_memory import BLAS_THREADS, Holdings
from simulator.models import Part, swapped_bytes
from simulator.timeline import Ints, Timeline

#: Micro-batches whose tensors are replayed when a step has more, as a multiple of those in flight: others repeat them.
ROUNDS = 2
#: And the last ones.
LAST = 2


def first_replayed(in_flight: int, chunks: int) -> int:
    """Of the first micro-batches so many are replayed: of ``in_flight`` (micro-batch, stage) activations held at most,
    of so many stages."""
    return ROUNDS * math.ceil(in_flight / chunks) + 2


def enough(in_flight: int, chunks: int) -> int:
    """Micro-batches of a step that is replayed as one with more: the first ones are gone before the last ones come."""
    return first_replayed(in_flight, chunks) + math.ceil(in_flight / chunks) + LAST


def cached_bytes(
    timeline: Timeline, spans: Ints, begins: Ints, holdings: Holdings, in_flight: int, limit: float
) -> float:
    """Reserved at most less allocated at most, bytes, as one rank's ``spans`` start (``begins``) and end in this order.

    ``in_flight``: (micro-batch, stage) activations held at most. ``limit``: what CUDA has for the allocator.
    """
    microbatch = timeline.microbatch[spans]
    known, first = np.unique(microbatch[microbatch >= 0]), first_replayed(in_flight, max(len(holdings.parts), 1))
    chosen = {*known[:first].tolist(), *known[first:][-LAST:].tolist()}
    step, turn_of = _Step(CachingAllocator(limit), holdings, chosen), turns(timeline, spans, holdings)
    moves = np.where(begins, timeline.alloc_bytes[spans], timeline.free_bytes[spans])
    stage, workspace = timeline.stage[spans], timeline.workspace_bytes[spans]
    touches = np.where(begins & ~np.isin(stage, list(holdings.parts)), workspace, 0.0)
    some = (moves != 0) | (touches != 0) | among(turn_of, spans, begins)
    columns = [column[some].tolist() for column in (spans, begins, stage, microbatch, moves, touches)]
    for index, start, of_stage, of_microbatch, moved, touched in zip(*columns, strict=True):
        turn = turn_of.get((index, start))
        if turn is not None:
            step.turn(turn, of_stage, of_microbatch, moved)
        elif start:
            step.take(moved)
            step.touch((touched,))
        else:
            step.give(moved)
    return float(step.allocator.most_reserved - step.allocator.most_allocated)


class _Step:
    """What is alive: blocks of passes by (stage, micro-batch) and part, and (bytes, block) of whatever else."""

    def __init__(self, allocator: CachingAllocator, holdings: Holdings, replayed: Container[int]) -> None:
        self.allocator = allocator
        self._parts = holdings.parts
        self._replayed = replayed
        #: By stage, micro-batch and index of a part.
        self._saved: dict[tuple[int, int, int], dict[str, Block]] = {}
        self._turned: set[tuple[int, int, int]] = set()
        self._others: list[tuple[float, Block]] = []
        state = holdings.state
        for nbytes in (
            *(state.weights, holdings.gradients, state.optimizer),
            *(holdings.placeholders, holdings.bucket, holdings.receives),
            *(holdings.workspaces / BLAS_THREADS,) * BLAS_THREADS,
        ):
            if nbytes:
                allocator.malloc(nbytes)

    def turn(self, turning: Turning, stage: int, microbatch: int, moved: float) -> None:
        """A pass takes, turns or gives back activations; what it moves beside them is something else."""
        turn, of = turning
        parts = {(stage, microbatch, index): self._parts[stage][index] for index in sorted(of)}
        made, gone = swapped_bytes(tuple(parts.values()))
        replayed = parts if microbatch in self._replayed else {}
        if turn == "takes":
            self.take(moved - sum(part.saved_bytes for part in parts.values()))
            for key, part in replayed.items():
                self._saved[key] = self._forward(part)
            return
        if turn == "begins":  # what it makes comes with the tensors it leaves
            self.take(moved - made)
            return
        if turn == "turns":
            self._turned |= parts.keys()
            for key, part in replayed.items():
                self._saved[key] = self._input_gradient(part, self._saved[key])
            self.give(moved - gone)
            return
        for key, part in reversed(replayed.items()):
            self.touch((*(tensor.nbytes for tensor in part.recomputed), part.grad_bytes))
            self._release(self._saved.pop(key).values())
        moved -= sum(part.held_bytes if key in self._turned else part.saved_bytes for key, part in parts.items())
        self.give(moved)
        self.take(-moved)  # gradients that it leaves

    def take(self, nbytes: float) -> None:
        """One block of what is no activation, such as gathered parameters."""
        if nbytes > _DUST:
            self._others.append((nbytes, self.allocator.malloc(nbytes)))

    def give(self, nbytes: float) -> None:
        """Back again: the youngest block of these bytes, or else the youngest that they cover, and a part of the
        youngest for the rest (of a step of no length, which ends before it starts, nothing)."""
        same = [at for at, (size, _) in enumerate(self._others) if abs(size - nbytes) <= _DUST]
        for at in same[-1:] or range(len(self._others) - 1, -1, -1):
            if self._others[at][0] <= nbytes + _DUST:
                size, block = self._others.pop(at)
                self.allocator.free(block)
                nbytes -= size
        if nbytes > _DUST and self._others:
            size, block = self._others.pop()
            self.allocator.free(block)
            self.take(size - nbytes)

    def touch(self, sizes: Iterable[float]) -> None:
        """Tensors that live only for a moment, together."""
        self._release([self.allocator.malloc(nbytes) for nbytes in sizes if nbytes])

    def _forward(self, part: Part) -> dict[str, Block]:
        blocks = {tensor.name: self.allocator.malloc(tensor.nbytes) for tensor in part.saved}
        self.touch((part.forward_bytes,))
        return blocks

    def _input_gradient(self, part: Part, blocks: dict[str, Block]) -> dict[str, Block]:
        """Saved tensors that the weight gradient does not need make way for what it needs beside them."""
        self.touch((*(tensor.nbytes for tensor in part.recomputed), part.grad_bytes))
        kept = {
            tensor.name: blocks.get(tensor.name) or self.allocator.malloc(tensor.nbytes)
            for tensor in part.held_for_weights
        }
        self._release(block for name, block in blocks.items() if name not in kept)
        return kept

    def _release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.allocator.free(block)


#: Bytes that are the rounding of a sum, not a tensor.
_DUST = 1.0
