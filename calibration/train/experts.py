"""A mixture of experts over expert-parallel ranks: router, all-to-all, grouped products.

Tokens are dealt to the experts in turn, whatever the router says (Megatron-LM's ``--moe-router-force-load-balancing``).
They are weighed by the router's probabilities, so that every weight learns. Loads are those of
``token_distribution: balanced``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = (received, sent, group)
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], *ctx.way), None, None, None


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _Copies(torch.autograd.Function):
    """A row per choice, in the order of the experts, of each token's one row. ``order`` lists choices, token by token
    and ``top_k`` to each, in that order; ``back`` undoes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.top_k = top_k
        return x.index_select(0, order.div(top_k, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Back(torch.autograd.Function):
    """The experts' outputs in the order of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None, None


def grouped(x: Tensor, weight: Tensor, loads: Tensor) -> Tensor:
    """Rows of ``x``, ``loads`` of them per expert in order, times each expert's ``weight`` (experts x out x in)."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=loads.cumsum(0, dtype=torch.int32))
    return torch.cat([F.linear(part, w) for part, w in zip(x.split(loads.tolist()), weight, strict=True)])


class ExpertsModule(nn.Module):
    """``fc1`` (local experts x ffn (x 2 if gated) x hidden), ``fc2`` (local experts x hidden x ffn) and the ``router``
    (experts x hidden), which every rank holds."""

    def __init__(
        self,
        router: nn.Parameter,
        fc1: nn.Parameter,
        fc2: nn.Parameter,
        *,
        top_k: int,
        router_dtype: torch.dtype,
        activation: Callable[[Tensor], Tensor],
        group: dist.ProcessGroup | None,
        ep: int,
    ) -> None:
        super().__init__()
        self.router, self.fc1, self.fc2 = router, fc1, fc2
        self.top_k, self.router_dtype, self.activation = top_k, router_dtype, activation
        self.group, self.ep = group, ep
        #: How the host reads what it must know, for which it waits.
        self.read: Callable[[Tensor], list[Any]] = Tensor.tolist

    def forward(self, x: Tensor) -> Tensor:
        tokens, n_experts = len(x), len(self.router)
        scores = F.linear(x.to(self.router_dtype), self.router.to(self.router_dtype))
        places = torch.arange(tokens * self.top_k, device=x.device)
        chosen = places % n_experts  # instead of the best ones
        weights = scores.softmax(-1, dtype=torch.float32).gather(1, chosen.view(tokens, self.top_k))
        order = chosen.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, places)
        counts = torch.zeros(n_experts, dtype=torch.long, device=x.device).scatter_add_(
            0, chosen, torch.ones_like(chosen)
        )
        rows: Tensor = _Copies.apply(x, order, back, self.top_k)
        out = self._mlp(rows, counts) if self.group is None else self._elsewhere(rows, counts)
        out = _Back.apply(out, order, back)
        return (out.view(tokens, self.top_k, -1) * weights.to(out.dtype)[..., None]).sum(1)

    def _elsewhere(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The experts' outputs for ``rows``, in their order, from the ranks that hold them."""
        group, ep, local = self.group, self.ep, len(self.fc1)
        assert group is not None
        everyone = counts.new_empty(ep * len(counts))
        dist.all_gather_into_tensor(everyone, counts, group=group)
        on_device = everyone.view(ep, ep, local)  # [from][to][expert]
        table = self.read(on_device)  # the host waits here, for it must know how much to send
        me = dist.get_rank(group)
        sent, received = [sum(to) for to in table[me]], [sum(source[me]) for source in table]
        rows = _AllToAll.apply(rows, sent, received, group)
        rows = regrouped(rows, [source[me] for source in table])
        out = self._mlp(rows, on_device[:, me].sum(0))
        out = regrouped(out, [[source[me][expert] for source in table] for expert in range(local)])
        returned: Tensor = _AllToAll.apply(out, received, sent, group)
        return returned

    def _mlp(self, rows: Tensor, loads: Tensor) -> Tensor:
        return grouped(self.activation(grouped(rows, self.fc1, loads)), self.fc2, loads)


def regrouped(x: Tensor, sizes: list[list[int]]) -> Tensor:
    """Rows that lie in groups of parts, ``sizes`` [group][part] of them, with the first part of every group first."""
    if len(sizes) == 1 or len(sizes[0]) == 1:
        return x
    parts = x.split([size for group in sizes for size in group])
    return torch.cat([part for first in range(len(sizes[0])) for part in parts[first :: len(sizes[0])]])
