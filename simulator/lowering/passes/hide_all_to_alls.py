"""All-to-alls of experts beside the passes of another micro-batch.

Where the schedule plays a forward and a backward pass as one, layers of both run in turns on the compute lane. Their
all-to-alls go on beside, on a lane of their own. The order is that of Megatron-Core
(models/common/model_chunk_schedule_plan.py, ``TransformerLayerSchedulePlan.run``), for layer i of one pass and layer j
of the other:

    compute      | attention i | MLP j back | MLP i       | attention j back |
    all-to-alls  | combine j   | dispatch i | dispatch j  | combine i        |

Gradients of weights that come behind an all-to-all of their own pass need not wait for it.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple, TypeGuard

from simulator.lowering.block_cuts import BlockCuts
from simulator.lowering.lanes import Lanes, with_steps
from simulator.lowering.rank_context import RankContext
from simulator.lowering.stage_variants import Variant
from simulator.models import pass_bytes
from simulator.program import (
    COMPUTE_LANE,
    PASSES,
    AllToAll,
    Axis,
    Block,
    Compute,
    Step,
    StepPhase,
    reordered,
)
from simulator.schedules import Slot


def pairs_in(slots: Sequence[Slot]) -> frozenset[tuple[str, str]]:
    """Return the labels of each forward and backward pass in one slot.

    >>> from simulator.schedules import Action
    >>> pairs_in([(Action(0, "F", 1), Action(0, "B", 0)), (Action(0, "B", 1),)])
    frozenset({('0F1', '0B0')})
    """
    return frozenset(
        (str(first), str(second))
        for first, second in (slot for slot in slots if len(slot) == 2)
        if (first.kind, second.kind) == ("F", "B")
    )


def hide_all_to_alls(lanes: Lanes, context: RankContext) -> Lanes:
    """Take passes apart, layer by layer, so that their all-to-alls have a lane of their own."""
    if not context.parallelism.overlap.expert_all_to_all:
        return lanes
    turns = _Turns(_LayerCutter(context))
    runs = [list(run) for _, run in groupby(lanes[COMPUTE_LANE], key=_pass_of)]
    compute: list[Step] = []
    travels: list[Step] = []
    while runs:
        run = runs.pop(0)
        if run[-1].phase not in PASSES or not isinstance(run[-1].op, Block):
            compute += run
            continue
        other = runs.pop(0) if runs and (run[-1].label, runs[0][-1].label) in context.pairs else []
        for step in turns.steps(run, other):
            (compute if isinstance(step.op, Block) else travels).append(step)
    return with_steps(lanes, compute, travels)


class _PatternStep(NamedTuple):
    """A step of a pair of passes, whatever their micro-batches.

    It is ``like`` a step of the first such pair, and is made of the piece number ``piece`` of both passes. ``suffix``
    follows the label of that. Where it ``begins`` the piece, it waits for what the piece waits for. It ``awaits`` other
    steps of the pair, by piece and suffix.
    """

    like: Step
    piece: int
    suffix: str
    begins: bool
    awaits: tuple[tuple[int, str], ...]


class _Turns:
    """Takes turns between the layers of two passes. Pairs that differ in their micro-batches alone are cut once."""

    def __init__(self, cutter: _LayerCutter) -> None:
        self._cutter = cutter
        self._patterns: dict[Hashable, list[_PatternStep]] = {}

    def steps(self, run: Sequence[Step], other: Sequence[Step]) -> list[Step]:
        """Return the steps of two passes, each whole or in pieces, in the order in which they are issued."""
        pieces = [*run, *other]
        key = (
            len(run),
            *[self._cutter.variant(one[-1]) for one in (run, other) if one],
            *[(id(one.op), one.part, one.alloc_bytes, one.free_bytes, one.workspace_bytes) for one in pieces],
        )
        if key not in self._patterns:
            steps = _in_turns(self._cutter.parts(run), self._cutter.parts(other))
            self._patterns[key] = list(_pattern(steps, pieces))
        return [_repeated(one, pieces) for one in self._patterns[key]]


def _pattern(steps: Sequence[Step], pieces: Sequence[Step]) -> Iterator[_PatternStep]:
    """Yield what ``steps`` are whatever the micro-batches of the ``pieces`` that they were cut from."""
    number = {piece.label: index for index, piece in enumerate(pieces)}

    def place(label: str) -> tuple[int, str]:
        """Return the number of the piece that a step was cut from, and how the step's label goes on behind it."""
        if label in number:
            return number[label], ""
        whole, colon, at = label.rpartition(":")
        return number[whole], colon + at

    n_steps = Counter(place(step.label)[0] for step in steps)
    for step in steps:
        piece, suffix = place(step.label)
        begins = suffix == ":0" or n_steps[piece] == 1
        inside = step.after[len(pieces[piece].after) :] if begins else step.after
        yield _PatternStep(step, piece, suffix, begins, tuple([place(label) for label in inside]))


