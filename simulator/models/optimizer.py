"""The end of a step: gradients of replicated parameters, the optimizer, and the bytes of the model's state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from simulator.config import Workload
from simulator.config.optimizer_choices import choices
from simulator.frameworks.framework import GradientKernels, ReducedGradients
from simulator.models.low_precision import weight_copy_bytes
from simulator.models.parts import Part, weights_of
from simulator.models.routing import routing
from simulator.models.stage import stage_parts
from simulator.models.weight_updates import update_types, weight_updates
from simulator.operations.nodes import Op
from simulator.operations.shapes import ANY_SEAT, Seat
from simulator.operations.weights import EXPERT_AXIS, Weight, by_axis, elements, elements_by_axis, trained, weight_bytes
from simulator.optimizers.update import UpdatedTensor
from simulator.program import REPLICAS, Axis, Collective, CollectiveKind, Compute, Memory, Purpose, StepPhase
from simulator.units import DTYPE_BYTES, FP32_BYTES


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the model's state on one GPU."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def rank_parts(workload: Workload, pipeline_rank: int) -> tuple[Part, ...]:
    """Return every part that a pipeline rank holds, chunk by chunk."""
    layout = workload.parallelism
    return tuple(
        part for stage in layout.stages_of(pipeline_rank) for part in stage_parts(workload, stage % layout.n_stages)
    )


def state_bytes(workload: Workload, pipeline_rank: int) -> StateBytes:
    """Return the bytes of weights, gradients and optimizer state of one GPU of a pipeline rank.

    With fp32 master weights and states a parameter takes 2 + grad_dtype + 12 bytes (arXiv 1910.02054, section 3.1: 16
    with 2-byte gradients). N ranks that share a state divide the 12 under ZeRO-1, the gradients too under ZeRO-2, and
    all of it under ZeRO-3 (section 5, figure 1). Whole parameters and gradients that are alive for a while are the
    program's. A schedule that does not drain keeps several versions of the weights.

    Offloaded bytes are left out, and so are shards of gradients whose optimizer is offloaded, and the bytes on
    parameter servers. Torch's FSDP shards the master weights and has no other shards. Its DDP has buckets, and beside
    them the gradients of several micro-batches until they go there. Adam with 1-bit gradients keeps the errors of its
    rounding, on the sending and on the adding side (arXiv 2102.02888, algorithm 1).
    """
    return state_bytes_of(workload, pipeline_rank, weights_of(rank_parts(workload, pipeline_rank)))


def state_bytes_of(workload: Workload, pipeline_rank: int, weights: Sequence[Weight]) -> StateBytes:
    """Return `state_bytes` of a pipeline rank that holds these ``weights``."""
    training, layout = workload.training, workload.parallelism
    counts, whole, share = elements_by_axis(weights), elements(weights), optimized_elements(workload, weights)
    versions = layout.pipeline_schedule.weight_versions(layout.pp, workload.microbatches, pipeline_rank)
    offload, shards = layout.offload, layout.zero >= 2
    streamed, away = offload.parameters != "none", layout.updates_elsewhere
    lost = 0.0
    if layout.grad_compression == "1bit":
        lost = sum(
            count * (1 + 1 / layout.replicas(axis)) for axis, count in counts.items() if layout.replicas(axis) > 1
        )
    kept = DTYPE_BYTES[training.trained_dtype] * whole if training.keep_gradients else 0
    if workload.replication.in_ddp and workload.microbatches > 1:
        kept += DTYPE_BYTES[training.grad_dtype] * sum(counts[axis] for axis in counts if layout.replicas(axis) > 1)
    return StateBytes(
        weights=(0.0 if streamed else _weight_bytes(workload, weights) * versions)
        + weight_copy_bytes(workload, weights),
        gradients=0.0
        if shards and away
        else DTYPE_BYTES[workload.kept_gradient_dtype] * (share if shards else float(whole)) + kept,
        optimizer=(0.0 if away else _optimizer_bytes(workload, weights)) + FP32_BYTES * lost,
    )


def _optimizer_bytes(workload: Workload, weights: Sequence[Weight]) -> float:
    """Return the bytes of the master weights and of the states of ``weights`` that stay on this GPU."""
    masters = FP32_BYTES if workload.training.optimizer.master_weights else 0
    states = sum(update.state_bytes(paged=False) for update in weight_updates(workload, weights))
    return masters * optimized_elements(workload, weights) + states


def first_update_tensors(workload: Workload, weights: Sequence[Weight]) -> tuple[float, ...]:
    """Return the bytes of each tensor of states that the first update of ``weights`` makes on this GPU.

    So do torch's optimizers, Megatron's and bitsandbytes'. DeepSpeed makes states before the first step
    (``initialize_optimizer_states`` of its runtime/zero).
    """
    if workload.parallelism.updates_elsewhere or workload.software.makes_states_early:
        return ()
    return tuple(nbytes for update in weight_updates(workload, weights) for nbytes in update.state_tensors())


def _weight_bytes(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the bytes of one version of ``weights``, of sharded ones the shards, without those of masters."""
    shards = workload.parallelism.shards if workload.parallelism.zero == 3 else lambda axis: 1
    if workload.replication.weights_are_masters:
        weights = [weight for weight in weights if not weight.trainable]
    return sum(weight_bytes(group) / shards(axis) for axis, group in by_axis(weights).items())


