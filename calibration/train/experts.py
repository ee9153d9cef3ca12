"""A mixture of experts over expert-parallel ranks: router, all-to-all, grouped products.

Tokens are dealt to the experts in turn, whatever the router says (Megatron-LM's ``--moe-router-force-load-balancing``),
and weighed by the router's probabilities: loads are what ``token_distribution: balanced`` says, and every weight learns.
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


def grouped(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Rows of ``x``, ``counts`` of them per expert in order, times each expert's ``weight`` (experts x out x in)."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        ends = torch.tensor(counts, dtype=torch.int32, device=x.device).cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return torch.cat([F.linear(part, w) for part, w in zip(x.split(counts), weight, strict=True)])


class Experts(nn.Module):
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

    def forward(self, x: Tensor) -> Tensor:
        tokens, n_experts, local = len(x), len(self.router), len(self.fc1)
        scores = F.linear(x.to(self.router_dtype), self.router.to(self.router_dtype))
        probs = scores.softmax(-1, dtype=torch.float32)
        places = torch.arange(tokens * self.top_k, device=x.device)
        chosen = (places % n_experts).view(tokens, self.top_k)
        weights = probs.gather(1, chosen).view(-1)
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=n_experts)
        rows = x.index_select(0, order.div(self.top_k, rounding_mode="floor"))
        weights = weights.index_select(0, order)
        if self.group is None:
            out = self._mlp(rows, weights, counts.tolist())
        else:
            out = self._elsewhere(rows, weights, counts, local)
        back = torch.empty_like(order).scatter_(0, order, places)
        return out.index_select(0, back).view(tokens, self.top_k, -1).sum(1)

    def _elsewhere(self, rows: Tensor, weights: Tensor, counts: Tensor, local: int) -> Tensor:
        """The experts' outputs for ``rows``, in their order, from the ranks that hold them."""
        group = self.group
        assert group is not None
        everyone = counts.new_empty(self.ep * len(counts))
        dist.all_gather_into_tensor(everyone, counts, group=group)
        table = everyone.view(self.ep, self.ep, local).tolist()  # [from][to][expert]; the host waits here
        me = dist.get_rank(group)
        sent = [sum(table[me][to]) for to in range(self.ep)]
        received = [sum(table[source][me]) for source in range(self.ep)]
        rows = _AllToAll.apply(rows, sent, received, group)
        weights = _AllToAll.apply(weights, sent, received, group)
        if local > 1:
            parts = [table[source][me][expert] for source in range(self.ep) for expert in range(local)]
            by_expert = [source * local + expert for expert in range(local) for source in range(self.ep)]
            starts = [sum(parts[:place]) for place in range(len(parts))]
            order = torch.cat(
                [torch.arange(starts[place], starts[place] + parts[place], device=rows.device) for place in by_expert]
            )
            rows, weights = rows.index_select(0, order), weights.index_select(0, order)
        loads = [sum(table[source][me][expert] for source in range(self.ep)) for expert in range(local)]
        out = self._mlp(rows, weights, loads)
        if local > 1:
            places = torch.arange(len(order), device=order.device)
            out = out.index_select(0, torch.empty_like(order).scatter_(0, order, places))
        returned: Tensor = _AllToAll.apply(out, received, sent, group)
        return returned

    def _mlp(self, rows: Tensor, weights: Tensor, loads: list[int]) -> Tensor:
        act = self.activation(grouped(rows, self.fc1, loads))
        return grouped(act * weights.to(act.dtype)[:, None], self.fc2, loads)
