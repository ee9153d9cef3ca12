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
    with 2-byte gradients); ZeRO-1 divides the 12 by the number of ranks that hold the same parameters.
    """
    held = params_on(rank_parts(workload, pipeline_rank))
    params = sum(held.values())
    training = workload.training
    master = DTYPE_BYTES["fp32"] if training.optimizer.master_weights else 0
    per_param = master + ADAM_STATES * DTYPE_BYTES[training.optimizer.state_dtype]
    return StateBytes(
        weights=float(DTYPE_BYTES[training.precision] * params),
        gradients=float(DTYPE_BYTES[training.grad_dtype] * params),
        optimizer=per_param * optimized(workload, held),
    )


def optimized(workload: Workload, params: Mapping[str, int]) -> float:
    """How many of ``params`` (by axis) this GPU's optimizer works on: under ZeRO-1 its share of each axis."""
    layout = workload.parallelism
    return sum(count / (layout.replicas(axis) if layout.zero else 1) for axis, count in params.items())


def replicated_gradient_ops(workload: Workload, parts: Iterable[Part]) -> tuple[Comm, ...]:
    """The all-reduce over tp, once a step, of gradients that every tp rank computes from its own rows or heads: norms
    and row-split biases under sequence parallelism (Megatron's `allreduce_sequence_parallel_gradients`), KV heads that
    tp ranks share, routers; and the one over ep of the copies of experts. Empty where there are none."""
    parts = tuple(parts)
    grad = DTYPE_BYTES[workload.training.grad_dtype]
    ops = []
    if params := sum(part.tp_reduced_params for part in parts):
        nbytes = float(grad * params)
        ops.append(Comm("tp.all_reduce replicated gradients", "all_reduce", nbytes, axis="tp", purpose="tp"))
    moe, ep = workload.model.moe, workload.parallelism.ep
    copies = moe.redundant_experts if moe else 0
    if moe and copies and (held := sum(part.expert_params for part in parts)):
        nbytes = float(grad * held * copies * ep // (moe.experts + copies))
        ops.append(Comm("ep.all_reduce redundant experts", "all_reduce", nbytes, axis="ep", purpose="ep"))
    return tuple(ops)


def optimizer_ops(workload: Workload, params: Mapping[str, int]) -> tuple[Op, ...]:
    """One optimizer step over the parameters held by this GPU (by axis, see `params_on`); under ZeRO-1 it works on this
    GPU's share of them. Gradients are reduced already.

    In Megatron's order: gradients to fp32 where they are not; under fp16 unscaling with a check for infinities; norm
    and clipping; Adam; master weights to model weights; gradient buffers to zero (plain autograd drops its gradients
    instead). What is decided together (infinities, norm) is one number all-reduced over axis ``mp``, the model-parallel
    ranks of a replica, and under ZeRO-1 over ``dp`` too; of experts over ``emp`` and ``edp``.
    """
    training, layout = workload.training, workload.parallelism
    count = float(optimized(workload, params))
    weight, grad = DTYPE_BYTES[training.precision], DTYPE_BYTES[training.grad_dtype]
    master = training.optimizer.master_weights
    ops: list[Op] = []

    def kernel(name: str, read: float, write: float, op: str = "optimizer") -> None:
        ops.append(Compute(f"optimizer.{name}", Memory(op, read * count, write * count, dtype="fp32"), "O"))

    def agree(what: str) -> None:
        for axis, across, split in (
            ("dp", "mp", {"tp": layout.tp}),
            ("edp", "emp", {"ep": layout.ep, "tp": layout.etp}),
        ):
            if axis == "edp" and workload.model.moe is None:
                continue
            purposes = [purpose for purpose, size in {**split, "pp": layout.pp}.items() if size > 1]
            if purposes:
                ops.append(Comm(f"{across}.all_reduce {what}", "all_reduce", 4.0, axis=across, purpose=purposes[0]))
            if layout.zero and layout.replicas(axis) > 1:
                ops.append(Comm(f"{axis}.all_reduce {what}", "all_reduce", 4.0, axis=axis, purpose="dp"))

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
