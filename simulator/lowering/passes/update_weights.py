"""The optimizer's step on the GPU, or its remaining work there where hosts or servers update."""

from __future__ import annotations

from dataclasses import replace

from simulator.lowering.lanes import Lanes, gradients_ready, gradients_summed, with_steps
from simulator.lowering.rank_context import RankContext
from simulator.models import made_gradient_bytes, optimizer_ops, optimizer_workspace_bytes, replicated_gradient_ops
from simulator.program import COMPUTE_LANE, Axis, Block, Comm, Purpose, Step, StepPhase

#: The lane on which model-parallel ranks agree on the gradient norm while weights are updated already.
MP_LANE = "mp"


def update_weights(lanes: Lanes, context: RankContext) -> Lanes:
    """Add the step ``optimizer``: gradients of replicated parameters are summed, then weights updated.

    Without ``optimizer_sync`` no stage waits until all agree on gradient norm and infinities. Weights are updated at
    once, and put back in the rare case that the answer is no (arXiv 2401.10241, section 4).
    """
    workload, parallelism = context.workload, context.parallelism
    ready = gradients_ready(lanes)
    ops = optimizer_ops(workload, context.weights)
    if parallelism.server_count:
        steps = [Step("optimizer", Block("optimizer", ops), ready, phase=StepPhase.OPTIMIZER)] if ops else []
        return with_steps(lanes, [*lanes[COMPUTE_LANE], *steps])
    ops = (*replicated_gradient_ops(workload, context.weights, context.stages.seat), *ops)
    late = [
        op for op in ops if isinstance(op, Comm) and op.axis in (Axis.MP, Axis.EMP) and not parallelism.optimizer_sync
    ]
    compute = list(lanes[COMPUTE_LANE])
    block = Block("optimizer", tuple(op for op in ops if op not in late))
    if block.ops:
        on_gpu = parallelism.offload.optimizer == "none"
        workspace = optimizer_workspace_bytes(workload, context.weights) if on_gpu else 0.0
        freed = made_gradient_bytes(workload, context.weights)
        phase = StepPhase.OPTIMIZER
        compute.append(Step("optimizer", block, ready, phase=phase, free_bytes=freed, workspace_bytes=workspace))
    if not late:
        return with_steps(lanes, compute)
    after = (*ready, *gradients_summed(lanes))
    # The late ones are other stages, where there are any.
    held_up = Purpose.PIPELINE if parallelism.pp > 1 else None
    agreements = [Step(f"validate {op.name}", replace(op, purpose=held_up or op.purpose), after) for op in late]
    return with_steps({**lanes, MP_LANE: agreements}, compute)


def free_input_gradients(lanes: Lanes, context: RankContext) -> Lanes:
    """Give back with the last step of computation the gradients of inputs that torch keeps until then."""
    compute = list(lanes[COMPUTE_LANE])
    split = {(step.stage, step.microbatch) for step in compute if step.phase == StepPhase.INPUT_GRADIENT}
    nbytes = sum(context.stages.variants.parts[stage][0].input_gradient_bytes for stage, _ in split)
    compute[-1] = replace(compute[-1], free_bytes=compute[-1].free_bytes + nbytes)
    return with_steps(lanes, compute)
