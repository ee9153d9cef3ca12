"""Activations that wait for their backward pass outside the GPU: passes cut by layer, and the copies between them.

What a layer saves goes out once its forward pass has ended, and comes back while the entry before its backward pass
computes. A layer's forward pass waits until all but the last layer's have gone: no more than two are on their way out
(Transformer Engine's double-buffered ``cpu_offload``, torch's ``save_on_cpu``).
"""

from __future__ import annotations

from dataclasses import replace

from simulator.lowering.block_cuts import BlockCuts
from simulator.lowering.host_copies import host_copy
from simulator.lowering.lanes import Lanes, with_steps
from simulator.lowering.rank_context import RankContext
from simulator.lowering.stages import Stages
from simulator.models import pass_bytes
from simulator.program import COMPUTE_LANE, Block, HostKind, Step, StepPhase
from simulator.schedules import Action

#: Phases of passes that have, or make, what layers save.
_PHASES = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.INPUT_GRADIENT)


def offload_activations(lanes: Lanes, context: RankContext) -> Lanes:
    """Keep what layers save on the host, or on drives, until their backward pass."""
    place = context.parallelism.offload.activations
    if place == "none":
        return lanes
    copier = _Copier(place, context.stages)
    passes: list[Step] = []
    for step in lanes[COMPUTE_LANE]:
        if not isinstance(step.op, Block) or step.phase not in _PHASES:
            copier.compute.append(step)
            continue
        passes.append(step)
        if step.label == copier.label_of(step):
            copier.run(passes)
            passes = []
    return with_steps(lanes, copier.compute, copier.copies)


class _Copier:
    """Goes through a rank's passes in order."""

    def __init__(self, place: str, stages: Stages) -> None:
        self.compute: list[Step] = []
        self.copies: list[Step] = []
        self._place, self._stages = place, stages
        self._saves: list[str] = []
        self._saved: dict[tuple[int, int, int], str] = {}  # (stage, micro-batch, part) -> the step that saved it
        self._cuts = BlockCuts()

    @staticmethod
    def label_of(step: Step) -> str:
        """Return the label of the last piece of a pass."""
        return str(Action(step.stage, step.phase, step.microbatch))

    def run(self, pieces: list[Step]) -> None:
        """Add the ``pieces`` of one pass, cut further where its layers begin and end, and their copies."""
        first = pieces[0]
        parts = self._stages.variants.parts[first.stage]
        order = [(piece.main, len(piece.block.ops)) for piece in self._stages.by_part(first)]
        # Each layer takes and gives back its own share of the bytes of the pass.
        layers = {index: pass_bytes((parts[index],), first.phase) for index, _ in order if parts[index].is_unit}
        whole, beside_layers = pass_bytes(parts, first.phase), [part for part in parts if not part.is_unit]
        alloc, free = -whole.alloc, -whole.free
        if beside_layers:
            kept = pass_bytes(beside_layers, first.phase)
            alloc, free = alloc + kept.alloc, free + kept.free
        pieces[0] = replace(first, alloc_bytes=first.alloc_bytes + alloc)
        pieces[-1] = replace(pieces[-1], free_bytes=pieces[-1].free_bytes + free)
        left = list(pieces)
        for index, length in order:
            run = self._take(left, length)
            if index in layers:
                moved, saved = layers[index], parts[index].saved_bytes
                run[0] = replace(run[0], alloc_bytes=run[0].alloc_bytes + moved.alloc)
                run[-1] = replace(run[-1], free_bytes=run[-1].free_bytes + moved.free)
                run = self._out(run, index, saved) if first.phase == "F" else self._back(run, index, saved)
            self.compute += run

    def _take(self, left: list[Step], length: int) -> list[Step]:
        """Remove the next ``length`` ops from the pieces ``left``, and return them as steps."""
        steps: list[Step] = []
        while length:
            piece = left.pop(0)
            assert isinstance(piece.op, Block)
            if len(piece.op.ops) <= length:
                steps.append(piece)
                length -= len(piece.op.ops)
                continue
            label = f"{piece.label}/{len(piece.op.ops)}"
            head, tail = self._cuts.part(piece.op, 0, length), self._cuts.part(piece.op, length, len(piece.op.ops))
            steps.append(replace(piece, label=label, op=head, free_bytes=0.0))
            left.insert(0, replace(piece, op=tail, after=(), alloc_bytes=0.0))
            length = 0
        return steps

    def _out(self, run: list[Step], part: int, nbytes: float) -> list[Step]:
        """Return the forward pass of a layer, and add the copies that take its tensors out after it."""
        first, last = run[0], run[-1]
        waits = tuple(self._saves[-2:-1])
        run[0] = replace(first, after=(*first.after, *waits))
        steps = [self._copy(f"save {last.label}", HostKind.TO_HOST, nbytes, (last.label,), last)]
        if self._place == "nvme":
            steps.append(self._copy(f"write {last.label}", HostKind.TO_NVME, nbytes, (steps[0].label,), last))
        steps[0] = replace(steps[0], free_bytes=nbytes)
        self.copies += steps
        self._saves.append(steps[0].label)
        self._saved[first.stage, first.microbatch, part] = steps[-1].label
        return run

    def _back(self, run: list[Step], part: int, nbytes: float) -> list[Step]:
        """Return the backward pass of a layer, and add the copies that bring its tensors back before it."""
        first, last = run[0], run[-1]
        after = [self._saved[first.stage, first.microbatch, part]]
        if len(self.compute) > 1:
            after.append(self.compute[-2].label)
        steps = []
        if self._place == "nvme":
            steps.append(self._copy(f"read {last.label}", HostKind.FROM_NVME, nbytes, tuple(after), first))
            after = [steps[0].label]
        steps.append(self._copy(f"load {last.label}", HostKind.FROM_HOST, nbytes, tuple(after), first))
        steps[-1] = replace(steps[-1], alloc_bytes=nbytes)
        self.copies += steps
        run[0] = replace(first, after=(*first.after, steps[-1].label))
        return run

    @staticmethod
    def _copy(label: str, op: HostKind, nbytes: float, after: tuple[str, ...], like: Step) -> Step:
        comm = host_copy(f"activations {op.replace('_', ' ')}", op, nbytes, "activations")
        return Step(label, comm, after, microbatch=like.microbatch, stage=like.stage)
