"""Gradients are reduced over the ranks that hold the same parameters, or go to servers or to the host.

Without ZeRO gradients are all-reduced. ZeRO-1 reduce-scatters them, so that each rank updates its shard of the
parameters. ZeRO-2 keeps its shard of the gradients alone, and reduces those of every micro-batch as they are made;
ZeRO-3 does so unit by unit (arXiv 1910.02054, sections 5 and 7), or in the last micro-batch alone
(``sync_each_micro_batch: false``).
"""

from __future__ import annotations

from simulator.lowering.buckets import Bucket, buckets, pieces
from simulator.lowering.lanes import Lanes, drained, off_compute, with_steps
from simulator.lowering.rank_context import RankContext
from simulator.lowering.reductions import Reductions
from simulator.lowering.sharded_units import UnitPass, UnitPiece, Units, sharded_units
from simulator.lowering.sharding import whole_gradient_bytes
from simulator.lowering.stage_variants import Variant
from simulator.lowering.stages import Stages
from simulator.program import COMPUTE_LANE, MAKE_GRADIENTS, Block, LaneSteps, Step, reordered
from simulator.units import DTYPE_BYTES


def reduce_gradients(lanes: Lanes, context: RankContext) -> Lanes:
    """Reduce gradients unit by unit, in buckets beside the passes that make them, or all at the end."""
    parallelism = context.parallelism
    if not context.stages.reductions.leaving(context.weights):
        return lanes
    units = sharded_units(context)
    if units is not None:
        return _by_unit(lanes, context, units)
    if parallelism.zero == 2 or parallelism.overlap.grad_reduce:
        return _in_buckets(lanes, context)
    reductions = Reductions(context.stages.reductions)
    reductions.add("reduce grads", context.weights, (lanes[COMPUTE_LANE].columns.label[-1], *drained(lanes)))
    return with_steps(lanes, lanes[COMPUTE_LANE], reductions.steps)


def _by_unit(lanes: Lanes, context: RankContext, units: Units) -> Lanes:
    """Reduce the gradients of each layer after its piece of a pass, those of the root after the pass.

    Whole gradients that several micro-batches add up are reduced in the last one's backward pass, each layer behind its
    piece. In torch's pipelines all of them are reduced behind the whole pass.
    """
    reductions = Reductions(context.stages.reductions)
    reduces_once = context.workload.adds_whole_gradients
    behind_pass = context.workload.stage_runtime.keeps_units
    compute: list[Step] = []
    #: Label of a gather of a forward pass -> the steps that it waits for.
    late: dict[str, tuple[str, ...]] = {}
    for run in units.passes(lanes[COMPUTE_LANE]):
        if not isinstance(run, UnitPass):
            compute.append(_waiting(run, reductions.waits()))
            continue
        if run.is_forward and units.ends_alone:
            gathers = (label for piece in run.pieces for label in (piece.copies or piece.work).after)
            late |= dict.fromkeys(gathers, reductions.waits(all_done=True))
        last = context.stages.variants.variant_of_step(run.step).turn.last
        reduces = run.makes_gradients and (last or not reduces_once)
        for number, piece in enumerate(run.pieces):
            at_end = number == (len(run.pieces) - 1 if run.makes_gradients else 0)
            first, *rest = [step for step in (piece.copies, piece.work) if step]
            compute += [_waiting(first, reductions.waits(all_done=units.ends_alone and at_end)), *rest]
            if reduces and not behind_pass:
                _reduce_layer(reductions, units, run, piece, piece.work.label)
        if reduces:
            for piece in run.pieces if behind_pass else ():
                _reduce_layer(reductions, units, run, piece, run.step.label)
            root, label = units.roots[run.step.stage], run.step.label
            if root[0] == run.step.stage:
                reductions.add(f"reduce {label} root", units.weights[root], (label,), run.step)
    waits = {step.label for step in off_compute(lanes)} & late.keys()
    whole = {
        lane: LaneSteps.from_steps(_waiting(step, late[step.label]) if step.label in waits else step for step in steps)
        for lane, steps in lanes.items()
    }
    return with_steps(whole, compute, reductions.steps)


def _reduce_layer(reductions: Reductions, units: Units, run: UnitPass, piece: UnitPiece, after: str) -> None:
    """Reduce the gradients of the layer that a ``piece`` of a pass goes through, if it is one, behind a step."""
    layer = units.layer(run.step, piece.main)
    if layer:
        reductions.add(f"reduce {piece.work.label}", units.weights[layer], (after,), run.step)


def _in_buckets(lanes: Lanes, context: RankContext) -> Lanes:
    """Reduce in buckets beside the pass that makes them: the last pass of a stage, under ZeRO-2 every one."""
    workload, stages = context.workload, context.stages
    reductions = Reductions(stages.reductions)
    each = workload.parallelism.zero == 2
    compute = lanes[COMPUTE_LANE]
    columns = compute.columns
    making = columns.places(lambda step: step.phase in MAKE_GRADIENTS and isinstance(step.op, Block))
    cut_at = set(making if each else {columns.like(at).stage: at for at in making}.values())
    buckets_of: dict[Variant, list[tuple[Bucket, float]]] = {}  # with the bytes of its gradients
    changed: dict[int, list[Step]] = {}
    for at in range(len(compute)) if each else sorted(cut_at):
        step = compute[at] if each else columns.step(at)
        if at not in cut_at:
            changed[at] = [_waiting(step, reductions.waits())]
            continue
        key = stages.variants.variant_of_step(step)
        if key not in buckets_of:
            cut = _buckets(context, stages, step)
            buckets_of[key] = [(bucket, whole_gradient_bytes(workload, bucket.weights)) for bucket in cut]
        parts = buckets_of[key]
        cut_pass = pieces(step, [part.block for part, _ in parts])
        changed[at] = []
        for number, ((part, made_bytes), piece) in enumerate(zip(parts, cut_pass, strict=True)):
            waits = (*piece.after, *reductions.waits()) if each else piece.after
            changed[at].append(reordered(piece, waits, alloc_bytes=piece.alloc_bytes + made_bytes))
            label = f"reduce {step.label}.{number}" if each else f"reduce {step.stage}.{number}"
            reductions.add(label, part.weights, (piece.label,), step if each else None)
    return with_steps(lanes, compute.replaced(changed), reductions.steps)


def _buckets(context: RankContext, stages: Stages, step: Step) -> list[Bucket]:
    """Return the pass ``step`` cut where the gradients of a bucket are complete."""
    assert isinstance(step.op, Block)
    grad_bytes = DTYPE_BYTES[context.workload.training.grad_dtype]
    return buckets(step.op, stages.gradients_complete(step), grad_bytes, context.parallelism.bucket_bytes)


def _waiting(step: Step, labels: tuple[str, ...]) -> Step:
    """Return ``step`` waiting for ``labels`` too."""
    return reordered(step, (*step.after, *labels)) if labels else step
