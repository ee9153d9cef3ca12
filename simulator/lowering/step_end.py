"""What data parallelism adds to a pipeline's passes, and what follows them: gradient reduction, the optimizer, and the
gathering of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.config import Workload
from simulator.lowering.activations import offload_activations
from simulator.lowering.communicators import take_turns
from simulator.lowering.compression import compressed
from simulator.lowering.fsdp import fully_sharded
from simulator.lowering.gradients import Bucket, buckets, pieces
from simulator.lowering.offload import gradients_to_host, parameters_to_host, update_on_host
from simulator.lowering.pipeline import Lanes
from simulator.lowering.sharding import Reductions, gather, gathers_by_unit, gradient_bytes, leaving
from simulator.lowering.stages import Stages, Variant
from simulator.models import (
    made_gradient_bytes,
    optimized,
    optimizer_ops,
    optimizer_workspace_bytes,
    replicated_gradient_ops,
)
from simulator.models.weight_names import WORDS
from simulator.operations.weights import Weight, elements
from simulator.program import COMPUTE_LANE, Axis, Block, Collective, CollectiveKind, Comm, Purpose, Step, StepPhase
from simulator.units import DTYPE_BYTES

MP_LANE = "mp"


def tail(workload: Workload, stages: Stages, rank: int, lanes: Lanes) -> dict[str, list[Step]]:
    """Add gradient reduction, the optimizer and parameter gathering to a pipeline rank's lanes.

    With the rank's last step go the gradients of inputs that torch keeps until then.
    Without ``optimizer_sync`` what all stages have to agree on (gradient norm, infinities) holds nobody up: weights are
    updated at once, and put back in the rare case that the answer is no (arXiv 2401.10241, section 4).
    """
    parallelism = workload.parallelism
    activations = parallelism.offload.activations
    own = parallelism.stages_of(rank)
    weights = stages.weights(*own)
    compute = list(lanes[COMPUTE_LANE])
    of_inputs = sum(stages.parts[step.stage][0].input_gradient_bytes for step in compute if step.phase == "I")
    # Blocking transfers hold up the host, and so all that follows the pipeline.
    drained = (lanes["pp"][-1].label,) if "pp" in lanes else ()
    gathers: list[Step] = []
    reductions = Reductions(workload)
    if leaving(parallelism, weights) or parallelism.offload.parameters != "none":
        if gathers_by_unit(workload, weights):
            compute, gathers = fully_sharded(workload, stages, own, compute, reductions)
        elif parallelism.zero == 2 or parallelism.overlap.grad_reduce:
            compute = _reduce_in_buckets(workload, stages, compute, reductions)
        else:
            reductions.add("reduce grads", weights, (compute[-1].label, *drained))
    ready = (*drained, *(step.label for step in reductions.steps))
    if parallelism.server_count:
        compute.append(
            Step("optimizer", Block("optimizer", optimizer_ops(workload, weights)), ready, phase=StepPhase.OPTIMIZER)
        )
        compute[-1] = replace(compute[-1], free_bytes=compute[-1].free_bytes + of_inputs)
        return offload_activations(activations, stages, _with(lanes, compute, reductions.steps))
    twins = _twin_gradients(workload, weights, ready)
    ready = (*ready, *(step.label for step in twins))
    tied = _embedding_gradients(workload, rank, weights, ready)
    compute += [*twins, *tied]
    replicated = replicated_gradient_ops(workload, weights, stages.seat)
    beside: list[Step] = []
    if parallelism.offload.optimizer != "none" and tied:
        beside = _copied_again(workload, tied[0])
        ready = (*ready, *(step.label for step in beside))
    ops = (*replicated, *optimizer_ops(workload, weights))
    late = [
        op for op in ops if isinstance(op, Comm) and op.axis in (Axis.MP, Axis.EMP) and not parallelism.optimizer_sync
    ]
    block = Block("optimizer", tuple(op for op in ops if op not in late))
    begin = (compute[-1].label, *ready)
    if block.ops:
        needs = 0.0 if parallelism.offload.optimizer != "none" else optimizer_workspace_bytes(workload, weights)
        made = made_gradient_bytes(workload, weights)
        compute.append(
            Step("optimizer", block, ready, phase=StepPhase.OPTIMIZER, free_bytes=made, workspace_bytes=needs)
        )
        begin = ("optimizer",)
    compute[-1] = replace(compute[-1], free_bytes=compute[-1].free_bytes + of_inputs)
    if parallelism.offload.optimizer != "none":
        updates, begin = update_on_host(workload, list(reductions.on_host.values()), begin)
        beside += updates
    else:
        beside += parameters_to_host(workload, optimized(workload, weights), begin)
    after = (*ready, *(step.label for step in tied))
    held_up = Purpose.PIPELINE if parallelism.pp > 1 else None  # what is late are other stages, where there are any
    of_mp = [Step(f"validate {op.name}", replace(op, purpose=held_up or op.purpose), after) for op in late]
    if parallelism.zero in (1, 2):
        # Forwards of the next step that run before this one's optimizer have no use for what it gathers.
        if parallelism.overlap.param_gather and parallelism.plan.drains:
            compute, gathers = _gather_beside_the_first(workload, stages, compute)
        else:
            gathers = _gather_at_the_end(workload, stages, own, begin)
    whole = _with({**lanes, **({MP_LANE: of_mp} if of_mp else {})}, compute, [*gathers, *reductions.steps, *beside])
    whole = compressed(workload, offload_activations(activations, stages, whole), reductions.over_replicas)
    return take_turns(whole)


def _with(lanes: Lanes, compute: list[Step], added: Sequence[Step]) -> Lanes:
    """``lanes`` with another compute lane, and communication on the lane that its kind has."""
    whole = {lane: list(steps) for lane, steps in lanes.items()} | {COMPUTE_LANE: compute}
    for step in added:
        assert isinstance(step.op, Comm)
        whole.setdefault(step.op.lane, []).append(step)
    return whole


def _reduce_in_buckets(
    workload: Workload, stages: Stages, compute: Sequence[Step], reductions: Reductions
) -> list[Step]:
    """Gradients reduce in buckets beside the pass that makes them: the last of a stage, under ZeRO-2 every one."""
    parallelism = workload.parallelism
    grad_bytes = DTYPE_BYTES[workload.training.grad_dtype]
    each = parallelism.zero == 2
    last = {step.stage: step.label for step in compute if step.phase in ("B", "W")}
    parts_of: dict[Variant, list[Bucket]] = {}
    cut: list[Step] = []
    for step in compute:
        waits = reductions.waits() if each else ()
        makes = step.phase in ("B", "W") and (each or last[step.stage] == step.label)
        if not makes or not isinstance(step.op, Block):
            cut.append(replace(step, after=(*step.after, *waits)) if waits else step)
            continue
        key = stages.variant(step)
        if key not in parts_of:
            marks = stages.gradients_complete(step)
            parts_of[key] = buckets(step.op, marks, grad_bytes, parallelism.bucket_bytes)
        for number, (part, piece) in enumerate(
            zip(parts_of[key], pieces(step, [part.block for part in parts_of[key]]), strict=True)
        ):
            waits = reductions.waits() if each else ()
            held = piece.alloc_bytes + gradient_bytes(workload, part.weights)
            cut.append(replace(piece, after=(*piece.after, *waits), alloc_bytes=held))
            label = f"reduce {step.label}.{number}" if each else f"reduce {step.stage}.{number}"
            reductions.add(label, part.weights, (piece.label,), step if each else None)
    return cut


def _twin_gradients(workload: Workload, weights: Sequence[Weight], ready: tuple[str, ...]) -> list[Step]:
    """Where two ranks hold the same stages, they add up what each has reduced over dp: under ZeRO its own shard."""
    if workload.parallelism.plan.copies == 1:
        return []
    nbytes = optimized(workload, weights) * DTYPE_BYTES[workload.training.grad_dtype]
    comm = Collective("dp.all_reduce twin grads", CollectiveKind.ALL_REDUCE, nbytes, Axis.TWIN, Purpose.DATA)
    return [Step("twin grads", comm, ready)]


def _embedding_gradients(
    workload: Workload, rank: int, weights: Sequence[Weight], ready: tuple[str, ...]
) -> list[Step]:
    """Return the sum of the embedding table's gradients where first and last stage hold a copy each.

    Tied embeddings and multi-token prediction need it. Of sharded gradients the shards are summed.
    """
    parallelism = workload.parallelism
    if not workload.model.table_at_both_ends or parallelism.table_in_place or rank not in parallelism.ends:
        return []
    table = elements(weight for weight in weights if WORDS in (weight.name, weight.tied_to))
    shards = parallelism.shards("dp") if parallelism.zero >= 2 else 1
    nbytes = table * DTYPE_BYTES[workload.training.grad_dtype] / shards
    comm = Collective(
        "pp.all_reduce embedding grads", CollectiveKind.ALL_REDUCE, nbytes, Axis.EMBEDDING, Purpose.PIPELINE
    )
    return [Step("embedding grads", comm, ready)]


def _copied_again(workload: Workload, tied: Step) -> list[Step]:
    """Where the host has its copy of an embedding's gradients already when first and last stage add them up."""
    assert isinstance(tied.op, Comm)
    rows = tied.op.nbytes / DTYPE_BYTES[workload.training.grad_dtype]
    return gradients_to_host(workload, tied.label, rows, (tied.label,), 0.0, None)


