"""A step replayed on PyTorch's caching allocator, tensor by tensor: what it reserves beyond what tensors take."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from simulator.analysis.allocator import Block, CachingAllocator, rounded
from simulator.analysis.holdings import Holdings
from simulator.analysis.passes import Turn, turns
from simulator.model import Part
from simulator.timeline import Ints, Timeline

#: Micro-batches that are replayed when a step has more, as a multiple of those in flight: the rest repeats them.
ROUNDS = 2


def cached_bytes(
    timeline: Timeline, spans: Ints, begins: Ints, holdings: Holdings, in_flight: int, limit: float
) -> float:
    """Reserved at most less allocated at most, bytes, as one rank's ``spans`` start (``begins``) and end in this order.

    ``in_flight``: (micro-batch, stage) activations held at most. ``limit``: what CUDA has for the allocator.
    """
    microbatch = timeline.microbatch[spans]
    rounds = ROUNDS * math.ceil(in_flight / max(len(holdings.parts), 1)) + 2
    known = np.unique(microbatch[microbatch >= 0])
    replayed = np.isin(microbatch, np.concatenate((np.array([-1]), known[:rounds], known[rounds:][-2:])))
    spans, begins = spans[replayed], begins[replayed]
    step, turn_of = _Step(CachingAllocator(limit), holdings), turns(timeline, spans.tolist(), holdings.parts)
    for index, start in zip(spans.tolist(), begins.tolist(), strict=True):
        moved = float(timeline.alloc_bytes[index] if start else timeline.free_bytes[index])
        turn = turn_of.get(index)
        if turn is not None and start == (turn == "takes"):
            step.turn(turn, int(timeline.stage[index]), int(timeline.microbatch[index]), moved)
        elif start:
            step.take(moved - (step.more(int(timeline.stage[index])) if turn == "turns" else 0.0))
            if turn is None and int(timeline.stage[index]) not in holdings.parts:
                step.touch((float(timeline.workspace_bytes[index]),))
        else:
            step.give(moved)
    return float(step.allocator.most_reserved - step.allocator.most_allocated)


class _Step:
    """What is alive: tensors of passes by (stage, micro-batch) and part, and blocks of what is no activation."""

    def __init__(self, allocator: CachingAllocator, holdings: Holdings) -> None:
        self.allocator = allocator
        self._parts = holdings.parts
        self._saved: dict[tuple[int, int], list[list[Block]]] = {}
        self._others: list[Block] = []
        state = holdings.state
        for nbytes in (*(state.weights, state.gradients, state.optimizer), *(holdings.placeholders, holdings.bucket)):
            if nbytes:
                allocator.malloc(nbytes)

    def turn(self, turn: Turn, stage: int, microbatch: int, moved: float) -> None:
        """A pass takes, turns or gives back activations; what it moves beside them is something else."""
        parts, key = self._parts[stage], (stage, microbatch)
        if turn == "takes":
            self.take(moved - sum(part.saved_bytes for part in parts))
            self._saved[key] = [self._forward(part) for part in parts]
            return
        alive = self._saved.pop(key, [[] for _ in parts])
        own = sum(block.size for blocks in alive for block in blocks)
        if turn == "turns":
            self._saved[key] = [self._input_gradient(*each) for each in zip(parts, alive, strict=True)]
            kept = sum(block.size for blocks in self._saved[key] for block in blocks)
            self.give(moved - max(own - kept, 0.0))
            return
        for part, blocks in zip(reversed(parts), reversed(alive), strict=True):
            self.touch((*(tensor.nbytes for tensor in part.recomputed), part.grad_bytes))
            self._release(blocks)
        self.give(moved - own)

    def more(self, stage: int) -> float:
        """What an input gradient takes that is among the tensors it leaves: what these are more than those saved."""
        return max(sum(part.held_bytes - part.saved_bytes for part in self._parts[stage]), 0.0)

    def take(self, nbytes: float) -> None:
        """One block of what is no activation, such as gathered parameters."""
        if nbytes > _NOTHING:
            self._others.append(self.allocator.malloc(nbytes))

    def give(self, nbytes: float) -> None:
        """Back again: the youngest blocks of these bytes, one or several."""
        same = [block for block in self._others if block.size == rounded(nbytes)]
        for block in (*same[-1:], *reversed(self._others)) if nbytes > _NOTHING else ():
            if block in self._others and block.size <= nbytes + _NOTHING:
                self._others.remove(block)
                self.allocator.free(block)
                nbytes -= block.size

    def touch(self, sizes: Iterable[float]) -> None:
        """Tensors that live only for a moment, together."""
        self._release([self.allocator.malloc(nbytes) for nbytes in sizes if nbytes])

    def _forward(self, part: Part) -> list[Block]:
        blocks = [self.allocator.malloc(tensor.nbytes) for tensor in part.saved]
        self.touch((part.forward_bytes,))
        return blocks

    def _input_gradient(self, part: Part, blocks: list[Block]) -> list[Block]:
        """Saved tensors make way for what the weight gradient needs."""
        self.touch((*(tensor.nbytes for tensor in part.recomputed), part.grad_bytes))
        kept = [self.allocator.malloc(tensor.nbytes) for tensor in part.held_for_weights]
        self._release(blocks)
        return kept

    def _release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.allocator.free(block)


#: Bytes that are the rounding of sums of tensors, not a tensor.
_NOTHING = 1024 * 1024.0
