"""A step replayed on PyTorch's caching allocator, tensor by tensor: what it reserves beyond what tensors take."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from simulator.analysis.allocator import Block, CachingAllocator
from simulator.analysis.holdings import Holdings
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
    step = _Step(CachingAllocator(limit), holdings)
    microbatch = timeline.microbatch[spans]
    rounds = ROUNDS * math.ceil(in_flight / max(len(holdings.parts), 1)) + 2
    known = np.unique(microbatch[microbatch >= 0])
    replayed = np.isin(microbatch, np.concatenate((np.array([-1]), known[:rounds], known[rounds:][-2:])))
    for index, start in zip(spans[replayed].tolist(), begins[replayed].tolist(), strict=True):
        moved = float(timeline.alloc_bytes[index] if start else timeline.free_bytes[index])
        workspace = float(timeline.workspace_bytes[index]) if start else 0.0
        if moved or workspace:
            key = int(timeline.stage[index]), int(timeline.microbatch[index])
            step.play(str(timeline.phase[index]), *key, bool(start), moved, workspace)
    return float(step.allocator.most_reserved - step.allocator.most_allocated)


class _Step:
    """What is alive: tensors of passes by (stage, micro-batch) and part, and blocks of other steps."""

    def __init__(self, allocator: CachingAllocator, holdings: Holdings) -> None:
        self.allocator = allocator
        self.parts = holdings.parts
        self.saved: dict[tuple[int, int], list[list[Block]]] = {}
        self.others: list[Block] = []
        state = holdings.state
        for nbytes in (
            *(state.weights, state.gradients, state.optimizer),
            *(holdings.placeholders, holdings.bucket),
        ):
            if nbytes:
                allocator.malloc(nbytes)

    def play(self, phase: str, stage: int, microbatch: int, start: bool, moved: float, workspace: float) -> None:
        """One end of a span that moves ``moved`` bytes and, where it starts, needs ``workspace``."""
        parts, key = self.parts.get(stage), (stage, microbatch)
        if parts is None or phase not in ("F", "B", "I", "W"):
            self._other(start, moved, workspace)
        elif phase == "F" and start:
            if moved:
                self.saved[key] = [self._forward(part) for part in parts]
        elif phase == "B" and not start:
            for part, blocks in zip(reversed(parts), reversed(self.saved.pop(key, [[] for _ in parts])), strict=True):
                self._touch((*(tensor.nbytes for tensor in part.recomputed), part.grad_bytes))
                self._release(blocks)
        elif phase == "I" and key in self.saved:
            self.saved[key] = [
                self._input_gradient(part, blocks) for part, blocks in zip(parts, self.saved[key], strict=True)
            ]
        elif phase == "W" and not start:
            for part, blocks in zip(parts, self.saved.pop(key, [[] for _ in parts]), strict=True):
                self._touch((part.weight_grad_bytes,))
                self._release(blocks)

    def _forward(self, part: Part) -> list[Block]:
        blocks = [self.allocator.malloc(tensor.nbytes) for tensor in part.saved]
        self._touch((part.forward_bytes,))
        return blocks

    def _input_gradient(self, part: Part, blocks: list[Block]) -> list[Block]:
        """Saved tensors make way for what the weight gradient needs."""
        self._touch((*(tensor.nbytes for tensor in part.recomputed), part.grad_bytes))
        kept = [self.allocator.malloc(tensor.nbytes) for tensor in part.held_for_weights]
        self._release(blocks)
        return kept

    def _other(self, start: bool, moved: float, workspace: float) -> None:
        """A step that is no pass: its bytes as one block, given back oldest first."""
        self._touch((workspace,))
        if start and moved:
            self.others.append(self.allocator.malloc(moved))
        while not start and self.others and moved > 0:
            moved -= self.others[0].size
            self._release([self.others.pop(0)])

    def _touch(self, sizes: Iterable[float]) -> None:
        """Tensors that live only for a moment, together."""
        self._release([self.allocator.malloc(nbytes) for nbytes in sizes if nbytes])

    def _release(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.allocator.free(block)
