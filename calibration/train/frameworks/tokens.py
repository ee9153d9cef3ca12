"""Random tokens that every stack trains on, and sizes of models as the libraries name them."""

from __future__ import annotations

import torch
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
