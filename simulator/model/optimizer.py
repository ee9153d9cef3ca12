"""The end of a step: gradients of replicated parameters, the optimizer, and the bytes of the model's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.model.nodes import Op
from simulator.model.parts import Part, params_on, stage_parts
from simulator.program import Comm, Compute, Memory
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
    with 2-byte gradients); ZeRO-1 divides the 12 by the number of ranks that hold the same parameters. A schedule that
    does not drain keeps several versions of the weights.
    """
    held = params_on(rank_parts(workload, pipeline_rank))
    params = sum(held.values())
    training, layout = workload.training, workload.parallelism
    versions = layout.plan.weight_versions(layout.pp, workload.microbatches, pipeline_rank)
    master = DTYPE_BYTES["fp32"] if training.optimizer.master_weights else 0
    per_param = master + ADAM_STATES * DTYPE_BYTES[training.optimizer.state_dtype]
    per_gradient = DTYPE_BYTES[training.grad_dtype] + (
        DTYPE_BYTES[training.precision] if training.keep_gradients else 0
    )
    return StateBytes(
        weights=float(DTYPE_BYTES[training.precision] * params * versions),
        gradients=float(per_gradient * params),
        optimizer=per_param * optimized(workload, held),
    )


def optimized(workload: Workload, params: Mapping[str, int]) -> float:
    """How many of ``params`` (by axis) this GPU's optimizer works on: under ZeRO-1 its share of each axis."""
    layout = workload.parallelism
    return sum(count / (layout.replicas(axis) if layout.zero else 1) for axis, count in params.items())


def optimizer_workspace_bytes(workload: Workload, params: Mapping[str, int]) -> float:
    """What one optimizer step over ``params`` (by axis) needs beside the state: 16-bit gradients as fp32 ones
    (Megatron-LM's ``main_param.grad``, DeepSpeed's ``single_partition_of_fp32_groups.grad``), and the root of the
    second moment where Adam is not one kernel (torch/optim/adamw.py, ``exp_avg_sq_sqrt``)."""
    training = workload.training
    per_param = 0
    if training.optimizer.master_weights and training.grad_dtype != "fp32":
        per_param += DTYPE_BYTES["fp32"]
    if training.implementation == "eager":
        per_param += DTYPE_BYTES[training.optimizer.state_dtype]
    return float(per_param * optimized(workload, params))


def replicated_gradient_ops(workload: Workload, parts: Iterable[Part]) -> tuple[Comm, ...]:
    """The all-reduce over tp, once a step, of gradients that every tp rank computes from its own rows or heads: norms
    and row-split biases under sequence parallelism (Megatron's `allreduce_sequence_parallel_gradients`), and KV heads
    that tp ranks share. Empty where there are none."""
    params = sum(part.tp_reduced_params for part in parts)
    if not params:
        return ()
    nbytes = float(DTYPE_BYTES[workload.training.grad_dtype] * params)
    return (Comm("tp.all_reduce replicated gradients", "all_reduce", nbytes, axis="tp", purpose="tp"),)


def optimizer_ops(workload: Workload, params: Mapping[str, int]) -> tuple[Op, ...]:
    """One optimizer step over the parameters held by this GPU (by axis, see `params_on`); under ZeRO-1 it works on this
    GPU's share of them. Gradients are reduced already.

    In Megatron's order: gradients to fp32 where they are not; under fp16 unscaling with a check for infinities; norm
    and clipping; Adam; master weights to model weights; gradient buffers to zero (plain autograd drops its gradients
    instead). What is decided together (infinities, norm) is one number all-reduced over axis ``mp``, the model-parallel
    ranks of a replica, and under ZeRO-1 over ``dp`` too.
    """
    training, layout = workload.training, workload.parallelism
    sharded = bool(layout.zero) and layout.replicas("dp") > 1
    count = float(optimized(workload, params))
    weight, grad = DTYPE_BYTES[training.precision], DTYPE_BYTES[training.grad_dtype]
    master = training.optimizer.master_weights
    ops: list[Op] = []

    def kernel(name: str, read: float, write: float, op: str = "optimizer") -> None:
        ops.append(Compute(f"optimizer.{name}", Memory(op, read * count, write * count, dtype="fp32"), "O"))

    def agree(what: str) -> None:
        if layout.tp * layout.pp > 1:
            purpose = "tp" if layout.tp > 1 else "pp"
            ops.append(Comm(f"mp.all_reduce {what}", "all_reduce", 4.0, axis="mp", purpose=purpose))
        if sharded:
            ops.append(Comm(f"dp.all_reduce {what}", "all_reduce", 4.0, axis="dp", purpose="dp"))

    if master and grad != 4:
        kernel("gradients to fp32", grad, 4, op="cast")
        grad = 4
    if training.precision == "fp16":
        kernel("unscale", grad, grad)
        agree("found_inf")
    if training.grad_clip is not None:
        kernel("grad norm", grad, 0, op="reduce")
        agree("grad norm")
        kernel("clip", grad, grad)
    state = DTYPE_BYTES[training.optimizer.state_dtype]
    sizes = {"w": 4 if master else weight, "g": grad, "m": state, "v": state, "t": state}
    for name, read, written in FOREACH_ADAMW if training.implementation == "eager" else FUSED_ADAMW:
        kernel(name, sum(sizes[operand] for operand in read), sum(sizes[operand] for operand in written))
    if master:
        kernel("master to model weights", 4, weight, op="cast")
    if training.implementation == "fused":
        zeroed = float(DTYPE_BYTES[training.grad_dtype] * sum(params.values()))
        ops.append(
            Compute("optimizer.zero gradients", Memory("optimizer", 0.0, zeroed, dtype=training.grad_dtype), "O")
        )
    return tuple(ops)
