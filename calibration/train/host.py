"""How fast this rank's host issues ops now: hosts of one kind differ, and change while they run."""

from __future__ import annotations

import gc
import statistics
import time

import torch
from torch.nn import functional

from calibration.narrow import PROBE, narrow
from calibration.train.process_groups import ProcessGroups
from calibration.train.trainer import Trainer

#: Linear layers as PyTorch has them. DeepSpeed's stage 3 puts a function in Python in its place, and leaves it there.
LINEAR = functional.linear


class Probe:
    """The passes of a small model (`calibration.narrow.PROBE`), which this rank's host issues to a GPU by itself."""

    def __init__(self, device: torch.device) -> None:
        workload = narrow(PROBE)
        groups = ProcessGroups.from_layout(workload.parallelism, 0)
        assert groups is not None
        self._trainer = Trainer(workload, groups, device)
        self._trainer.forward_backward()

    def seconds(self) -> tuple[float, float]:
        """Return the host's seconds to issue the passes, forward and backward, which two threads do.

        A forward pass goes before, as other work did.
        """
        trainer, forward_s, backward_s = self._trainer, 0.0, 0.0
        (module,) = trainer.modules
        module(trainer.inputs[:1])
        for parameter in trainer.optimizer.parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        for inputs, targets in zip(trainer.inputs.split(1), trainer.targets.split(1), strict=True):
            began = time.perf_counter()
            loss = trainer.loss(module(inputs), targets)
            issued = time.perf_counter()
            loss.backward()
            forward_s, backward_s = forward_s + issued - began, backward_s + time.perf_counter() - issued
        torch.cuda.synchronize()
        return forward_s, backward_s

    def close(self) -> None:
        self._trainer.close()
        del self._trainer
        gc.collect()


def probe(device: torch.device, samples: int) -> list[tuple[float, float]]:
    """Forward and backward seconds of some probes, the means of each, by themselves; nothing without a GPU. Hosts
    change from one probe to the next by a tenth, and a step is as long as they take in the mean."""
    if device.type != "cuda":
        return []
    replaced, functional.linear = functional.linear, LINEAR
    try:
        probe = Probe(device)
        forward, backward = zip(*(probe.seconds() for _ in range(samples)), strict=True)
        probe.close()
    finally:
        functional.linear = replaced
    return [(statistics.fmean(forward), statistics.fmean(backward))]
