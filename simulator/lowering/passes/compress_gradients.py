"""Gradients are packed before they are reduced, and unpacked after, or copied to and from where they are reduced.

With ``fp8`` NCCL adds up 8-bit floating point numbers that share a scale (FP8-LM, arXiv 2310.18313, section 2.1).

With ``int8`` numbers have different scales and cannot be added on the way. Each rank gets its part of all others'
gradients (all-to-all), adds them up, and all gather the packed sums. A sharded sum stays where it is (ZeRO++, arXiv
2306.10209, section 3.3).

With ``1bit`` it is so with signs, of momentum and what earlier rounding has lost, on both sides (1-bit Adam, arXiv
2102.02888, algorithm 1 and section 5).

With ``copy_to_buckets`` and no compression gradients are copied into a bucket, and back from an all-reduce (DeepSpeed's
``allreduce_bucket``). A sharded sum is read where it is, or each rank copies its shard (`Replication.shards_buckets`).
DeepSpeed then divides the bucket by the number of ranks, and puts it together anew. Stages 1 and 2 do the latter where
the bucket has parts for several ranks (``average_tensor``, ``copy_grads_in_partition``), stage 3 does it always
(``reduce_scatter_coalesced``, ``partition_grads``).

The volume falls by the ratio of the elements' sizes: an all-to-all and an all-gather move what a ring's all-reduce
does. Buckets are packed where their gradients are complete, and unpacked where the compute lane first waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from simulator.lowering.lanes import REDUCTION, Lanes, off_compute
from simulator.lowering.rank_context import RankContext
from simulator.operations.weights import by_axis, elements, trained
from simulator.program import (
    COMPUTE_LANE,
    AllToAll,
    Block,
    Collective,
    CollectiveKind,
    Comm,
    Compute,
    LaneSteps,
    Memory,
    Step,
    StepPhase,
    undivided,
)
from simulator.units import DTYPE_BYTES

#: Bytes of a packed element.
ELEMENT_BYTES = {"fp8": 1.0, "int8": 1.0, "1bit": 1 / 8}
#: Bytes of an element of the rounding error, which is kept for the next step.
ERROR_BYTES = 4.0


@dataclass(frozen=True)
class _Packed:
    """Steps in place of a reduction: kernels before, transfers, kernels where the result is needed."""

    pack: Step
    transfers: tuple[Step, ...]
    unpack: tuple[Step, ...]


def compress_gradients(lanes: Lanes, context: RankContext) -> Lanes:
    """Pack the gradients that reductions send, as ``grad_compression`` and ``copy_to_buckets`` say."""
    workload = context.workload
    if workload.parallelism.grad_compression == "none" and not workload.parallelism.copy_to_buckets:
        return lanes
    copied = _copied_by_shard if workload.replication.shards_buckets else _packed
    packed = {step.label: copied(context, step) for step in off_compute(lanes) if _is_reduction(step)}
    beside_compute = {lane: steps for lane, steps in lanes.items() if lane != COMPUTE_LANE}
    unpacked = {label: one.unpack[-1].label for label, one in packed.items() if one.unpack}
    whole: dict[str, list[Step]] = {lane: [] for lane in lanes}
    for lane, steps in beside_compute.items():
        for step in steps:
            for new in _replaced(step, packed, unpacked):
                stream = new.op.lane if step.label in packed and isinstance(new.op, Comm) else lane
                whole.setdefault(stream, []).append(new)
    whole[COMPUTE_LANE] = _with_kernels(lanes[COMPUTE_LANE], packed, _needs(packed, beside_compute))
    return {lane: LaneSteps.from_steps(steps) for lane, steps in whole.items()}


def _is_reduction(step: Step) -> bool:
    """Return True for the reduction of whole gradients; those of shards, on a stream of their own, are not packed."""
    return step.label.startswith(REDUCTION) and isinstance(step.op, Collective) and not step.op.stream


def _replaced(step: Step, packed: Mapping[str, _Packed], unpacked: Mapping[str, str]) -> tuple[Step, ...]:
    """Return a reduction as its transfers. Other steps that wait for one wait until that is unpacked."""
    if step.label in packed:
        return packed[step.label].transfers
    return (replace(step, after=tuple(unpacked.get(label, label) for label in step.after)),)


def _needs(packed: Mapping[str, _Packed], beside_compute: Lanes) -> dict[str, dict[str, None]]:
    """Return, by label of a step beside computation, the reductions that have to be unpacked for it.

    A step waits for them itself, or for steps that do, such as those before it on its lane.
    """
    needs: dict[str, dict[str, None]] = {label: {label: None} for label in packed}
    growing = True
    while growing:
        growing = False
        for steps in beside_compute.values():
            previous: tuple[str, ...] = ()
            for step in steps:
                through = {label: None for before in (*previous, *step.after) for label in needs.get(before, ())}
                if step.label not in packed:
                    if through.keys() - needs.get(step.label, {}).keys():
                        needs[step.label] = through
                        growing = True
                    previous = (step.label,)
    return needs


def _with_kernels(
    compute: Sequence[Step], packed: Mapping[str, _Packed], needs: Mapping[str, Mapping[str, None]]
) -> list[Step]:
    """Return the compute lane with kernels that pack and unpack.

    Gradients are packed after the computation that completes them. They are unpacked before the first step that waits
    for their reduction.
    """
    ready: dict[str, list[str]] = {}
    labels = {step.label for step in compute}
    for name, one in packed.items():
        ready.setdefault(next(label for label in one.pack.after if label in labels), []).append(name)
    waiting: dict[str, _Packed] = {}
    whole: list[Step] = []
    for step in compute:
        needed = dict.fromkeys(name for label in step.after for name in needs.get(label, ()))
        whole += _unpack([waiting.pop(name) for name in needed if name in waiting])
        whole.append(step)
        for name in ready.get(step.label, ()):
            whole.append(packed[name].pack)
            waiting[name] = packed[name]
    return whole + _unpack(list(waiting.values()))


def _unpack(needed: Sequence[_Packed]) -> list[Step]:
    """Return the kernels that unpack several reductions, each kind for all of them before the next."""
    stages = max((len(one.unpack) for one in needed), default=0)
    return [one.unpack[number] for number in range(stages) for one in needed]


def _copied_by_shard(context: RankContext, step: Step) -> _Packed:
    """Return a reduction with DeepSpeed's copies into a bucket, and of this rank's shard from it.

    Up to stage 2 all gradients lie in a row, which is cut by rank: as many buckets as there are cuts have parts for
    several ranks.
    """
    workload, comm, layout = context.workload, step.op, context.parallelism
    if layout.grad_compression != "none":
        return _packed(context, step)
    assert isinstance(comm, Collective)
    axis = undivided(comm.axis)
    shards, nbytes = layout.shards(axis), comm.nbytes
    weights = by_axis(trained(context.weights))[axis]
    whole = DTYPE_BYTES[workload.training.grad_dtype] * elements(weights)
    tensors = max(round(len(weights) * nbytes / whole), 1)
    joined = nbytes if layout.zero == 3 else nbytes * min((shards - 1) * layout.bucket_bytes / whole, 1.0)

    def kernel(name: str, op: str, moved: float, launches: int = 1) -> Compute:
        return Compute(f"dp.{name} grads", Memory(op, moved, moved, launches=launches), StepPhase.OPTIMIZER)

    def step_of(verb: str, *ops: Compute, after: Sequence[str]) -> Step:
        moved = replace(step, label=f"{verb} {step.label}", op=Block(verb, ops), phase=StepPhase.OPTIMIZER)
        return replace(moved, after=tuple(after), alloc_bytes=0.0, free_bytes=0.0)

    into = [kernel("copy", "copy", nbytes, tensors), kernel("scale", "activation", nbytes)]
    if joined:
        into.append(kernel("join", "copy", joined))
    pack = step_of("copy", *into, after=step.after)
    back = step_of("copy back", kernel("copy back", "copy", nbytes / shards, tensors), after=(step.label,))
    return _Packed(pack, (replace(step, after=(pack.label,)),), (back,))


def _packed(context: RankContext, step: Step) -> _Packed:
    """Return the steps in place of ``step``, a reduction; see the module."""
    workload, comm = context.workload, step.op
    assert isinstance(comm, Collective)
    layout = workload.parallelism
    kind, n = layout.grad_compression, layout.replicas(undivided(comm.axis))
    grad = DTYPE_BYTES[workload.training.grad_dtype]
    count = comm.nbytes / grad
    lost = ERROR_BYTES if kind == "1bit" else 0.0
    sharded = comm.op == CollectiveKind.REDUCE_SCATTER
    part = count / n

    def kernel(verb: str, op: str, read: float, write: float, *after: str) -> Step:
        ops = (Compute(f"dp.{verb} grads", Memory(op, read, write), StepPhase.OPTIMIZER),)
        moved = replace(step, label=f"{verb} {step.label}", op=Block(verb, ops), after=after, phase=StepPhase.OPTIMIZER)
        return replace(moved, alloc_bytes=0.0, free_bytes=0.0)  # the first transfer takes and gives back

    def transfer(label: str, op: CollectiveKind, *after: str) -> Step:
        stream = "packed" if op == CollectiveKind.ALL_GATHER else ""
        moved = Collective(f"dp.{op} grads", op, count * element, comm.axis, comm.purpose, stream=stream)
        return replace(step, label=label, op=moved, after=after)

    def exchanged(label: str) -> Step:
        moved = AllToAll("dp.all_to_all grads", count * element, comm.axis, comm.purpose)
        return replace(step, label=label, op=moved, after=(pack.label,))

    if kind == "none":
        copy = kernel("copy", "copy", comm.nbytes, comm.nbytes, *step.after)
        back = kernel("copy back", "copy", comm.nbytes, comm.nbytes, step.label)
        return _Packed(copy, (replace(step, after=(copy.label,)),), () if sharded else (back,))
    element = ELEMENT_BYTES[kind]
    pack = kernel("pack", "cast", count * (grad + lost), count * (element + lost), *step.after)
    if kind == "fp8":
        result = part if sharded else count
        return _Packed(
            pack,
            (transfer(step.label, comm.op, pack.label),),
            (kernel("unpack", "upcast", result * element, result * grad, step.label),),
        )
    if sharded:
        add = kernel("add", "reduce", count * element, part * grad, step.label)
        return _Packed(pack, (exchanged(step.label),), (add,))
    exchange = exchanged(f"exchange {step.label}")
    add = kernel("add", "reduce", count * element + part * lost, part * (element + lost), exchange.label)
    # On a stream of its own: it waits for kernels that come after later exchanges.
    gather = replace(transfer(step.label, CollectiveKind.ALL_GATHER, add.label), alloc_bytes=0.0, free_bytes=0.0)
    unpack = kernel("unpack", "upcast", count * element, count * grad, gather.label)
    return _Packed(pack, (exchange, gather), (add, unpack))
