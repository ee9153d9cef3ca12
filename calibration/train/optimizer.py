"""AdamW as PyTorch has it, with fp32 master weights where the workload wants them, and clipping over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from calibration.train.frameworks.tokens import LEARNING_RATE
from simulator.config.workload import Workload


def accumulate_in_fp32(parameter: nn.Parameter) -> None:
    """Add each gradient of ``parameter`` to a fp32 sum (Megatron-LM's ``main_grad``) from now on, and drop it."""
    parameter.main_grad = None

    def add(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter.main_grad is None:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)


def gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the accumulated gradient."""
    return parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad


class Adam:
    """Steps ``parameters``. ``counted``: whether a parameter's gradient counts in this rank's share of the norm, so
    that one that several tensor-parallel ranks hold counts once. Ranks of group ``model`` hold different parameters;
    those of ``expert`` different experts, those of ``shards`` different shards of all.
    """

    def __init__(
        self,
        workload: Workload,
        parameters: Sequence[nn.Parameter],
        counted: Sequence[bool],
        experts: Sequence[nn.Parameter],
        model: dist.ProcessGroup | None,
        expert: dist.ProcessGroup | None,
        shards: dist.ProcessGroup | None,
    ) -> None:
        training = workload.training
        self.parameters, self.clip = list(parameters), training.grad_clip
        self.model, self.expert, self.shards = model, expert, shards
        apart = {id(parameter) for parameter in experts} if expert else set()
        self.dense = [n for n, p in enumerate(parameters) if counted[n] and id(p) not in apart]
        self.apart = [n for n, p in enumerate(parameters) if id(p) in apart]
        self.masters: list[nn.Parameter] | None = None
        if training.optimizer.master_weights and not workload.replication.weights_are_masters:
            self.masters = [nn.Parameter(p.detach().float()) for p in parameters]
        decay = 0.01 if training.optimizer.name == "adamw" else 0.0
        self.adam = torch.optim.AdamW(
            self.masters or self.parameters, lr=LEARNING_RATE, weight_decay=decay, foreach=True
        )

    def step(self) -> None:
        """Gradients to fp32, norm and clipping, AdamW, and back to the working precision."""
        grads = [gradient(parameter) for parameter in self.parameters]
        assert all(grad is not None for grad in grads)
        if self.masters is not None:
            if grads[0] is not None and grads[0].dtype != torch.float32:
                wide: list[Tensor] = [torch.empty_like(master) for master in self.masters]
                torch._foreach_copy_(wide, grads)
                grads = list(wide)
            for master, grad in zip(self.masters, grads, strict=True):
                master.grad = grad
        if self.clip is not None:
            self._clip([local(grad) for grad in grads if grad is not None])
        self.adam.step()
        if self.masters is not None:
            self.adam.zero_grad(set_to_none=True)
            with torch.no_grad():
                torch._foreach_copy_([p.detach() for p in self.parameters], [m.detach() for m in self.masters])

    def _clip(self, grads: list[Tensor]) -> None:
        """Clip by the norm of all ranks' gradients, on the GPU throughout, as Megatron-LM does."""
        assert self.clip is not None
        total = self._squares([grads[n] for n in self.dense], self.model)
        if self.apart:
            total = total + self._squares([grads[n] for n in self.apart], self.expert)
        torch._foreach_mul_(grads, (self.clip / (total.sqrt() + 1e-6)).clamp(max=1.0))

    def _squares(self, grads: list[Tensor], group: dist.ProcessGroup | None) -> Tensor:
        """Sum of squares, over ``group`` and what shards them."""
        total = torch.stack(torch._foreach_norm(grads)).float().square().sum()
        for one in (group, self.shards):
            if one is not None:
                dist.all_reduce(total, group=one)
        return total


def local(grad: Tensor) -> Tensor:
    """This rank's shard of a gradient, where FSDP shards it."""
    return grad.to_local() if isinstance(grad, DTensor) else grad
