"""Units of ZeRO-3: weights that are gathered together, and the pieces of passes that use them.

Each layer is a unit. The rest of a stage (embedding, final norm, projection) is its root unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from simulator.lowering.rank_context import RankContext
from simulator.lowering.sharding import gathers_by_unit
from simulator.lowering.stages import NOTHING
from simulator.models import weights_of
from simulator.operations.weights import Weight
from simulator.program import MAKE_GRADIENTS, PASSES, Block, Step, StepPhase, reordered

#: (stage, index of the layer among the stage's parts), or (stage, `ROOT`).
Unit = tuple[int, int]
ROOT = -1
#: Last word of the label of the copies before a piece.
COPIES = " copies"


class UnitPiece(NamedTuple):
    """One piece of a pass: ``parts`` of its stage by index, of which ``main`` has the kernels.

    ``copies`` is the step before ``work``, where plain PyTorch copies weights between buffers.
    """

    parts: tuple[int, ...]
    main: int
    copies: Step | None
    work: Step

    @property
    def without_copies(self) -> UnitPiece:
        """The piece where its weights are whole already: nothing is copied."""
        if self.copies is None:
            return self
        alloc = self.copies.alloc_bytes + self.work.alloc_bytes
        return self._replace(copies=None, work=reordered(self.work, self.copies.after, alloc_bytes=alloc))


@dataclass(frozen=True)
class UnitPass:
    """A pass cut by unit."""

    pieces: tuple[UnitPiece, ...]

    @property
    def step(self) -> Step:
        """The last step, which has the label of the whole pass."""
        return self.pieces[-1].work

    @property
    def is_forward(self) -> bool:
        """True for a forward pass."""
        return self.step.phase == StepPhase.FORWARD

    @property
    def needs_weights(self) -> bool:
        """True for all but weight gradients."""
        return self.step.phase != StepPhase.WEIGHT_GRADIENT

    @property
    def makes_gradients(self) -> bool:
        """True where gradients of weights are complete at its end."""
        return self.step.phase in MAKE_GRADIENTS


@dataclass(frozen=True)
class Units:
    """Units of a rank."""

    context: RankContext

    def layer(self, step: Step, part: int) -> Unit | None:
        """Return the unit that a part of the stage of ``step`` is; None where it belongs to the root."""
        return (step.stage, part) if self.context.stages.variants.parts[step.stage][part].is_unit else None

    @cached_property
    def roots(self) -> Mapping[int, Unit]:
        """Stage -> unit of the weights beside layers."""
        return {stage: (self._holder_of_the_table(stage), ROOT) for stage in self.context.stage_numbers}

    @cached_property
    def weights(self) -> Mapping[Unit, tuple[Weight, ...]]:
        """Weights of every unit."""
        parts = self.context.stages.variants.parts
        weights = {
            (stage, index): part.weights
            for stage in self.context.stage_numbers
            for index, part in enumerate(parts[stage])
            if part.is_unit
        }
        for root in self.roots.values():
            stages = [stage for stage in self.context.stage_numbers if self.roots[stage] == root]
            weights[root] = weights_of(part for stage in stages for part in parts[stage] if not part.is_unit)
        return weights

    @property
    def ends_alone(self) -> bool:
        """True where torch's root unit copies its gradients once those of all layers are reduced.

        What follows waits for the root's own reduction (``FSDPParamGroup.post_backward``, ``finalize_backward``).
        Pipelines say which backward pass is the last.
        """
        return self.context.workload.replication.fully_sharded and self.context.parallelism.pp == 1

    def passes(self, compute: Sequence[Step]) -> Iterator[Step | UnitPass]:
        """Yield the passes of a compute lane that is cut by unit, and the other steps as they are."""
        for _, run in groupby(compute, key=lambda step: (step.stage, step.phase, step.microbatch)):
            steps = list(run)
            if is_pass(steps[0]):
                yield self._pass(steps)
            else:
                yield from steps

    def _pass(self, steps: Sequence[Step]) -> UnitPass:
        """Return the pass that ``steps`` in a row of the compute lane are the pieces of."""
        copies = {step.label.removesuffix(COPIES): step for step in steps if step.label.endswith(COPIES)}
        works = [step for step in steps if not step.label.endswith(COPIES)]
        rows = zip(self.context.stages.by_part(steps[0]), works, strict=True)
        return UnitPass(tuple(UnitPiece(piece.parts, piece.main, copies.get(work.label), work) for piece, work in rows))

    def _holder_of_the_table(self, stage: int) -> int:
        """Return the stage whose root unit has the weights of ``stage`` beside layers: itself, but for one case.

        A last stage that shares a table with an embedding on the same rank has it in the embedding's root.
        """
        parallelism, model = self.context.parallelism, self.context.workload.model
        last = stage % parallelism.n_stages == parallelism.n_stages - 1
        if model.table_at_both_ends and parallelism.table_in_place and last:
            return next(other for other in self.context.stage_numbers if other % parallelism.n_stages == 0)
        return stage


def is_pass(step: Step) -> bool:
    """Return True for a pass through a stage, or a piece of one; a pass in which nothing is to do is none."""
    return step.phase in PASSES and isinstance(step.op, Block) and step.op.ops != (NOTHING,)


def sharded_units(context: RankContext) -> Units | None:
    """Return the units of a rank whose passes are cut by unit; None where they are not."""
    return Units(context) if gathers_by_unit(context.workload, context.weights) else None
