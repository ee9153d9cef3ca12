"""The end of a step: gradients of replicated parameters, the optimizer, and the bytes of the model's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.models.parts import Part, weights_of
from simulator.models.routing import routing
from simulator.models.stage import stage_parts
from simulator.operations.nodes import Op
from simulator.operations.shapes import ANY_SEAT, Seat
from simulator.operations.weights import EXPERT_AXIS, Weight, by_axis, elements, elements_by_axis, trained, weight_bytes
from simulator.program import REPLICAS, Axis, Collective, CollectiveKind, Compute, Memory, Purpose, StepPhase
from simulator.units import DTYPE_BYTES

if TYPE_CHECKING:
    from simulator.config import Workload

#: Tensors of the parameters' size that Adam keeps: the running means of the gradient and of its square.
ADAM_STATES = 2

#: PyTorch's multi-tensor ("foreach") AdamW, as (kernel, operands read, operands written), where w is the weights, g the
#: gradients, m and v the states and t a temporary (torch/optim/adamw.py, _multi_tensor_adamw).
FOREACH_ADAMW = (
    ("decay", "w", "w"),
    ("lerp", "mg", "m"),
    ("square decay", "v", "v"),
    ("addcmul", "vgg", "v"),
    ("sqrt", "v", "t"),
    ("bias correction", "t", "t"),
    ("eps", "t", "t"),
    ("addcdiv", "wmt", "w"),
)
FUSED_ADAMW = (("adam", "wgmv", "wmv"),)


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
    """Every part that a pipeline rank holds, chunk by chunk."""
    layout = workload.parallelism
    return tuple(
        part for stage in layout.stages_of(pipeline_rank) for part in stage_parts(workload, stage % layout.n_stages)
    )


def state_bytes(workload: Workload, pipeline_rank: int) -> StateBytes:
    """Weights, gradients and optimizer state of one GPU of a pipeline rank.

    Per parameter and with fp32 master weights and states: 2 + grad_dtype + 12 bytes (arXiv 1910.02054, section 3.1: 16
    with 2-byte gradients). Over the N ranks that share a state, ZeRO-1 divides the 12, ZeRO-2 the gradients too, ZeRO-3
    all of it (section 5, figure 1); whole parameters and gradients that are alive for a while are the program's. A
    schedule that does not drain keeps several versions of the weights. What is offloaded is not here, nor are shards of
    gradients whose optimizer is; nor what parameter servers hold. Torch's FSDP shards the master weights and has no
    other shards; its DDP has buckets, and beside them the gradients of several micro-batches until they go there. 1-bit
    Adam keeps what its rounding lost, on the sending and on the adding side (arXiv 2102.02888, algorithm 1).
    """
    weights = weights_of(rank_parts(workload, pipeline_rank))
    training, layout = workload.training, workload.parallelism
    held, whole, share = elements_by_axis(weights), elements(weights), optimized(workload, weights)
    versions = layout.plan.weight_versions(layout.pp, workload.microbatches, pipeline_rank)
    master = DTYPE_BYTES["fp32"] if training.optimizer.master_weights else 0
    per_param = master + ADAM_STATES * DTYPE_BYTES[training.optimizer.state_dtype]
    offload, shards = layout.offload, layout.zero >= 2
    streamed, away = offload.parameters != "none", offload.optimizer != "none" or layout.server_count > 0
    lost = 0.0
    if layout.grad_compression == "1bit":
        lost = sum(count * (1 + 1 / layout.replicas(axis)) for axis, count in held.items() if layout.replicas(axis) > 1)
    kept = DTYPE_BYTES[training.trained_dtype] * whole if training.keep_gradients else 0
    if workload.replication.in_ddp and workload.microbatches > 1:
        kept += DTYPE_BYTES[training.grad_dtype] * sum(held[axis] for axis in held if layout.replicas(axis) > 1)
    return StateBytes(
        weights=0.0 if streamed else _weight_bytes(workload, weights) * versions,
        gradients=0.0
        if shards and away
        else DTYPE_BYTES[training.grad_dtype] * (share if shards else float(whole)) + kept,
        optimizer=(0.0 if away else per_param * share) + DTYPE_BYTES["fp32"] * lost,
    )


def _weight_bytes(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the bytes of one version of ``weights``, of sharded ones the shards, without those of masters."""
    shards = workload.parallelism.shards if workload.parallelism.zero == 3 else lambda axis: 1
    if workload.replication.shards_are_masters:
        weights = [weight for weight in weights if not weight.trainable]
    return sum(weight_bytes(group) / shards(axis) for axis, group in by_axis(weights).items())


