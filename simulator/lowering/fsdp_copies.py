"""Copies between parameters and the flat buffers that torch's ``fully_shard`` gathers and reduces."""

from __future__ import annotations

from collections.abc import Iterable

from simulator.config import Workload
from simulator.models import Op, Part, Turn
from simulator.operations.weights import by_axis, elements_by_axis, gathered_weight_bytes
from simulator.program import MAKE_GRADIENTS, Compute, Memory, StepPhase
from simulator.units import DTYPE_BYTES


def with_copies(workload: Workload, part: Part, kind: str, turn: Turn) -> list[Op]:
    """Return the pass ``kind`` of a part with the copies before and, of a unit of its own, after it.

    Before parameters are gathered a rank casts its fp32 shard and copies it to where it is gathered
    (``all_gather_copy_in``). What is gathered in 8 bits needs the largest magnitude of the tensor first, which is found
    for the forward pass (torchao/float8/fsdp_utils.py). From there the whole goes to the parameters
    (``foreach_all_gather_copy_out``).

    Before gradients are reduced they are put side by side, cut by rank, in the type in which they are reduced
    (``foreach_reduce_scatter_copy_in``). The reduced shard is cast to the type of its weights. It is the gradient of
    the first micro-batch; those of others are added to it (``foreach_reduce``). See
    torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.

    The first two and the last two run on streams of their own in torch. Here they stand in the pass, where they take
    the memory's time all the same.
    """
    after = copies_after(workload, [part], kind, turn) if part.is_unit else ()
    return [*copies_before(workload, part, kind), *part.ops(kind), *after]


def copies_before(workload: Workload, part: Part, kind: str) -> list[Op]:
    """Return the copies before the pass ``kind`` of a part.

    Parameters that are not dropped after the forward pass have none before the backward pass. These are the root's, or
    without ``reshard_after_forward`` all. A part that runs nothing in the pass, as frozen first layers backward, has
    none either.
    """
    whole, share = _gathered_bytes(workload, part)
    gathers = kind == "F" or (kind in ("B", "I") and part.is_unit and workload.parallelism.reshard_after_forward)
    if not (workload.replication.fully_sharded and gathers and whole and part.ops(kind)):
        return []
    phase = "F" if kind == "F" else "B"
    copies = [
        _copy("fsdp.gather copy in", "foreach_copy", share, share, phase),
        _copy("fsdp.gather copy out", "split_copy", whole, whole, phase),
    ]
    training, (_, masters) = workload.training, _trained(workload, part)
    if workload.replication.weights_are_masters and training.trained_dtype != "fp32" and masters:
        read, narrow = DTYPE_BYTES["fp32"] * masters, _shard_elements_in_8_bits(workload, part)
        written = DTYPE_BYTES[training.trained_dtype] * (masters - narrow) + narrow
        copies.insert(0, _copy("fsdp.cast", "optimizer", read, written, phase))
        if narrow and kind == "F":
            copies.insert(0, _copy("fsdp.amax", "fp8_amax", DTYPE_BYTES["fp32"] * narrow, 0, phase))
    return copies


def copies_after(workload: Workload, parts: Iterable[Part], kind: str, turn: Turn) -> list[Op]:
    """Return the copies of a unit of ``parts`` after the pass ``kind`` that has made all its gradients.

    ``turn``: of the micro-batch, whose gradients may be added up whole before they are reduced.
    """
    making = [part for part in parts if kind in MAKE_GRADIENTS and part.ops(kind) and _trained(workload, part)[0]]
    if not making:
        return []
    training = workload.training
    params, share = (sum(_trained(workload, part)[which] for part in making) for which in (0, 1))
    new, written = (DTYPE_BYTES[dtype] * float(params) for dtype in (training.trained_dtype, training.grad_dtype))
    copies: list[Op] = []
    read = new
    if workload.adds_whole_gradients and not (turn.first and turn.last):
        copies, read = _added_whole(new, written, turn), written
        if not turn.last:
            return copies
    copies.append(_copy("fsdp.reduce copy in", "chunk_upcast" if written > read else "chunk_cat", read, written, "W"))
    reduced, kept = (DTYPE_BYTES[dtype] * share for dtype in (training.grad_dtype, workload.kept_gradient_dtype))
    if kept > reduced:
        copies.append(_copy("fsdp.shard cast", "upcast", reduced, kept, "W"))
    if workload.adds_whole_gradients:
        return copies
    if workload.replication.hands_over_gradients and not any(part.left_gradient_bytes for part in making):
        copies.append(_copy("fsdp.accumulate", "residual", 2 * kept, kept, "W"))
    return copies


def _added_whole(new: float, kept: float, turn: Turn) -> list[Op]:
    """Return the kernels that add new gradients of ``new`` bytes to the whole ones, which take ``kept`` bytes.

    New gradients of the first micro-batch become the whole ones, after a cast if these have another type
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``to_accumulated_grad_if_needed``,
    ``accumulate_unsharded_grad_if_needed``). Where the type is the same autograd adds later gradients to them.
    """
    if not turn.first:
        return [_copy("fsdp.add grads", "residual", new + kept, kept, "W")]
    return [_copy("fsdp.cast grads", "upcast", new, kept, "W")] if kept != new else []


def _gathered_bytes(workload: Workload, part: Part) -> tuple[float, float]:
    """Return the bytes of a part's weights that are sharded, and of the shards of one rank."""
    shards = workload.parallelism.shards
    split = {axis: gathered_weight_bytes(group) for axis, group in by_axis(part.weights).items() if shards(axis) > 1}
    return sum(split.values()), sum(nbytes / shards(axis) for axis, nbytes in split.items())


def _shard_elements_in_8_bits(workload: Workload, part: Part) -> float:
    """Return the elements of one rank's shards that are gathered in 8 bits."""
    shards = workload.parallelism.shards
    return sum(weight.elements / shards(weight.axis) for weight in part.weights if weight.gathered_in_8_bits)


def _trained(workload: Workload, part: Part) -> tuple[int, float]:
    """Return the elements of a part's trained weights that are sharded, and of the shards of one rank."""
    shards = workload.parallelism.shards
    split = {axis: count for axis, count in elements_by_axis(part.weights).items() if shards(axis) > 1}
    return sum(split.values()), sum(count / shards(axis) for axis, count in split.items())


def _copy(name: str, op: str, read: float, written: float, phase: str) -> Op:
    return Compute(name, Memory(op, read, written), StepPhase(phase))
