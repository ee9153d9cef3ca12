"""Facts that all trainers share: random tokens, types, the learning rate, and what torchrun tells a process."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from simulator.config.workload import Workload

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: So slow that gradients stay as in training: zeros draw less power.
LEARNING_RATE = 3e-5


def replica_tokens(workload: Workload, replica: int) -> Tensor:
    """Return this replica's sequences of the one global batch, (sequences, seq + 1), on the CPU."""
    training = workload.training
    generator = torch.Generator().manual_seed(workload.seed)
    whole = torch.randint(workload.model.vocab, (training.global_batch, training.seq + 1), generator=generator)
    return whole.chunk(workload.parallelism.dp)[replica]


def set_torchrun_variables(device: torch.device) -> None:
    """Set the environment variables by which torchrun tells a process its rank."""
    os.environ |= {"LOCAL_RANK": str(device.index or 0), "RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size())}
