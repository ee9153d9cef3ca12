"""ZeRO-3: parameters are sharded, and gathered unit by unit for every pass (arXiv 2304.11277, section 3; torch's
``fully_shard`` applied to every layer and to the whole).

Each layer is a unit; what else a stage has (embedding, final norm, projection) is its root unit. A forward pass and an
input gradient need whole parameters; a weight gradient does not. A unit that is not whole is gathered before its pass,
layers up to ``prefetch`` ahead: while layer k computes, those up to k + prefetch may be in flight or whole, no others.
A layer is given up after its forward pass (unless ``reshard_after_forward`` is off) and after its backward pass; the
root after the backward pass alone, at its end. The gathers of a forward pass wait for all that was computed before it,
which may have been the optimizer (torch's ``FSDPState._root_pre_forward``). Every piece of a pass takes and gives back
what its part saves.

Gathers and reductions have streams of their own, but one communicator (`communicators`). The copies that plain PyTorch
makes for them are part of the passes (`copies`); those of a layer come before the gather that goes on beside it, which
waits for its own copies in and, for its buffer, for a copy out (``FSDPParamGroup.wait_for_unshard``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.config import Workload
from simulator.lowering.fsdp_copies import gathered
from simulator.lowering.gradients import pieces
from simulator.lowering.sharding import Reductions, gather, gathered_bytes, gradient_bytes, held_by_part
from simulator.lowering.stages import Stages
from simulator.models import Part, by_part, pass_bytes, weights_of
from simulator.operations.weights import Weight
from simulator.program import Block, Step

#: (stage, index of the layer among the stage's parts), or (stage, `ROOT`).
Unit = tuple[int, int]
ROOT = -1


def fully_sharded(
    workload: Workload, stages: Stages, own: Sequence[int], compute: Sequence[Step], reductions: Reductions
) -> tuple[list[Step], list[Step]]:
    """The passes of ``compute`` over a rank's ``own`` stages cut by part, and the gathers that they wait for; adds to
    ``reductions``."""
    sharder = _Sharder(workload, stages, own, reductions)
    for step in compute:
        if step.phase in ("F", "B", "I", "W") and isinstance(step.op, Block):
            sharder.run(step)
        else:
            sharder.compute.append(replace(step, after=(*step.after, *reductions.waits())))
    return sharder.compute, sharder.gathers


class _Use(NamedTuple):
    """A pass that needs parameters: its label, and that of the copies before it, if any."""

    label: str
    copies: str


class _Sharder:
    """Goes through a rank's passes in order and keeps track of which units are whole."""

    def __init__(self, workload: Workload, stages: Stages, own: Sequence[int], reductions: Reductions) -> None:
        self.compute: list[Step] = []
        self.gathers: list[Step] = []
        self._workload, self._stages, self._reductions = workload, stages, reductions
        layout = workload.parallelism
        self._ahead = layout.prefetch if layout.overlap.param_gather else 0
        self._drops = layout.reshard_after_forward
        self._by_part = held_by_part(workload, stages.weights(*own))
        #: Torch's root unit copies its gradients when those of all layers are reduced, and what follows waits for its
        #: own reduction (``FSDPParamGroup.post_backward``, ``finalize_backward``); pipelines say which is last.
        self._ends_alone = workload.replication.fully_sharded and layout.pp == 1
        self._whole: set[Unit] = set()
        self._last_use: dict[Unit, str] = {}
        self._uses: list[_Use] = []  # the passes of layers and, backward, heads that need parameters, in order
        self._split: dict[int, tuple[Block, Block]] = {}
        self._beside_head = False  # whether the piece before was the backward pass of a head
        self._weights: dict[Unit, tuple[Weight, ...]] = {}
        self._root_of = {stage: (_holder_of_the_table(workload, stage, own), ROOT) for stage in own}
        for stage in own:
            parts = stages.parts[stage]
            self._weights |= {(stage, index): part.weights for index, part in enumerate(parts) if part.is_unit}
        for root in self._root_of.values():
            held = [stage for stage in own if self._root_of[stage] == root]
            self._weights[root] = weights_of(p for stage in held for p in stages.parts[stage] if not p.is_unit)

    def run(self, step: Step) -> None:
        """One pass, part by part."""
        reads, makes, forward = step.phase in ("F", "B", "I"), step.phase in ("B", "W"), step.phase == "F"
        parts, root = self._stages.parts_in(step), self._root_of[step.stage]
        order = [(index, block) for index, block in self._stages.by_part(step) if block.ops]
        before = tuple(last.label for last in self.compute[-1:] if forward)
        if forward and self._ends_alone:
            before = (*before, *self._reductions.waits(all_done=True))
        needs = self._gather(root, step, f"gather {step.label} root", before) if reads else []
        left = gradient_bytes(self._workload, self._weights[root]) if makes and root[0] == step.stage else 0.0
        cut = pieces(step, [block for _, block in order])
        for (index, _), group, piece in zip(order, by_part(parts, step.phase), cut, strict=True):
            label, made, taken, free = piece.label, 0.0, 0.0, 0.0
            layer = (step.stage, index) if parts[index].is_unit else None
            copies, work = self._apart(parts[index], piece)
            if layer and reads:
                needs += self._gather(layer, step, f"gather {label}", (*before, *self._room()))
                if self._beside_head and needs:
                    taken = self._taken_late(layer)
                self._uses.append(_Use(label, copies.label if copies else ""))
                free += self._used(layer, label, drop=self._drops or not forward)
            self._beside_head = reads and not forward and not layer and piece is cut[0]
            if self._beside_head:
                self._uses.append(_Use(label, ""))
            if makes and layer:
                made = gradient_bytes(self._workload, self._weights[layer])
            elif left and not layer:
                made = self._made_by_root([parts[index] for index in group], left, last=piece is cut[-1])
                left -= made
            if reads and piece is cut[-1]:
                free += self._used(root, label, drop=not forward)
            after = (
                *piece.after,
                *needs,
                *self._reductions.waits(all_done=self._ends_alone and piece is cut[-1 if makes else 0]),
            )
            held = self._held(work, [parts[index] for index in sorted(group)], made)
            alloc, free = held.alloc_bytes + taken, held.free_bytes + free
            if copies:
                self.compute.append(replace(copies, after=after, alloc_bytes=alloc))
                after, alloc = (), 0.0
            self.compute.append(replace(held, after=after, alloc_bytes=alloc, free_bytes=free))
            needs = []
            if makes and layer:
                self._reductions.add(f"reduce {label}", self._weights[layer], (label,), step)
        if makes and root[0] == step.stage:
            self._reductions.add(f"reduce {step.label} root", self._weights[root], (step.label,), step)

    def _room(self) -> tuple[str, ...]:
        """What a layer's gather has to wait for, so that no more of them are whole or on their way: the copies of the
        pass that it goes on beside, or where that has none, or nothing goes on beside it, the pass before."""
        beside = len(self._uses) - self._ahead
        if self._ahead and beside >= 0 and self._uses[beside].copies:
            return (self._uses[beside].copies,)
        return (self._uses[beside - 1].label,) if beside >= 1 else ()

    def _apart(self, part: Part, piece: Step) -> tuple[Step | None, Step]:
        """The copies before the pass ``piece`` of a ``part``, if any, and what follows."""
        copies = gathered(self._workload, part, piece.phase)
        if not (copies and self._by_part and isinstance(piece.op, Block)):
            return None, piece
        key = id(piece.op)
        if key not in self._split:
            at = piece.op.ops.index(copies[0]) + len(copies)
            first, rest = piece.op.ops[:at], piece.op.ops[at:]
            self._split[key] = Block(f"{piece.op.name} copies", first), Block(piece.op.name, rest)
        of_copies, rest_of = self._split[key]
        return replace(
            piece, label=f"{piece.label} copies", op=of_copies, alloc_bytes=0.0, free_bytes=0.0, workspace_bytes=0.0
        ), replace(piece, op=rest_of)

    def _made_by_root(self, parts: Sequence[Part], left: float, *, last: bool) -> float:
        """Bytes of the root's gradients that a pass of its ``parts`` makes, of those ``left``: their own; those of a
        table that is the projection too with the projection, which comes first."""
        if last or self._workload.model.tied_embeddings:
            return left
        return min(gradient_bytes(self._workload, weights_of(parts)), left)

    def _held(self, piece: Step, parts: Sequence[Part], made: float) -> Step:
        """``piece`` of a pass with what it takes and gives back of the activations of its ``parts``, and gradients that
        it has ``made`` when these are given back, but for those of a weight gradient, whose free bytes schedules are
        tuned to."""
        if not self._by_part:
            return replace(piece, alloc_bytes=piece.alloc_bytes + made)
        if piece.phase == "W":
            moved = pass_bytes(parts, "W")
            return replace(
                piece, alloc_bytes=moved.alloc + made, free_bytes=moved.free, workspace_bytes=moved.workspace
            )
        first = replace(parts[0], left_gradient_bytes=parts[0].left_gradient_bytes + made)
        moved = pass_bytes((first, *parts[1:]), piece.phase)
        return replace(piece, alloc_bytes=moved.alloc, free_bytes=moved.free, workspace_bytes=moved.workspace)

    def _gather(self, unit: Unit, step: Step, label: str, after: Sequence[str]) -> list[str]:
        """Make a unit whole for ``step``; what that has to wait for."""
        if unit in self._whole:
            return []
        self._whole.add(unit)
        waits = dict.fromkeys((*after, *([self._last_use[unit]] if unit in self._last_use else ())))
        gathers = gather(self._workload, label, self._weights[unit], step)
        self.gathers += [replace(one, after=(*waits, *one.after)) for one in gathers]
        return [one.label for one in gathers]

    def _taken_late(self, unit: Unit) -> float:
        """Let the pass of a layer take the bytes of its gather, which goes on beside the head's backward pass: what the
        host issues takes memory in the order in which it issues, and it comes to this gather after the loss, where most
        is alive (the hook on the root's output, torch's ``FSDPState._pre_backward``)."""
        nbytes = gathered_bytes(self._workload, self._weights[unit])
        last = self.gathers[-1]
        late = min(nbytes, last.alloc_bytes)
        self.gathers[-1] = replace(last, alloc_bytes=last.alloc_bytes - late)
        return late

    def _used(self, unit: Unit, label: str, *, drop: bool) -> float:
        """The pass ``label`` has used a unit; the bytes that it gives back."""
        self._last_use[unit] = label
        if not drop:
            return 0.0
        self._whole.discard(unit)
        return gathered_bytes(self._workload, self._weights[unit])


def _holder_of_the_table(workload: Workload, stage: int, own: Sequence[int]) -> int:
    """The stage whose root holds what ``stage`` has beside layers: itself, but for a last stage that shares a table
    with an embedding on the same rank that of the embedding."""
    layout = workload.parallelism
    if workload.model.table_at_both_ends and layout.table_in_place and stage % layout.n_stages == layout.n_stages - 1:
        return next(other for other in own if other % layout.n_stages == 0)
    return stage
