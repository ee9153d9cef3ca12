"""How fast this rank's host issues ops now: hosts of one kind differ, and change while they run."""

from __future__ import annotations

import gc
import statistics
import time

import torch

from calibration.narrow import PROBE, narrow
from calibration.train.trainer import Groups, Trainer


class Probe:
    """The passes of a small model (`calibration.narrow.PROBE`), which this rank's host issues to a GPU by itself."""

    def __init__(self, device: torch.device) -> None:
        workload = narrow(PROBE)
        groups = Groups.of(workload.parallelism, 0)
        assert groups is not None
        self._trainer = Trainer(workload, groups, device)
        self._trainer.forward_backward()

    def seconds(self) -> float:
        """That the host takes to issue them, the GPU idle. A forward pass goes before, as other work did."""
        self._trainer.modules[0](self._trainer.inputs[:1])
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._trainer.forward_backward()
        seconds = time.perf_counter() - began
        torch.cuda.synchronize()
        return seconds

    def close(self) -> None:
        self._trainer.close()
        del self._trainer
        gc.collect()


def probe(device: torch.device, samples: int) -> list[float]:
    """The median of some probes, by themselves; nothing without a GPU."""
    if device.type != "cuda":
        return []
    probe = Probe(device)
    median = statistics.median(probe.seconds() for _ in range(samples))
    probe.close()
    return [median]