def optimized_elements(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the elements of ``weights`` that this GPU's optimizer works on: under ZeRO its shard of each axis."""
    return sum(count / workload.parallelism.shards(axis) for axis, count in elements_by_axis(weights).items())


def optimizer_workspace_bytes(workload: Workload, weights: Sequence[Weight]) -> float:
    """Return the bytes that one optimizer step over ``weights`` needs beside the state.

    Gradients in 16 bits exist in fp32 too where there are master weights (Megatron-LM's ``main_param.grad``,
    DeepSpeed's ``single_partition_of_fp32_groups.grad``).
    """
    training = workload.training
    copies = training.optimizer.master_weights and workload.kept_gradient_dtype != "fp32"
    element_bytes = FP32_BYTES
    if workload.software.gradient_kernels is not None:  # side by side in their own type before
        element_bytes += DTYPE_BYTES[training.grad_dtype]
    gradients = element_bytes * optimized_elements(workload, weights) if copies else 0.0
    return gradients + max((update.workspace_bytes for update in weight_updates(workload, weights)), default=0.0)


def paged_state_bytes(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the bytes of the states of ``weights`` that page to the host's memory."""
    return sum(update.state_bytes(paged=True) for update in weight_updates(workload, weights))


def replicated_gradient_ops(
    workload: Workload, weights: Iterable[Weight], seat: Seat = ANY_SEAT
) -> tuple[Collective, ...]:
    """Return the all-reduces, once a step, that complete gradients of weights with copies on several ranks.

    One goes over tp. It has the gradients that every tp rank computes from its own rows or heads. These are of routers
    and of KV heads that tp ranks share, and under sequence parallelism of norms and row-split biases (Megatron's
    `allreduce_sequence_parallel_gradients`). Others have the gradients of redundant experts, and go over the ranks with
    copies of these, in rounds (see `Routing.copy_rounds`) for a rank at ``seat``. Of sharded gradients the shards are
    reduced.
    """
    weights, layout = trained(weights), workload.parallelism
    grad = DTYPE_BYTES[workload.training.grad_dtype]

    def shards(axis: str) -> int:
        return layout.shards(axis) if layout.zero >= 2 else 1

    ops: list[Collective] = []
    if partial := sum(weight.partial_elements for weight in weights):
        nbytes = grad * partial / shards("dp")
        ops.append(_all_reduce("tp.all_reduce replicated gradients", nbytes, Axis.TP, Purpose.TENSOR))
    per_expert = sum(weight.elements // weight.shape[0] for weight in weights if weight.axis == EXPERT_AXIS)
    if per_expert:
        for one in routing(workload).copy_rounds:
            if experts := one.experts_at(seat.ep):
                nbytes = grad * per_expert / shards("edp") * experts
                ops.append(_all_reduce("ep.all_reduce redundant experts", nbytes, one.axis, Purpose.EXPERT))
    return tuple(ops)


def _all_reduce(name: str, nbytes: float, axis: str, purpose: Purpose) -> Collective:
    return Collective(name, CollectiveKind.ALL_REDUCE, nbytes, axis, purpose)


def optimizer_ops(workload: Workload, weights: Sequence[Weight]) -> tuple[Op, ...]:
    """Return one optimizer step over the ``weights`` of this GPU, whose gradients are reduced already.

    Under ZeRO it works on this GPU's shard of them. The order is Megatron's. Gradients are cast to fp32 where they are
    not, and under fp16 unscaled and checked for infinities. Then come norm and clipping, the updates, and the cast of
    master weights to model weights. Last, gradient buffers are set to zero (plain autograd drops its gradients
    instead).

    Before an update on the host the GPU still checks the gradients and takes their norm. With parameter servers it only
    clears the buffers.
    """
    training, layout = workload.training, workload.parallelism
    count = float(optimized_elements(workload, weights))
    here = not layout.updates_elsewhere
    masters, wide = training.optimizer.master_weights, FP32_BYTES
    grad = DTYPE_BYTES[workload.kept_gradient_dtype]
    ops: list[Op] = []
    if here and workload.software.gradient_kernels is not None:
        ops += _gradients_by_hook(workload, weights, workload.software.gradient_kernels)
    else:
        if here and masters and grad != wide:
            ops.append(_kernel("gradients to fp32", "upcast", grad * count, wide * count))
            grad = wide
        ops += _gradient_checks(workload, weights, grad * count, here=here)
    if here:
        ops += [op for update in weight_updates(workload, weights) for op in update.ops()]
        if masters and not workload.replication.weights_are_masters:
            written = DTYPE_BYTES[training.trained_dtype] * count
            launches = _launches(workload, weights)
            ops.append(_kernel("master to model weights", "cast", wide * count, written, launches=launches))
    # Buffers that servers have fetched are cleared whatever the framework; where whole gradients are alive for a while
    # only, and their shards on the host, there is none.
    buffered = here or layout.zero < 2
    if buffered and (layout.server_count or workload.replication.clears_buffers):
        buffered_count = count if layout.zero >= 2 else float(elements(weights))
        zeroed = DTYPE_BYTES[training.grad_dtype] * buffered_count
        ops.append(_kernel("zero gradients", "zero", 0.0, zeroed, training.grad_dtype))
    # A rank whose weights are frozen has numbers to agree on, and nothing to compute.
    return tuple(op for op in ops if count or not isinstance(op, Compute))


def _launches(workload: Workload, weights: Iterable[Weight]) -> int:
    """Return the kernels that each operation around the updates takes; 0: one for all tensors.

    Shards cut one buffer of all gradients, so that a rank has a part of the tensors.
    """
    if not workload.software.updates_by_tensor:
        return 0
    return round(sum(weight.tensors / workload.parallelism.shards(weight.axis) for weight in trained(weights)))


def _gradient_checks(workload: Workload, weights: Sequence[Weight], gradient_bytes: float, *, here: bool) -> list[Op]:
    """Return the search for infinities under fp16, and the norm of the gradients with clipping.

    Both are one number, on which all ranks that share a replica agree. Gradients of an update elsewhere are read only.
    """
    training = workload.training
    written = gradient_bytes if here else 0.0
    ops: list[Op] = []
    if training.precision == "fp16" and not workload.parallelism.server_count:
        ops += [
            _kernel("unscale", "optimizer", gradient_bytes, written),
            *_agreements(workload, "found_inf"),
        ]
    if training.grad_clip is not None:
        norm, clipping = _clipping(workload, weights, gradient_bytes)
        ops += [*norm, *_agreements(workload, "grad norm"), *(clipping if here else ())]
    return ops


def checks_every_pass(workload: Workload) -> bool:
    """Return whether the step ends with a check of the gradients of all passes one by one, not of their sum alone."""
    here = not workload.parallelism.updates_elsewhere
    return here and workload.software.gradient_kernels is not None and workload.parallelism.zero >= 2


def _gradients_by_hook(
    workload: Workload, weights: Sequence[Weight], kernels: Callable[[ReducedGradients], GradientKernels]
) -> list[Op]:
    """Return the kernels of the framework, with the agreements of ranks on infinities and on the norm."""
    training, layout = workload.training, workload.parallelism
    facts = ReducedGradients(
        elements=float(optimized_elements(workload, weights)),
        tensors=_most_tensors(workload, weights),
        element_bytes=DTYPE_BYTES[training.grad_dtype],
        zero=layout.zero,
        passes=workload.microbatches if checks_every_pass(workload) else 1,
        alone=all(layout.replicas(axis) == 1 for axis in by_axis(weights)),
    )
    work = kernels(facts)
    checked = _read_by_host([*work.check, *_agreements(workload, "found_inf")])
    normed = _read_by_host([*work.norm, *_agreements(workload, "grad norm")])
    return [*checked, *normed, *work.ready, *(work.clip if training.grad_clip is not None else ())]


def _read_by_host(ops: Sequence[Op]) -> list[Op]:
    """Return ``ops`` of which the host reads the result: it waits for the last one."""
    *before, last = ops
    assert isinstance(last, Compute | Collective)
    return [*before, replace(last, host_waits=True)]


def _most_tensors(workload: Workload, weights: Iterable[Weight]) -> int:
    """Return the tensors of which a rank has gradients; of several ranks, the most of any.

    ZeRO-3 cuts every tensor. ZeRO-1 and 2 put all of an axis in a row and cut that into equal parts.
    """
    layout = workload.parallelism
    most = 0
    for axis, group in by_axis(trained(weights)).items():
        shards = 1 if layout.zero == 3 else layout.shards(axis)
        ends = list(accumulate(weight.elements for weight in group))
        part = ends[-1] / shards
        ranks = Counter(
            rank
            for begin, end in pairwise((0, *ends))
            for rank in range(int(begin // part), min(math.ceil(end / part), shards))
        )
        most += max(ranks.values())
    return most


def _clipping(workload: Workload, weights: Sequence[Weight], nbytes: float) -> tuple[list[Compute], list[Compute]]:
    """Return the kernels of the norm of gradients of so many bytes, and those of their clipping.

    Where each tensor has its own kernels, its norm goes to the host by itself. The host waits for all norms, and then
    for each. Scaled gradients are new tensors, which are copied back (megatron/core/utils.py,
    ``local_multi_tensor_l2_norm``, ``local_multi_tensor_scale``).
    """
    if launches := _launches(workload, weights):
        sizes = FP32_BYTES * float(launches)
        norms = _kernel("grad norm", "reduce", nbytes, 0.0, launches=launches)
        read = _kernel("grad norms to host", "copy", sizes, sizes, launches=launches)
        steps = (("clip", "activation"), ("clip copy", "copy"))
        clipping = [_kernel(name, op, nbytes, nbytes, launches=launches) for name, op in steps]
        return [replace(op, host_waits=True) for op in (norms, read)], clipping
    listed = len(trained(weights)) if workload.software.work_on_dtensors else 0
    norm = Memory("optimizer", nbytes, 0.0, dtype="fp32", parts=listed)
    clip = _kernel("clip", "optimizer", nbytes, nbytes)
    return [Compute("optimizer.grad norm", norm, StepPhase.OPTIMIZER)], [clip]


def _agreements(workload: Workload, what: str) -> Iterator[Collective]:
    """Yield the all-reduces of one number over the model-parallel ranks of a replica.

    Under ZeRO they go over the ranks that share a state too. Those of experts are apart.
    """
    layout = workload.parallelism
    sizes: dict[Axis, dict[Purpose, int]] = {Axis.DP: {Purpose.TENSOR: layout.tp}}
    if workload.model.moe is not None:
        sizes[Axis.EDP] = {Purpose.EXPERT: layout.ep, Purpose.TENSOR: layout.etp}
    for axis, split in sizes.items():
        across = REPLICAS[axis].model
        purposes = [purpose for purpose, size in {**split, Purpose.PIPELINE: layout.pp}.items() if size > 1]
        if purposes:
            yield _all_reduce(f"{across}.all_reduce {what}", 4.0, across, purposes[0])
        if layout.shards(axis) > 1:
            yield _all_reduce(f"{axis}.all_reduce {what}", 4.0, layout.shard_axis(axis), Purpose.DATA)


def _kernel(name: str, op: str, read: float, written: float, dtype: str = "fp32", *, launches: int = 0) -> Compute:
    kernel = Memory(op, read, written, dtype=dtype, launches=launches)
    return Compute(f"optimizer.{name}", kernel, StepPhase.OPTIMIZER)


def host_update_bytes(workload: Workload) -> float:
    """Return the bytes of its memory that a CPU moves per parameter that it updates from the rank's own gradients.

    DeepSpeed's step has three passes (deepspeed/runtime/zero/stage3.py, and stage_1_and_2.py likewise): gradients are
    scaled, whether there is something to clip or not (``unscale_and_clip_grads``); CPU Adam reads weights, states and
    gradients, and writes the first two (csrc/adam/cpu_adam_impl.cpp); master weights are copied to the working copy.
    """
    training = workload.training
    grad = workload.host_gradient_bytes
    copied = FP32_BYTES + DTYPE_BYTES[training.trained_dtype] if training.optimizer.master_weights else 0
    return 2.0 * grad + (2.0 * host_state_bytes(workload) + grad) + copied


def server_update_bytes(workload: Workload, gradients: int) -> float:
    """Return the bytes of its memory that a server moves per parameter in one pass, with so many gradients to add up.

    Weights and both states are read and written, gradients read, and the working copy written (CPU-Adam, arXiv
    2101.06840, section 5.1). Where gradients are unscaled or clipped there is a pass over them before.
    """
    training = workload.training
    weight, grad = DTYPE_BYTES[training.trained_dtype], DTYPE_BYTES[training.grad_dtype]
    scaled = training.grad_clip is not None or training.precision == "fp16"
    passes = gradients + (2 if scaled else 0)
    return 2.0 * host_state_bytes(workload) + passes * grad + (weight if training.optimizer.master_weights else 0)


def host_state_bytes(workload: Workload) -> float:
    """Return the bytes per parameter that an update on hosts reads and writes back: weights and states.

    Of the weights these are the master weights in fp32, where there are such.
    """
    *_, choice = choices(workload)
    types = update_types(workload, choice.state_dtype)
    return DTYPE_BYTES[types.weight] + choice.implementation.state_bytes(UpdatedTensor((1,)), types)
