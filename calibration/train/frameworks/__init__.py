"""Training code of others, run unchanged: a file per software stack, with a trainer and what it cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from calibration.train.frameworks.limits import LIMITS
from simulator.config.workload import Workload
from simulator.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from calibration.train.process_groups import ProcessGroups

#: Value of ``framework.name`` in a workload -> the module here that trains it. What is not listed is plain PyTorch.
STACKS = {
    "hugging_face": "hugging_face",
    "hugging_face_deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "megatron_core": "transformer_engine",
    "megatron_core_local": "megatron_core",
}


class StackTrainer(Protocol):
    """One rank's share of a job. `step` makes an optimizer step over the global batch and returns the loss."""

    def step(self) -> Tensor: ...

    def close(self) -> None: ...


def is_stack(workload: Workload) -> bool:
    """Tell whether the code of others trains ``workload``."""
    return workload.framework.name in STACKS


def stack_trainer(workload: Workload, groups: ProcessGroups, device: torch.device) -> StackTrainer:
    """Return the trainer of the workload's framework. Collective over all processes, which all take part."""
    module = import_module(f"{__name__}.{STACKS[workload.framework.name]}")
    trainer: StackTrainer = module.TRAINER(workload, groups, device)
    return trainer


def stack_refusals(workload: Workload) -> Iterator[InputError]:
    """Yield what the workload's framework cannot run here."""
    for key, value, allowed, reason in LIMITS[STACKS[workload.framework.name]](workload):
        if value not in allowed:
            yield InputError(reason, key=key, found=value, allowed=", ".join(map(str, allowed)))
