"""From a workload to the program of one training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from simulator.build.algorithm import with_algorithm
from simulator.build.gradients import Bucket, Mark, buckets, gradients_complete, parameters_used
from simulator.build.layout import layout
from simulator.build.pipeline import Lanes, lower
from simulator.config import Workload
from simulator.model import Part, PassBytes, optimizer_ops, pass_bytes, replicated_gradient_ops, stage_parts
from simulator.program import Block, Comm, Compute, Program, Role, Step
from simulator.program.ops import COMPUTE_LANE
from simulator.schedules import Action
from simulator.units import DTYPE_BYTES

DP_LANE = "dp"


def build_program(workload: Workload) -> Program:
    """One training step of ``workload``: a role per pipeline rank, shared by its tensor- and data-parallel ranks."""
    placed = layout(workload)
    stages = _Stages(workload)
    parallelism = workload.parallelism
    schedule = parallelism.plan
    order = schedule.order(parallelism.pp, workload.microbatches, parallelism.vpp)
    lanes = lower(order, schedule, parallelism.n_stages, stages.hop_bytes, stages.step, overlap=parallelism.overlap.p2p)
    roles = tuple(
        Role(f"stage{rank}", {lane: tuple(steps) for lane, steps in _tail(workload, stages, rank, of_rank).items()})
        for rank, of_rank in enumerate(lanes)
    )
    if parallelism.collective_algorithm != "auto":
        roles = with_algorithm(roles, parallelism.collective_algorithm)
    return Program(roles, placed.pipeline_rank, placed.groups, workload.name)


class _Stages:
    """The blocks of every model stage, each distinct one built once."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        parallelism = workload.parallelism
        self.n_stages = parallelism.n_stages
        self.parts = [stage_parts(workload, stage) for stage in range(self.n_stages)] * parallelism.plan.copies
        self._chunk = {
            stage: chunk for rank in range(parallelism.pp) for chunk, stage in enumerate(parallelism.stages_of(rank))
        }
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._pass_of: dict[tuple[int, str], tuple[Block, PassBytes]] = {}

    @cached_property
    def activation_bytes(self) -> float:
        """What passes between layers: b s h elements."""
        training = self.workload.training
        element = DTYPE_BYTES[training.precision]
        return float(training.micro_batch * training.seq * self.workload.model.hidden * element)

    @cached_property
    def hop_bytes(self) -> float:
        """What one rank sends to the next stage: with sequence parallelism or scatter/gather its share of tp."""
        parallelism = self.workload.parallelism
        shared = parallelism.sequence_parallel or parallelism.scatter_gather_p2p
        return self.activation_bytes / (parallelism.tp if shared else 1)

    def params(self, stage: int) -> int:
        """Parameters of a stage on one tensor-parallel rank."""
        return sum(part.params for part in self.parts[stage])

    def gradients_complete(self, step: Step) -> list[Mark]:
        """Where the backward pass ``step`` completes gradients; what stands before the parts' own ops counts."""
        parts = self.parts[step.stage]
        own = sum(len(_ops((part,), step.phase)) for part in parts)
        return gradients_complete(parts, self._n_ops(step) - own, whole=step.phase == "B")

    def parameters_used(self, step: Step) -> list[Mark]:
        """Where the forward pass ``step`` has used parameters."""
        parts = self.parts[step.stage]
        return parameters_used(parts, self._n_ops(step) - sum(len(part.forward) for part in parts))

    def _n_ops(self, step: Step) -> int:
        return len(self._pass_of[step.stage, step.phase][0].ops)

    def step(self, action: Action) -> Step:
        """The compute step of an action, with what it holds and gives back."""
        key = (action.stage, action.kind)
        if key not in self._pass_of:
            self._pass_of[key] = self._block(*key), pass_bytes(self.parts[action.stage], action.kind)
        block, moved = self._pass_of[key]
        return Step(
            str(action),
            block,
            phase=action.kind,
            microbatch=action.microbatch,
            stage=action.stage,
            chunk=self._chunk[action.stage],
            alloc_bytes=moved.alloc,
            free_bytes=moved.free,
            workspace_bytes=moved.workspace,
        )

    def _block(self, stage: int, kind: str) -> Block:
        parts = self.parts[stage]
        place = stage % self.n_stages
        arrives = {"F": place > 0, "W": False}.get(kind, place < self.n_stages - 1)
        parallelism = self.workload.parallelism
        gathered = parallelism.scatter_gather_p2p and parallelism.tp > 1 and arrives
        key = (kind, gathered, tuple(id(part) for part in parts))
        if key not in self._blocks:
            ops = _ops(parts, kind)
            if gathered:
                ops.insert(0, Comm("tp.all_gather p2p", "all_gather", self.activation_bytes, "tp", "tp"))
            self._blocks[key] = Block(f"{kind} {'+'.join(_runs(parts))}", tuple(ops))
        return self._blocks[key]