def _repeated(one: _PatternStep, pieces: Sequence[Step]) -> Step:
    """Return a step of a pattern for passes in these ``pieces``."""
    piece = pieces[one.piece]
    inside = tuple([pieces[number].label + suffix for number, suffix in one.awaits])
    after = (*piece.after, *inside) if one.begins else inside
    return reordered(one.like, after, label=piece.label + one.suffix, microbatch=piece.microbatch)


def _pass_of(step: Step) -> object:
    """Return what the pieces of one pass have in common; any other step is alone."""
    is_pass = step.phase in PASSES and isinstance(step.op, Block)
    return (step.stage, step.phase, step.microbatch) if is_pass else step.label


@dataclass
class _PartOfPass:
    """The steps of one part of the model in a pass.

    ``segments`` are those before, between and behind its all-to-alls. ``delayed`` are weight gradients that its last
    all-to-all does not hold up. ``workspace_bytes`` are held while it runs.
    """

    is_layer: bool = True
    workspace_bytes: float = 0.0
    segments: list[list[Step]] = field(default_factory=lambda: [[]])
    travels: list[Step] = field(default_factory=list)
    delayed: list[Step] = field(default_factory=list)

    @property
    def n_steps(self) -> int:
        """All its steps, on either lane."""
        return sum(map(len, self.segments)) + len(self.travels) + len(self.delayed)

    def segment(self, number: int) -> list[Step]:
        """Return the steps of a segment, none where the part has fewer."""
        return self.segments[number] if number < len(self.segments) else []

    def take(self, alloc: float, free: float) -> None:
        """Let the first of its steps on the GPU's kernels take bytes, and the last one give bytes back."""
        filled = [segment for segment in self.segments if segment]
        filled[0][0] = reordered(filled[0][0], filled[0][0].after, alloc_bytes=alloc)
        filled[-1][-1] = reordered(filled[-1][-1], filled[-1][-1].after, free_bytes=free)


class _LayerCutter:
    """Cuts passes by part and at their all-to-alls; pieces that do the same share their blocks.

    Each part takes and gives back its own bytes: layers to come need no place yet.
    """

    def __init__(self, context: RankContext) -> None:
        self._stages = context.stages
        self._cuts = BlockCuts()

    def variant(self, step: Step) -> Variant:
        """Return the variant of the pass that ``step`` is, or is a piece of."""
        return self._stages.variants.variant_of_step(step)

    def parts(self, run: Sequence[Step]) -> list[_PartOfPass]:
        """Return the parts of the pass that ``run`` is, or is the pieces of, in the order in which they run."""
        if not run:
            return []
        phase = run[-1].phase
        model_parts = self._stages.variants.parts_in(self.variant(run[-1]))
        pieces = self._stages.by_part(run[-1])
        groups = [tuple(model_parts[index] for index in piece.parts) for piece in pieces]
        moved = [pass_bytes(group, phase) for group in groups]
        ends = list(itertools.accumulate(len(piece.block.ops) for piece in pieces))
        parts = [
            _PartOfPass(any(part.is_unit for part in group), nbytes.workspace)
            for group, nbytes in zip(groups, moved, strict=True)
        ]
        waits = _Waits()
        for number, step in self._steps(run, ends):
            waits.add(parts[number], step)
        whole = pass_bytes(model_parts, phase)
        left = sum(step.alloc_bytes for step in run) - whole.alloc, sum(step.free_bytes for step in run) - whole.free
        for number, (part, nbytes) in enumerate(zip(parts, moved, strict=True)):
            last = number == len(parts) - 1
            part.take(nbytes.alloc + (left[0] if number == 0 else 0.0), nbytes.free + (left[1] if last else 0.0))
        return parts

    def _steps(self, run: Sequence[Step], ends: Sequence[int]) -> Iterator[tuple[int, Step]]:
        """Yield the steps of a pass with the number of the part that each belongs to; parts end at these ops."""
        at = 0
        for piece in run:
            assert isinstance(piece.op, Block)
            n_ops = len(piece.op.ops)
            cuts = {*_cuts(piece.op.ops), *(end - at for end in ends if 0 < end - at < n_ops)}
            bounds = [0, *sorted(cuts), n_ops]
            for number, (low, high) in enumerate(itertools.pairwise(bounds)):
                part = bisect.bisect_right(ends, at + low)
                yield part, self._step(piece, low, high, "" if high == n_ops else f":{number}", str(part))
            at += n_ops

    def _step(self, piece: Step, low: int, high: int, suffix: str, part: str) -> Step:
        """Return ops ``low`` to ``high`` of a piece as a step; the last one has the piece's label."""
        assert isinstance(piece.op, Block)
        first, label = piece.op.ops[low], f"{piece.label}{suffix}"
        after = () if low else piece.after
        if _takes_tokens(first):
            return Step(label, first, after, microbatch=piece.microbatch, stage=piece.stage)
        block = self._cuts.part(piece.op, low, high)
        return reordered(piece, after, label=label, op=block, part=part, alloc_bytes=0.0, free_bytes=0.0)


