"""What follows a pipeline's passes: gradient reduction, the optimizer, and the gathering of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from simulator.build.gradients import Bucket, buckets
from simulator.build.pipeline import Lanes
from simulator.build.stages import Stages
from simulator.config import Parallelism, Workload
from simulator.model import optimized, optimizer_ops, optimizer_workspace_bytes, replicated_gradient_ops
from simulator.program import Block, Comm, Step
from simulator.program.ops import COMPUTE_LANE
from simulator.units import DTYPE_BYTES

DP_LANE, MP_LANE = "dp", "mp"


def tail(workload: Workload, stages: Stages, rank: int, lanes: Lanes) -> dict[str, list[Step]]:
    """Add gradient reduction, the optimizer and parameter gathering to a pipeline rank's lanes.

    Without ``optimizer_sync`` what all stages have to agree on (gradient norm, infinities) holds nobody up: weights are
    updated at once, and put back in the rare case that the answer is no (arXiv 2401.10241, section 4).
    """
    parallelism = workload.parallelism
    own = parallelism.stages_of(rank)
    params = stages.params(*own)
    compute = list(lanes[COMPUTE_LANE])
    # Blocking transfers hold up the host, and so all that follows the pipeline.
    drained = (lanes["pp"][-1].label,) if "pp" in lanes else ()
    reductions: list[Step] = []
    if _shared(parallelism, params):
        compute, reductions = _reduce(workload, stages, own, compute, drained)
    ready = (*drained, *(step.label for step in reductions))
    twins = _twin_gradients(workload, params, ready)
    ready = (*ready, *(step.label for step in twins))
    tied = _embedding_gradients(workload, rank, ready)
    compute += [*twins, *tied]
    replicated = replicated_gradient_ops(workload, [part for stage in own for part in stages.parts[stage]])
    ops = (*replicated, *optimizer_ops(workload, params))
    late = [op for op in ops if isinstance(op, Comm) and op.axis == "mp" and not parallelism.optimizer_sync]
    block = Block("optimizer", tuple(op for op in ops if op not in late))
    needs = optimizer_workspace_bytes(workload, params)
    compute.append(Step("optimizer", block, ready, phase="O", workspace_bytes=needs))
    after = (*ready, *(step.label for step in tied))
    of_mp = [Step(f"validate {op.name}", replace(op, purpose="pp"), after) for op in late]
    of_dp = reductions
    if parallelism.zero == 1 and _shared(parallelism, params):
        # Forwards of the next step that run before this one's optimizer have no use for what it gathers.
        if parallelism.overlap.param_gather and parallelism.plan.drains:
            compute, gathers = _gather_beside_the_first(workload, stages, compute)
            of_dp = [*gathers, *reductions]
        else:
            of_dp = [*reductions, *_gather_at_the_end(workload, stages, own)]
    added = {DP_LANE: of_dp, MP_LANE: of_mp}
    return {**lanes, COMPUTE_LANE: compute, **{lane: steps for lane, steps in added.items() if steps}}


def _reduce(
    workload: Workload, stages: Stages, own: Sequence[int], compute: list[Step], drained: tuple[str, ...]
) -> tuple[list[Step], list[Step]]:
    """Gradient reduction over dp: in buckets beside the last backward passes, or all at once after them."""
    parallelism = workload.parallelism
    grad_bytes = DTYPE_BYTES[workload.training.grad_dtype]

    def reduce(label: str, params: Mapping[str, int], *after: str) -> list[Step]:
        op = "reduce_scatter" if parallelism.zero == 1 else "all_reduce"
        return [
            Step(_named(label, axis), Comm(f"dp.{op} grads", op, float(count * grad_bytes), axis, "dp"), after)
            for axis, count in _shared(parallelism, params).items()
        ]

    if not parallelism.overlap.grad_reduce:
        return compute, reduce("reduce grads", stages.params(*own), compute[-1].label, *drained)
    last = {step.stage: step.label for step in compute if step.phase in ("B", "W")}
    cut: list[Step] = []
    reductions: list[Step] = []
    for step in compute:
        if last.get(step.stage) != step.label or not isinstance(step.op, Block):
            cut.append(step)
            continue
        parts = buckets(step.op, stages.gradients_complete(step), grad_bytes, parallelism.bucket_bytes)
        pieces = _pieces(step, parts)
        cut += pieces
        for number, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            reductions += reduce(f"reduce {step.stage}.{number}", part.params, piece.label)
    return cut, reductions


def _pieces(step: Step, parts: list[Bucket]) -> list[Step]:
    """``step`` in parts; the first waits as the whole did, the last carries the label that others wait for."""
    pieces = [
        replace(step, label=f"{step.label}.{number}", op=part.block, after=(), alloc_bytes=0.0, free_bytes=0.0)
        for number, part in enumerate(parts)
    ]
    pieces[0] = replace(pieces[0], after=step.after, alloc_bytes=step.alloc_bytes)
    pieces[-1] = replace(pieces[-1], label=step.label, free_bytes=step.free_bytes)
    return pieces


def _twin_gradients(workload: Workload, params: Mapping[str, int], ready: tuple[str, ...]) -> list[Step]:
    """Where two ranks hold the same stages, they add up what each has reduced over dp: of ZeRO-1 its own share."""
    if workload.parallelism.plan.copies == 1:
        return []
    nbytes = optimized(workload, params) * DTYPE_BYTES[workload.training.grad_dtype]
    comm = Comm("dp.all_reduce twin grads", "all_reduce", nbytes, "twin", "dp")
    return [Step("twin grads", comm, ready)]


def _embedding_gradients(workload: Workload, rank: int, ready: tuple[str, ...]) -> list[Step]:
    """Tied embeddings: where first and last stage hold copies of one table they add up its gradients."""
    parallelism = workload.parallelism
    if not workload.model.tied_embeddings or parallelism.table_in_place or rank not in parallelism.ends:
        return []
    rows = workload.model.padded_vocab(parallelism.tp) // (parallelism.tp if parallelism.vocab_parallel else 1)
    nbytes = float(rows * workload.model.hidden * DTYPE_BYTES[workload.training.grad_dtype])
    comm = Comm("pp.all_reduce embedding grads", "all_reduce", nbytes, "embd", "pp")
    return [Step("embedding grads", comm, ready)]


def _shared(parallelism: Parallelism, params: Mapping[str, int]) -> dict[str, int]:
    """Those of ``params`` (by axis) that several ranks hold."""
    return {axis: count for axis, count in params.items() if parallelism.replicas(axis) > 1}


def _named(label: str, axis: str) -> str:
    """Steps of experts, which have an axis of their own, stand beside those of the rest."""
    return label if axis == "dp" else f"{label} experts"


def _gather(workload: Workload, label: str, params: Mapping[str, int]) -> list[Step]:
    """ZeRO-1: every rank has updated its share of ``params``; all get all, in the working precision."""
    element = DTYPE_BYTES[workload.training.precision]
    return [
        Step(_named(label, axis), Comm("dp.all_gather params", "all_gather", float(count * element), axis, "dp"))
        for axis, count in _shared(workload.parallelism, params).items()
    ]


def _gather_at_the_end(workload: Workload, stages: Stages, own: Sequence[int]) -> list[Step]:
    gathers = [step for stage in own for step in _gather(workload, f"gather {stage}", stages.params(stage))]
    return [replace(step, after=("optimizer",)) for step in gathers]


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
        parts = buckets(step.op, stages.parameters_used(step), DTYPE_BYTES[workload.training.precision], bucket_bytes)
        for number, (part, piece) in enumerate(zip(parts, _pieces(step, parts), strict=True)):
            needed = _gather(workload, f"gather {step.stage}.{number}", part.params)
            gathers += needed
            cut.append(replace(piece, after=(*piece.after, *(one.label for one in needed))))
    return cut, gathers
