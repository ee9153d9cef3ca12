"""Copies: inside the device memory, to and from the host's (pinned or pageable), and between two GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from calibration.measure.bench import Bench
from calibration.measure.case import Case, Level, UnavailableError, Work

OPS = ("device", "to_device_pinned", "to_host_pinned", "to_device_pageable", "to_host_pageable", "peer")


def cases(level: Level, gpus: int) -> Iterator[Case]:
    sizes = {"smoke": (2**16,), "quick": (2**20, 2**28)}.get(level, tuple(4**power for power in range(6, 16)))
    for op in OPS:
        for nbytes in sizes:
            yield Case("copy", op, {"bytes": nbytes})


def prepare(case: Case, bench: Bench) -> Work:
    nbytes = int(case.params["bytes"])
    source, target = torch.device("cpu"), bench.device
    if case.op == "device":
        source = bench.device
    elif case.op == "peer":
        if torch.cuda.device_count() < 2:
            raise UnavailableError("only one GPU is visible")
        source = torch.device("cuda", (bench.device.index + 1) % torch.cuda.device_count())
    elif case.op.startswith("to_host"):
        source, target = target, source
    pinned = case.op.endswith("pinned") and bench.cuda
    sets = bench.sets(2.0 * nbytes, 16)

    def buffer(device: torch.device) -> torch.Tensor:
        tensor = torch.randn(nbytes // 2, device=bench.device).to(device, torch.bfloat16)
        return tensor.pin_memory() if pinned and device.type == "cpu" else tensor

    buffers = [(buffer(target), buffer(source)) for _ in range(sets)]

    def run(i: int) -> object:
        out, data = buffers[i]
        return out.copy_(data, non_blocking=pinned or case.op in ("device", "peer"))

    return Work(run, nbytes=nbytes * (2.0 if case.op == "device" else 1.0), sets=sets)
