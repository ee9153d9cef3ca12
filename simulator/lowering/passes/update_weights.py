"""The optimizer's step on the GPU, or its remaining work there where hosts or servers update."""

from __future__ import annotations

from dataclasses import replace

from simulator.lowering.lanes import Lanes, gradients_ready, gradients_summed, with_steps
from simulator.lowering.rank_context import RankContext
from simulator.program import COMPUTE_LANE, LaneSteps, Purpose, Step, StepPhase

#: The lane on which model-parallel ranks agree on the gradient norm while weights are updated already.
MP_LANE = "mp"


def update_weights(lanes: Lanes, context: RankContext) -> Lanes:
    """Add the step ``optimizer``: gradients of replicated parameters are summed, then weights updated.

    Without ``optimizer_sync`` no stage waits until all agree on gradient norm and infinities. Weights are updated at
    once, and put back in the rare case that the answer is no (arXiv 2401.10241, section 4).
    """
    ready, update = gradients_ready(lanes), context.stages.update(context.pipeline_rank)
    compute = lanes[COMPUTE_LANE]
    if update.block is not None:
        optimizer = Step(
            "optimizer",
            update.block,
            ready,
            phase=StepPhase.OPTIMIZER,
            free_bytes=update.freed_bytes,
            workspace_bytes=update.workspace_bytes,
        )
        compute = compute.followed_by([optimizer])
    if not update.late:
        return with_steps(lanes, compute)
    after = (*ready, *gradients_summed(lanes))
    # The late ones are other stages, where there are any.
    held_up = Purpose.PIPELINE if context.parallelism.pp > 1 else None
    agreements = [Step(f"validate {op.name}", replace(op, purpose=held_up or op.purpose), after) for op in update.late]
    return with_steps({**lanes, MP_LANE: LaneSteps.from_steps(agreements)}, compute)


def free_input_gradients(lanes: Lanes, context: RankContext) -> Lanes:
    """Give back with the last step of computation the gradients of inputs that torch keeps until then."""
    compute = lanes[COMPUTE_LANE]
    columns = compute.columns
    halves = columns.places(lambda step: step.phase == StepPhase.INPUT_GRADIENT)
    split = {(columns.like(at).stage, columns.microbatch[at]) for at in halves}
    nbytes = sum(context.stages.variants.parts[stage][0].input_gradient_bytes for stage, _ in split)
    if not nbytes:
        return lanes
    last = replace(compute[-1], free_bytes=compute[-1].free_bytes + nbytes)
    return with_steps(lanes, compute.replaced({len(compute) - 1: [last]}))