def _ops(parts: tuple[Part, ...], kind: str) -> list[Compute | Comm]:
    back = parts[::-1]
    match kind:
        case "F":
            return [op for part in parts for op in part.forward]
        case "B":
            return [op for part in back for op in (*part.recompute, *part.backward)]
        case "I":
            return [op for part in back for op in (*part.recompute, *part.input_grad)]
        case _:
            return [op for part in back for op in part.weight_grad]


def _runs(parts: tuple[Part, ...]) -> list[str]:
    """Names of parts with repeats counted: embedding, 8 layer."""
    counts: dict[str, int] = {}
    for part in parts:
        counts[part.name] = counts.get(part.name, 0) + 1
    return [name if count == 1 else f"{count} {name}" for name, count in counts.items()]


def _tail(workload: Workload, stages: _Stages, rank: int, lanes: Lanes) -> dict[str, list[Step]]:
    """Add gradient reduction, the optimizer and parameter gathering to a pipeline rank's lanes."""
    parallelism = workload.parallelism
    own = parallelism.stages_of(rank)
    params = sum(stages.params(stage) for stage in own)
    compute = list(lanes[COMPUTE_LANE])
    # Blocking transfers hold up the host, and so all that follows the pipeline.
    drained = (lanes["pp"][-1].label,) if "pp" in lanes else ()
    reductions: list[Step] = []
    if parallelism.dp > 1:
        compute, reductions = _reduce(workload, stages, own, compute, drained)
    ready = (*drained, *(step.label for step in reductions))
    twins = _twin_gradients(workload, params, ready)
    ready = (*ready, *(step.label for step in twins))
    compute += [*twins, *_embedding_gradients(workload, rank, ready)]
    replicated = replicated_gradient_ops(workload, [part for stage in own for part in stages.parts[stage]])
    ops = (*replicated, *optimizer_ops(workload, params))
    compute.append(Step("optimizer", Block("optimizer", ops), ready, phase="O"))
    of_dp = reductions
    if parallelism.zero == 1 and parallelism.dp > 1:
        if parallelism.overlap.param_gather:
            compute, gathers = _gather_beside_the_first(workload, stages, compute)
            of_dp = [*gathers, *reductions]
        else:
            of_dp = [*reductions, *_gather_at_the_end(workload, stages, own)]
    return {**lanes, COMPUTE_LANE: compute, **({DP_LANE: of_dp} if of_dp else {})}


def _reduce(
    workload: Workload, stages: _Stages, own: Sequence[int], compute: list[Step], drained: tuple[str, ...]
) -> tuple[list[Step], list[Step]]:
    """Gradient reduction over dp: in buckets beside the last backward passes, or all at once after them."""
    parallelism = workload.parallelism
    grad_bytes = DTYPE_BYTES[workload.training.grad_dtype]

    def reduction(label: str, params: int, *after: str) -> Step:
        op = "reduce_scatter" if parallelism.zero == 1 else "all_reduce"
        name = f"dp.{op} grads"
        comm = Comm(name, op, float(params * grad_bytes), "dp", "dp")
        return Step(label, comm, after)

    if not parallelism.overlap.grad_reduce:
        total = sum(stages.params(stage) for stage in own)
        return compute, [reduction("reduce grads", total, compute[-1].label, *drained)]
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
        reductions += [
            reduction(f"reduce {step.stage}.{number}", part.params, piece.label)
            for number, (part, piece) in enumerate(zip(parts, pieces, strict=True))
        ]
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


def _twin_gradients(workload: Workload, params: int, ready: tuple[str, ...]) -> list[Step]:
    """Where two ranks hold the same stages, they add up what each has reduced over dp: of ZeRO-1 its own share."""
    parallelism = workload.parallelism
    if parallelism.plan.copies == 1:
        return []
    shared = parallelism.dp if parallelism.zero else 1
    nbytes = params * DTYPE_BYTES[workload.training.grad_dtype] / shared
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


def _gather(workload: Workload, label: str, params: int, *after: str) -> Step:
    """ZeRO-1: every rank has updated its share of ``params`` parameters; all get all, in the working precision."""
    nbytes = float(params * DTYPE_BYTES[workload.training.precision])
    return Step(label, Comm("dp.all_gather params", "all_gather", nbytes, "dp", "dp"), after)


def _gather_at_the_end(workload: Workload, stages: _Stages, own: Sequence[int]) -> list[Step]:
    return [_gather(workload, f"gather {stage}", stages.params(stage), "optimizer") for stage in own]


def _gather_beside_the_first(workload: Workload, stages: _Stages, compute: list[Step]) -> tuple[list[Step], list[Step]]:
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
            gathers.append(_gather(workload, f"gather {step.stage}.{number}", part.params))
            cut.append(replace(piece, after=(*piece.after, gathers[-1].label)))
    return cut, gathers