class _Waits:
    """Goes through the steps of a pass in order: computation and all-to-alls wait for each other."""

    def __init__(self) -> None:
        self._computed: tuple[str, ...] = ()
        self._travelled: tuple[str, ...] = ()

    def add(self, part: _PartOfPass, step: Step) -> None:
        """Add the next step of the pass to its part."""
        if isinstance(step.op, AllToAll):
            step = reordered(step, (*step.after, *self._computed))
            part.travels.append(step)
            part.segments.append([])
            self._travelled = (step.label,)
        elif self._travelled and _only_weight_gradients(step):
            part.delayed.append(step)
        else:
            step = reordered(step, (*step.after, *self._travelled))
            part.segments[-1].append(step)
            self._computed, self._travelled = (step.label,), ()


def _cuts(ops: Sequence[object]) -> Iterable[int]:
    """Yield where a pass is cut: before and behind each all-to-all, and behind weight gradients that follow one."""
    for number, op in enumerate(ops):
        if not _takes_tokens(op):
            continue
        yield from (place for place in (number, number + 1) if 0 < place < len(ops))
        end = number + 1
        while end < len(ops) and _is_weight_gradient(ops[end]):
            end += 1
        if number + 1 < end < len(ops):
            yield end


def _takes_tokens(op: object) -> TypeGuard[AllToAll]:
    """Return whether an operation is an all-to-all of experts; those of context parallelism stay where they are."""
    return isinstance(op, AllToAll) and op.axis == Axis.EP


def _is_weight_gradient(op: object) -> bool:
    return isinstance(op, Compute) and op.phase == StepPhase.WEIGHT_GRADIENT


def _only_weight_gradients(step: Step) -> bool:
    return isinstance(step.op, Block) and all(map(_is_weight_gradient, step.op.ops))


def _in_turns(first: list[_PartOfPass], second: list[_PartOfPass]) -> list[Step]:
    """Return the steps of two passes in the order in which they are issued: layers in turns, what is none by itself."""
    steps: list[Step] = []
    while first or second:
        if first and not (first[0].is_layer and second):
            steps += _layers_in_turns(first.pop(0), _PartOfPass())
        elif second and not (second[0].is_layer and first):
            steps += _layers_in_turns(_PartOfPass(), second.pop(0))
        else:
            steps += _layers_in_turns(first.pop(0), second.pop(0))
    return steps


def _layers_in_turns(first: _PartOfPass, second: _PartOfPass) -> list[Step]:
    """Return the steps of a layer of each pass; one without all-to-alls stands for an MLP between them.

    Either pass is in the middle of its work while the other one computes, and so keeps its workspace. Raises
    RuntimeError where a part has more all-to-alls than a layer of experts.
    """
    n_steps = first.n_steps + second.n_steps
    if len(second.segments) == 1:
        second = replace(second, segments=[[], *second.segments])
    travels = [iter(first.travels), iter(second.travels)]
    steps = [
        *second.segment(0),
        *itertools.islice(travels[1], 1),
        *first.segment(0),
        *second.segment(1),
        *itertools.islice(travels[0], 1),
        *itertools.islice(travels[1], 1),
        *second.delayed,
        *first.segment(1),
        *itertools.islice(travels[0], 1),
        *first.delayed,
        *second.segment(2),
        *first.segment(2),
    ]
    if len(steps) != n_steps:
        raise RuntimeError(f"layers of {n_steps} steps would run {len(steps)} of them: more than two all-to-alls?")
    workspace = first.workspace_bytes + second.workspace_bytes
    return [
        reordered(step, step.after, workspace_bytes=workspace) if isinstance(step.op, Block) else step for step in steps
    ]