def _gather_at_the_end(workload: Workload, stages: Stages, own: Sequence[int], updated: tuple[str, ...]) -> list[Step]:
    gathers = [step for stage in own for step in gather(workload, f"gather {stage}", stages.weights(stage))]
    return [replace(step, after=updated) for step in gathers]


def _gather_beside_the_first(workload: Workload, stages: Stages, compute: list[Step]) -> tuple[list[Step], list[Step]]:
    """Parameters gather in buckets beside each chunk's first forward pass, which is what the step before left to do:
    a piece of the pass waits for the parameters that it uses."""
    bucket_bytes = workload.parallelism.bucket_bytes
    seen: set[int] = set()
    cut: list[Step] = []
    gathers: list[Step] = []
    for step in compute:
        if step.phase != "F" or step.stage in seen or not isinstance(step.op, Block):
            cut.append(step)
            continue
        seen.add(step.stage)
        parts = buckets(step.op, stages.weights_used(step), DTYPE_BYTES[workload.training.precision], bucket_bytes)
        for number, (part, piece) in enumerate(zip(parts, pieces(step, [part.block for part in parts]), strict=True)):
            needed = gather(workload, f"gather {step.stage}.{number}", part.weights)
            gathers += needed
            cut.append(replace(piece, after=(*piece.after, *(one.label for one in needed))))
    return cut, gathers
