"""How fast this rank's host issues ops now: hosts of one kind differ, and change while they run."""

from __future__ import annotations

import gc
import statistics
import time

import torch

from calibration.narrow import PROBE, narrow
from calibration.train.trainer import Groups, Trainer

PROBES = 5


def probe(device: torch.device) -> list[float]:
    """Seconds in which the host issues the passes of a small model, on this rank alone; nothing without a GPU."""
    if device.type != "cuda":
        return []
    workload = narrow(PROBE)
    groups = Groups.of(workload.parallelism, 0)
    assert groups is not None
    trainer = Trainer(workload, groups, device)
    samples = []
    for _ in range(PROBES + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        trainer.forward_backward()
        samples.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    trainer.close()
    del trainer
    gc.collect()
    return [statistics.median(samples[1:])]
