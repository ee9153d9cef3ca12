"""Passes through the stages of a model as steps, and as the pieces that they may be cut into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from simulator.config import Workload
from simulator.lowering.buckets import Mark, gradients_complete, weights_used
from simulator.lowering.fsdp_copies import copies_after, with_copies
from simulator.lowering.rank_update import UpdateStep
from simulator.lowering.reductions import AlikeReductions
from simulator.lowering.stage_variants import StageVariants, Variant
from simulator.models import Op, Part, PassBytes, Seat, Turn, activation_bytes, by_part, pass_bytes
from simulator.operations.shapes import ANY_TURN
from simulator.program import (
    Axis,
    Block,
    Collective,
    CollectiveKind,
    Compute,
    Fixed,
    Purpose,
    Step,
    StepPhase,
    reordered,
)
from simulator.same_objects import SameObjects
from simulator.schedules import Action

#: The kernel of a pass whose stage has none for it: an embedding alone has no input gradient, nor have frozen layers.
NOTHING = Compute("nothing", Fixed(0.0), StepPhase.BACKWARD)


class PassPiece(NamedTuple):
    """One piece of a pass: ``parts`` of the stage by index, in the order in which they run.

    ``main``: the one of them that runs something, if any does. ``block`` is all that the piece runs.
    """

    parts: tuple[int, ...]
    main: int
    block: Block


class Stages:
    """The blocks of every model stage for a rank at ``seat``, each distinct one built once."""

    def __init__(self, workload: Workload, seat: Seat, turns: Mapping[tuple[int, int], Turn]) -> None:
        self.workload, self.seat = workload, seat
        self.variants = StageVariants(workload, seat, turns)
        parallelism = workload.parallelism
        self.reductions = AlikeReductions(workload)
        self._chunk = {
            stage: chunk for rank in range(parallelism.pp) for chunk, stage in enumerate(parallelism.stages_of(rank))
        }
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._pass_of: dict[Variant, Step] = {}
        #: Parts, and kind of a pass -> its bytes.
        self._moved = SameObjects[PassBytes]()
        self._pieces_of: dict[Variant, list[PassPiece]] = {}
        #: Weights of a rank -> their update.
        self._updates = SameObjects[UpdateStep]()

    def step(self, action: Action, after: tuple[str, ...] = ()) -> Step:
        """Return the compute step of an action ``after`` others, with the bytes held and given back."""
        variant = self.variants.variant(action.stage, action.kind, action.microbatch)
        if variant not in self._pass_of:
            self._pass_of[variant] = self._pass(action, variant)
        return reordered(self._pass_of[variant], after, label=str(action), microbatch=action.microbatch)

    def _pass(self, action: Action, variant: Variant) -> Step:
        """Return the compute step of an action, which those of its variant are but for label and micro-batch."""
        parts = self.variants.parts_in(variant)
        moved = self._moved_by(parts, action.kind)
        return Step(
            str(action),
            self._block(variant, parts),
            phase=StepPhase(action.kind),
            microbatch=action.microbatch,
            stage=action.stage,
            chunk=self._chunk[action.stage],
            alloc_bytes=moved.alloc,
            free_bytes=moved.free,
            workspace_bytes=moved.workspace,
        )

    def _moved_by(self, parts: tuple[Part, ...], kind: str) -> PassBytes:
        """Return the bytes of a pass of ``parts``; equal stages have the very same."""
        return self._moved.get((parts,), lambda: pass_bytes(parts, kind), kind)

    def update(self, pipeline_rank: int) -> UpdateStep:
        """Return the update of the weights of a pipeline rank; ranks with the same weights share it."""
        weights = self.variants.weights(*self.workload.parallelism.stages_of(pipeline_rank))
        return self._updates.get((weights,), lambda: UpdateStep.from_weights(self.workload, weights, self.seat))

    def gradients_complete(self, step: Step) -> list[Mark]:
        """Return where the backward pass ``step`` completes gradients; ops before the parts' own count."""
        variant = self.variants.variant_of_step(step)
        parts = self.variants.parts_in(variant)
        n_part_ops = sum(len(ops) for _, ops in self._ops(parts, step.phase, variant.turn))
        return gradients_complete(parts, self._n_ops(step) - n_part_ops, whole=step.phase == "B")

    def weights_used(self, step: Step) -> list[Mark]:
        """Return where the forward pass ``step`` has used weights."""
        parts = self.variants.parts[step.stage]
        return weights_used(parts, self._n_ops(step) - sum(len(part.forward) for part in parts))

    def by_part(self, step: Step) -> list[PassPiece]:
        """Return the pass ``step`` cut by part, as `simulator.models.by_part` groups them, in order.

        Ops before those of the parts go with the first piece.
        """
        variant = self.variants.variant_of_step(step)
        if variant not in self._pieces_of:
            parts = self.variants.parts_in(variant)
            ops_of = dict(self._ops(parts, step.phase, variant.turn))
            n_before = self._n_ops(step) - sum(map(len, ops_of.values()))
            pieces = self._pieces_of[variant] = []
            for group in by_part(parts, step.phase):
                main = next((index for index in group if ops_of[index]), group[0])
                block = self._piece(parts[main], step, ops_of[main], 0 if pieces else n_before)
                pieces.append(PassPiece(group, main, block))
        return self._pieces_of[variant]

    def _piece(self, part: Part, step: Step, ops: list[Op], n_before: int) -> Block:
        """Return the pass of one part after the first ops of ``step``; equal ones are one block."""
        key = ("part", step.phase, n_before, tuple(ops), id(part))
        if key not in self._blocks:
            block = self._block_of(step)
            self._blocks[key] = Block(f"{step.phase} {part.name}", (*block.ops[:n_before], *ops))
        return self._blocks[key]

    def _n_ops(self, step: Step) -> int:
        return len(self._block_of(step).ops)

    def _block_of(self, step: Step) -> Block:
        """Return the whole pass that ``step`` is, or is a piece of."""
        block = self._pass_of[self.variants.variant_of_step(step)].op
        assert isinstance(block, Block)
        return block

    def _block(self, variant: Variant, parts: tuple[Part, ...]) -> Block:
        """Return the block of a pass of ``parts``; equal ones are one block.

        With scatter/gather it begins with the gathering of the received shards.
        """
        parallelism, (stage, kind, turn) = self.workload.parallelism, variant
        place = stage % parallelism.n_stages
        arrives = {"F": place > 0, "W": False}.get(kind, place < parallelism.n_stages - 1)
        gathers_input = parallelism.scatter_gather_p2p and parallelism.tp > 1 and arrives
        turn = turn if self.workload.adds_whole_gradients else ANY_TURN  # else turns differ in their parts alone
        key = (kind, turn, gathers_input, tuple(id(part) for part in parts))
        if key not in self._blocks:
            ops = [op for _, part_ops in self._ops(parts, kind, turn) for op in part_ops]
            if gathers_input:
                gather = CollectiveKind.ALL_GATHER
                nbytes = activation_bytes(self.workload)
                ops.insert(0, Collective("tp.all_gather p2p", gather, nbytes, Axis.TP, Purpose.TENSOR))
            ops = ops or [NOTHING]
            self._blocks[key] = Block(f"{kind} {'+'.join(_runs(parts))}", tuple(ops))
        return self._blocks[key]

    def _ops(self, parts: tuple[Part, ...], kind: str, turn: Turn) -> list[tuple[int, list[Op]]]:
        """Return the operations of a pass of ``parts``, in order: (index of a part, its ops).

        The copies of a root unit are the last of all.
        """
        order = range(len(parts)) if kind == "F" else reversed(range(len(parts)))
        if not self.workload.replication.fully_sharded:
            return [(index, list(parts[index].ops(kind))) for index in order]
        pieces = [(index, with_copies(self.workload, parts[index], kind, turn)) for index in order]
        with_ops = [ops for _, ops in pieces if ops]
        if with_ops:
            with_ops[-1] += copies_after(self.workload, [part for part in parts if not part.is_unit], kind, turn)
        return pieces


def _runs(parts: tuple[Part, ...]) -> list[str]:
    """Return the names of parts with repeats counted: embedding, 8 layer."""
    counts: dict[str, int] = {}
    for part in parts:
        counts[part.name] = counts.get(part.name, 0) + 1
    return [name if count == 1 else f"{count} {name}" for name, count in counts.items()]
