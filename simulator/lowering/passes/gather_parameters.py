"""ZeRO-1 and 2: parameters that each rank has updated its shard of are gathered whole (arXiv 1910.02054, section 5)."""

from __future__ import annotations

from dataclasses import replace

from simulator.lowering.buckets import buckets, pieces
from simulator.lowering.lanes import Lanes, with_steps
from simulator.lowering.passes.update_on_host import weights_in_place
from simulator.lowering.rank_context import RankContext
from simulator.lowering.sharding import gather
from simulator.operations.weights import trained
from simulator.program import COMPUTE_LANE, Block, Step, StepPhase
from simulator.units import DTYPE_BYTES


def gather_parameters(lanes: Lanes, context: RankContext) -> Lanes:
    """Gather parameters after the optimizer, or beside the next step's first forward passes.

    Forward passes of the next step that run before this one's optimizer have no use for what it gathers.
    """
    parallelism = context.parallelism
    if parallelism.zero not in (1, 2):
        return lanes
    if parallelism.overlap.param_gather and parallelism.pipeline_schedule.drains:
        return _beside_first_passes(lanes, context)
    updated = weights_in_place(lanes)
    gathers = [
        replace(step, after=updated)
        for stage in context.stage_numbers
        for step in gather(context.workload, f"gather {stage}", trained(context.stages.variants.weights(stage)))
    ]
    return with_steps(lanes, lanes[COMPUTE_LANE], gathers)


def _beside_first_passes(lanes: Lanes, context: RankContext) -> Lanes:
    """Gather in buckets beside each stage's first forward pass: a piece of the pass waits for the parameters it uses.

    These gathers are the last work of the step before. Buckets have as many elements as those of gradients.
    """
    workload, stages = context.workload, context.stages
    element, bucket_bytes = DTYPE_BYTES[workload.training.grad_dtype], workload.parallelism.bucket_bytes
    compute = lanes[COMPUTE_LANE]
    columns = compute.columns
    forward = columns.places(lambda step: step.phase == StepPhase.FORWARD and isinstance(step.op, Block))
    first = {columns.like(at).stage: at for at in reversed(forward)}
    changed: dict[int, list[Step]] = {}
    gathers: list[Step] = []
    for at in sorted(first.values()):
        step = columns.step(at)
        assert isinstance(step.op, Block)
        parts = buckets(step.op, stages.weights_used(step), element, bucket_bytes)
        changed[at] = []
        for number, (part, piece) in enumerate(zip(parts, pieces(step, [part.block for part in parts]), strict=True)):
            needed = gather(workload, f"gather {step.stage}.{number}", part.weights)
            gathers += needed
            changed[at].append(replace(piece, after=(*piece.after, *(one.label for one in needed))))
    return with_steps(lanes, compute.replaced(changed), gathers)