def optimized(workload: Workload, weights: Iterable[Weight]) -> float:
    """Return the elements of ``weights`` that this GPU's optimizer works on: under ZeRO its shard of each axis."""
    return sum(count / workload.parallelism.shards(axis) for axis, count in elements_by_axis(weights).items())


def optimizer_workspace_bytes(workload: Workload, weights: Iterable[Weight]) -> float:
    """What one optimizer step over ``weights`` needs beside the state: 16-bit gradients as fp32 ones
    (Megatron-LM's ``main_param.grad``, DeepSpeed's ``single_partition_of_fp32_groups.grad``), and the root of the
    second moment where Adam is not one kernel (torch/optim/adamw.py, ``exp_avg_sq_sqrt``)."""
    training = workload.training
    per_param = 0
    if training.optimizer.master_weights and training.grad_dtype != "fp32":
        per_param += DTYPE_BYTES["fp32"]
    if training.optimizer.implementation == "foreach":
        per_param += DTYPE_BYTES[training.optimizer.state_dtype]
    return float(per_param * optimized(workload, weights))


def replicated_gradient_ops(
    workload: Workload, weights: Iterable[Weight], seat: Seat = ANY_SEAT
) -> tuple[Collective, ...]:
    """The all-reduce over tp, once a step, of gradients that every tp rank computes from its own rows or heads: norms
    and row-split biases under sequence parallelism (Megatron's `allreduce_sequence_parallel_gradients`), KV heads that
    tp ranks share, routers; and those of redundant experts over the ranks that hold copies of them, in rounds (see
    `Routing.copy_rounds`) for a rank at ``seat``; of sharded gradients the shard. Empty where there are none."""
    weights, layout = trained(weights), workload.parallelism
    grad = DTYPE_BYTES[workload.training.grad_dtype]

    def held(axis: str) -> int:
        return layout.shards(axis) if layout.zero >= 2 else 1

    ops: list[Collective] = []
    if partial := sum(weight.partial_elements for weight in weights):
        nbytes = grad * partial / held("dp")
        ops.append(_summed("tp.all_reduce replicated gradients", nbytes, Axis.TP, Purpose.TENSOR))
    per_expert = sum(weight.elements // weight.shape[0] for weight in weights if weight.axis == EXPERT_AXIS)
    if per_expert:
        for one in routing(workload).copy_rounds:
            if experts := one.experts_at(seat.ep):
                nbytes = grad * per_expert / held("edp") * experts
                ops.append(_summed("ep.all_reduce redundant experts", nbytes, one.axis, Purpose.EXPERT))
    return tuple(ops)


def _summed(name: str, nbytes: float, axis: str, purpose: Purpose) -> Collective:
    return Collective(name, CollectiveKind.ALL_REDUCE, nbytes, axis, purpose)


def optimizer_ops(workload: Workload, weights: Sequence[Weight]) -> tuple[Op, ...]:
    """One optimizer step over the ``weights`` of this GPU; under ZeRO it works on this GPU's shard of them. Gradients
    are reduced already.

    In Megatron's order: gradients to fp32 where they are not; under fp16 unscaling with a check for infinities; norm
    and clipping; Adam; master weights to model weights; gradient buffers to zero (plain autograd drops its gradients
    instead). What is decided together (infinities, norm) is one number all-reduced over axis ``mp``, the model-parallel
    ranks of a replica, and under ZeRO over the ranks that share a state too; of experts over ``emp`` and ``edp``. Of an
    update on the host what is left is what has to be known of the gradients before; of one on parameter servers, which
    have it all, clearing the buffers.
    """
    training, layout = workload.training, workload.parallelism
    count = float(optimized(workload, weights))
    grad, master = DTYPE_BYTES[training.grad_dtype], training.optimizer.master_weights
    ops: list[Op] = []

    def kernel(name: str, read: float, write: float, op: str = "optimizer") -> None:
        memory = Memory(op, read * count, write * count, dtype="fp32")
        if count:
            ops.append(Compute(f"optimizer.{name}", memory, StepPhase.OPTIMIZER))

    def agree(what: str) -> None:
        sizes: dict[Axis, dict[Purpose, int]] = {Axis.DP: {Purpose.TENSOR: layout.tp}}
        if workload.model.moe is not None:
            sizes[Axis.EDP] = {Purpose.EXPERT: layout.ep, Purpose.TENSOR: layout.etp}
        for axis, split in sizes.items():
            across = REPLICAS[axis].model
            purposes = [purpose for purpose, size in {**split, Purpose.PIPELINE: layout.pp}.items() if size > 1]
            if purposes:
                ops.append(_summed(f"{across}.all_reduce {what}", 4.0, across, purposes[0]))
            if layout.shards(axis) > 1:
                over = layout.shard_axis(axis)
                ops.append(_summed(f"{axis}.all_reduce {what}", 4.0, over, Purpose.DATA))

    here = layout.offload.optimizer == "none" and not layout.server_count
    if here and master and grad != 4:
        kernel("gradients to fp32", grad, 4, op="upcast")
        grad = 4
    if training.precision == "fp16" and not layout.server_count:
        kernel("unscale", grad, grad if here else 0)
        agree("found_inf")
    if training.grad_clip is not None:
        kernel("grad norm", grad, 0)
        agree("grad norm")
        if here:
            kernel("clip", grad, grad)
    if here:
        _update(workload, grad, kernel)
    # Buffers that servers have fetched are cleared whatever the framework; where whole gradients are alive for a while
    # only, and their shards on the host, there is none.
    buffered = elements(weights) and (here or layout.zero < 2)
    if buffered and (layout.server_count or workload.replication.clears_buffers):
        held = count if layout.zero >= 2 else float(elements(weights))
        zeroed = DTYPE_BYTES[training.grad_dtype] * held
        zero = Memory("zero", 0.0, zeroed, dtype=training.grad_dtype)
        ops.append(Compute("optimizer.zero gradients", zero, StepPhase.OPTIMIZER))
    return tuple(ops)


def _update(workload: Workload, grad: int, kernel: Callable[..., None]) -> None:
    """Adam's kernels, with gradients of ``grad`` bytes each. 1-bit Adam's second moment is frozen, and only read (arXiv
    2102.02888, algorithm 1)."""
    training = workload.training
    master, weight = training.optimizer.master_weights, DTYPE_BYTES[training.trained_dtype]
    state = DTYPE_BYTES[training.optimizer.state_dtype]
    sizes = {"w": 4 if master else weight, "g": grad, "m": state, "v": state, "t": state}
    foreach = training.optimizer.implementation == "foreach"
    op = "optimizer" if not foreach else "foreach" if state == 4 else "foreach_bf16"
    frozen = "v" if workload.parallelism.grad_compression == "1bit" else ""
    for name, read, written in FOREACH_ADAMW if foreach else FUSED_ADAMW:
        if written == frozen:
            continue
        if frozen:
            written = written.replace(frozen, "")
        kernel(name, sum(sizes[operand] for operand in read), sum(sizes[operand] for operand in written), op)
    if master and not workload.replication.shards_are_masters:
        kernel("master to model weights", 4, weight, op="cast")


def host_update_bytes(workload: Workload, gradients: int = 1) -> float:
    """Bytes of its memory that a CPU moves per parameter that it updates in one pass, with so many gradients to add up:
    weights and both states read and written, gradients read, and the working copy written (CPU-Adam, arXiv 2101.06840,
    section 5.1); before that, where gradients are unscaled or clipped, a pass over them (DeepSpeed's
    ``unscale_and_clip_grads``)."""
    training = workload.training
    weight, grad = DTYPE_BYTES[training.trained_dtype], DTYPE_BYTES[training.grad_dtype]
    scaled = training.grad_clip is not None or training.precision == "fp16"
    passes = gradients + (2 if scaled else 0)
    return 2.0 * host_state_bytes(workload) + passes * grad + (weight if training.optimizer.master_weights else 0)


def host_state_bytes(workload: Workload) -> float:
    """Bytes per parameter that an update reads and writes back: weights (fp32 where there are such) and both states."""
    training = workload.training
    weight = DTYPE_BYTES["fp32"] if training.optimizer.master_weights else DTYPE_BYTES[training.trained_dtype]
    return float(weight + ADAM_STATES * DTYPE_BYTES[training.optimizer.state_dtype])
