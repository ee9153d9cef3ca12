"""DeepSpeed's engine with ZeRO around a model of transformers, as its Trainer and accelerate run it.

The optimizer is PyTorch's, handed to the engine (``zero_allow_untested_optimizer``), as accelerate does where a
configuration names none.
"""

from __future__ import annotations

import gc

import deepspeed
import torch
from torch import Tensor

from calibration.train.frameworks.hugging_face import model_of
from calibration.train.frameworks.tokens import DTYPES, LEARNING_RATE, replica_tokens, set_torchrun_variables
from calibration.train.process_groups import ProcessGroups
from simulator.config.workload import Workload


class DeepSpeedTrainer:
    """Trains a model of transformers by a DeepSpeed engine on this rank."""

    def __init__(self, workload: Workload, groups: ProcessGroups, device: torch.device) -> None:
        training, layout = workload.training, workload.parallelism
        set_torchrun_variables(device)
        model = model_of(workload, device, DTYPES[training.precision])
        offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
        host = layout.offload.optimizer == "cpu"
        parameters = list(model.parameters())
        fused = training.optimizer.implementation == "fused" and device.type == "cuda" and not host
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused, foreach=not fused and not host)
        config = {
            "train_micro_batch_size_per_gpu": training.micro_batch,
            "gradient_accumulation_steps": workload.microbatches,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": layout.zero, **(offload if host else {})},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": training.grad_clip or 0.0,
            "steps_per_print": 10**9,
            "wall_clock_breakdown": False,
        }
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self._batches = replica_tokens(workload, groups.place["dp"])[:, :-1].to(device).split(training.micro_batch)

    def step(self) -> Tensor:
        """Make one optimizer step; return the last micro-batch's loss."""
        loss = torch.zeros(())
        for tokens in self._batches:
            loss = self._engine(input_ids=tokens, labels=tokens).loss
            self._engine.backward(loss)
            self._engine.step()
        return loss.detach()

    def close(self) -> None:
        """Free what the run has left behind."""
        self._engine.destroy()
        del self._engine
        gc.collect()


TRAINER = DeepSpeedTrainer
