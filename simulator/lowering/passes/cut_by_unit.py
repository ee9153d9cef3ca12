"""ZeRO-3: passes are cut into pieces, one for each layer and for each other part of a stage.

Every piece takes and gives back what its parts save, and takes the gradients that it makes. The copies that plain
PyTorch makes around gathers are part of a pass (`fsdp_copies`). A layer's are a step of their own: its gather goes on
beside the piece before, and waits for the copies of that alone (``FSDPParamGroup.wait_for_unshard``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.lowering.buckets import pieces
from simulator.lowering.fsdp_copies import copies_before
from simulator.lowering.lanes import Lanes, with_steps
from simulator.lowering.rank_context import RankContext
from simulator.lowering.sharded_units import COPIES, Units, is_pass, sharded_units
from simulator.lowering.sharding import keeps_bytes_by_part, whole_gradient_bytes
from simulator.lowering.stages import PassPiece
from simulator.models import Op, Part, pass_bytes, weights_of
from simulator.program import COMPUTE_LANE, MAKE_GRADIENTS, Block, Step, StepPhase
from simulator.units import DTYPE_BYTES


class NewGradients(NamedTuple):
    """Bytes of the gradients that a piece makes, and by which gradients that wait for their reduction grow.

    Gradients of a later micro-batch are added to those that wait, which do not grow.
    """

    nbytes: float
    growth: float

    @property
    def more_bytes(self) -> float:
        """Bytes that the piece takes at its end, as gradients wait in a wider type than they are made in."""
        return max(self.growth - self.nbytes, 0.0)

    @property
    def fewer_bytes(self) -> float:
        """Bytes that the piece gives back at its end, as its gradients were added to those that wait."""
        return max(self.nbytes - self.growth, 0.0)


def cut_by_unit(lanes: Lanes, context: RankContext) -> Lanes:
    """Cut the passes of a rank whose weights are gathered unit by unit."""
    units = sharded_units(context)
    if units is None:
        return lanes
    cutter = _Cutter(context, units)
    return with_steps(lanes, [piece for step in lanes[COMPUTE_LANE] for piece in cutter.cut(step)])


class _Cutter:
    """Cuts passes; pieces that do the same share their blocks."""

    def __init__(self, context: RankContext, units: Units) -> None:
        self._context, self._units = context, units
        self._by_part = keeps_bytes_by_part(context.workload, context.weights)
        self._halves: dict[int, tuple[Block, Block]] = {}

    def cut(self, step: Step) -> list[Step]:
        """Return the pieces of a pass, and any other step as it is."""
        if not is_pass(step):
            return [step]
        workload, stages = self._context.workload, self._context.stages
        parts = stages.variants.parts_in(stages.variants.variant_of_step(step))
        order = stages.by_part(step)
        cut = pieces(step, [one.block for one in order])
        steps: list[Step] = []
        for one, piece, new in zip(order, cut, self._gradients(step, order), strict=True):
            here = [parts[index] for index in sorted(one.parts)]
            whole = _with_bytes(piece, here, new) if self._by_part else _with_gradients(piece, new)
            copies = copies_before(workload, parts[one.main], piece.phase) if self._by_part else []
            steps += self._split(whole, copies) if copies else [whole]
        return steps

    def _gradients(self, step: Step, order: Sequence[PassPiece]) -> list[NewGradients]:
        """Return the gradients that each piece of a pass makes.

        Of the root unit a piece makes those of its own parts, and the last one the rest. A table that is the
        projection too has its gradient with the projection, which comes first.
        """
        workload, units = self._context.workload, self._units
        if step.phase not in MAKE_GRADIENTS:
            return [NewGradients(0.0, 0.0) for _ in order]
        variants, root = self._context.stages.variants, units.roots[step.stage]
        variant = variants.variant_of_step(step)
        parts = variants.parts_in(variant)
        left = whole_gradient_bytes(workload, units.weights[root]) if root[0] == step.stage else 0.0
        nbytes: list[float] = []
        for number, piece in enumerate(order):
            layer = units.layer(step, piece.main)
            if layer:
                nbytes.append(whole_gradient_bytes(workload, units.weights[layer]))
                continue
            rest = number == len(order) - 1 or workload.model.tied_embeddings
            here = whole_gradient_bytes(workload, weights_of(parts[other] for other in piece.parts))
            nbytes.append(left if rest else min(here, left))
            left -= nbytes[-1]
        if not workload.adds_whole_gradients:
            return [NewGradients(new, new) for new in nbytes]
        # Autograd makes them in the type of the weights; they wait in the type in which they are reduced.
        share_of_waiting = DTYPE_BYTES[workload.training.trained_dtype] / DTYPE_BYTES[workload.training.grad_dtype]
        return [NewGradients(new * share_of_waiting, new if variant.turn.first else 0.0) for new in nbytes]

    def _split(self, piece: Step, copies_before: Sequence[Op]) -> list[Step]:
        """Return the copies before a piece as a step of their own, which takes its bytes, and the rest of the piece."""
        assert isinstance(piece.op, Block)
        if id(piece.op) not in self._halves:
            at = piece.op.ops.index(copies_before[0]) + len(copies_before)
            before, rest = piece.op.ops[:at], piece.op.ops[at:]
            self._halves[id(piece.op)] = Block(f"{piece.op.name} copies", before), Block(piece.op.name, rest)
        copies, work = self._halves[id(piece.op)]
        return [
            replace(piece, label=f"{piece.label}{COPIES}", op=copies, free_bytes=0.0, workspace_bytes=0.0),
            replace(piece, op=work, after=(), alloc_bytes=0.0),
        ]


def _with_gradients(piece: Step, new: NewGradients) -> Step:
    """Return a piece that takes the bytes of ``new`` gradients too."""
    alloc, free = piece.alloc_bytes + new.nbytes + new.more_bytes, piece.free_bytes + new.fewer_bytes
    return replace(piece, alloc_bytes=alloc, free_bytes=free)


def _with_bytes(piece: Step, parts: Sequence[Part], new: NewGradients) -> Step:
    """Return a piece with the bytes of activations that its ``parts`` take and give back.

    ``new`` gradients are taken when activations are given back. Those of a weight gradient are apart: schedules are
    tuned to its free bytes.
    """
    if piece.phase == StepPhase.WEIGHT_GRADIENT:
        moved = pass_bytes(parts, piece.phase)
        moved = moved._replace(alloc=moved.alloc + new.nbytes)
    else:
        first = replace(parts[0], left_gradient_bytes=parts[0].left_gradient_bytes + new.nbytes)
        moved = pass_bytes((first, *parts[1:]), piece.phase)
    alloc, free = moved.alloc + new.more_bytes, moved.free + new.fewer_bytes
    return replace(piece, alloc_bytes=alloc, free_bytes=free, workspace_bytes=moved.workspace)
