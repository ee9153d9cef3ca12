"""Tensor parallelism by hand: linear layers and the loss as Megatron-LM splits them (arXiv 1909.08053, 2205.05198).

Activations are (tokens, width). With sequence parallelism a rank holds 1/t of the rows between its blocks, in order.
Communication is in line: a product waits for what it gathers, and what follows waits for a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

LayerSplit = Literal["column", "row", "none"]


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share each layer; ``sequence_parallel`` splits the rows between blocks over them."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False


def gather_rows(x: Tensor, t: TensorGroup) -> Tensor:
    """The rows of all ranks, in order."""
    whole = x.new_empty(x.shape[0] * t.size, *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=t.group)
    return whole


def scatter_sum(x: Tensor, t: TensorGroup) -> Tensor:
    """This rank's rows of the sum over ranks."""
    part = x.new_empty(x.shape[0] // t.size, *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=t.group)
    return part


def sum_rows(x: Tensor, t: TensorGroup) -> Tensor:
    """The sum over ranks: of all rows, or of this rank's with sequence parallelism."""
    if t.sequence_parallel:
        return scatter_sum(x, t)
    dist.all_reduce(x, group=t.group)
    return x


class _SplitLinear(torch.autograd.Function):
    """x W^T with W split by columns (of the product) or rows.

    A column-split layer keeps its own rows of x and gathers all rows again for the weight gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, t: TensorGroup, split: LayerSplit) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.t, ctx.split, ctx.bias = t, split, bias is not None
        if split == "row":
            return sum_rows(x @ weight.t(), t)
        return F.linear(gather_rows(x, t) if t.sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        t, sharded = ctx.t, ctx.t.sequence_parallel
        if ctx.split == "row":
            grad = gather_rows(grad, t) if sharded else grad
            return grad @ weight, grad.t() @ x, None, None, None
        x = gather_rows(x, t) if sharded else x
        return sum_rows(grad @ weight, t), grad.t() @ x, grad.sum(0) if ctx.bias else None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, t: TensorGroup, split: LayerSplit) -> Tensor:
    """x W^T + b on this rank's share of W (out x in); the bias of a row-split layer is added to the sum."""
    if t.size == 1 or split == "none":
        return F.linear(x, weight, bias)
    inside = split == "column"
    y: Tensor = _SplitLinear.apply(x, weight, bias if inside else None, t, split)
    return y if bias is None or inside else y + bias


class _SumRows(torch.autograd.Function):
    """The sum over ranks of what each computed for all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: TensorGroup) -> Tensor:
        ctx.t = t
        return sum_rows(x, t)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (gather_rows(grads[0], ctx.t) if ctx.t.sequence_parallel else grads[0]), None


class _OwnRows(torch.autograd.Function):
    """This rank's rows of what all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: TensorGroup) -> Tensor:
        ctx.t = t
        return x.chunk(t.size)[t.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gather_rows(grads[0], ctx.t), None


def embed(tokens: Tensor, table: Tensor, t: TensorGroup, *, positions: Tensor | None) -> Tensor:
    """Rows of ``table`` (this rank's words) for ``tokens``, plus ``positions``; this rank's rows of the result.

    Foreign words give zeros and the ranks' results are summed: as a reduce-scatter where nothing has to be added to
    whole sequences first.
    """
    if t.size == 1:
        x = F.embedding(tokens, table)
        return x if positions is None else x + positions
    first = t.rank * table.shape[0]
    foreign = (tokens < first) | (tokens >= first + table.shape[0])
    x = F.embedding((tokens - first).masked_fill(foreign, 0), table).masked_fill(foreign[:, None], 0)
    if positions is None:
        summed: Tensor = _SumRows.apply(x, t)
        return summed
    x = _SumRows.apply(x, TensorGroup(t.group, t.size, t.rank)) + positions
    rows: Tensor = _OwnRows.apply(x, t) if t.sequence_parallel else x
    return rows


class _SplitCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits whose columns are split over the ranks, in fp32 and in place (arXiv 1909.08053,
    section 3)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, t: TensorGroup) -> Tensor:
        x = logits.float()
        highest = x.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=t.group)
        x = x.sub_(highest[:, None])
        first = t.rank * x.shape[1]
        foreign = (targets < first) | (targets >= first + x.shape[1])
        local_targets = (targets - first).masked_fill(foreign, 0)
        target = x.gather(1, local_targets[:, None])[:, 0].masked_fill(foreign, 0.0)
        dist.all_reduce(target, group=t.group)
        exp = x.exp_()
        total = exp.sum(-1)
        dist.all_reduce(total, group=t.group)
        ctx.save_for_backward(exp.div_(total[:, None]), local_targets, foreign)
        ctx.dtype = logits.dtype
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        softmax, local_targets, foreign = ctx.saved_tensors
        softmax.scatter_add_(1, local_targets[:, None], -(~foreign).to(softmax.dtype)[:, None])
        return softmax.mul_(grads[0] / len(local_targets)).to(ctx.dtype), None, None


def cross_entropy(logits: Tensor, targets: Tensor, t: TensorGroup) -> Tensor:
    """Mean over tokens, in fp32; ``logits`` (tokens, this rank's words)."""
    if t.size == 1:
        return F.cross_entropy(logits.float(), targets)
    loss: Tensor = _SplitCrossEntropy.apply(logits, targets, t)
    return loss
