"""Train one workload for some steps and say how long they took: the part of a run that every rank does alike."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from calibration.measure.gpu import Telemetry
from calibration.train.frameworks import StackTrainer, is_stack, stack_trainer
from calibration.train.host import probe
from calibration.train.length import PROFILED, Length
from calibration.train.passes import BackwardClock
from calibration.train.process_groups import ProcessGroups
from calibration.train.profile import ProfiledKernel, exposure, profiled, table
from calibration.train.trainer import Trainer
from simulator.config.workload import Workload

#: Passes that a probe of the host is the mean of.
PROBES = 6


@dataclass
class RankRun:
    """The run as one rank saw it; times in seconds, memory in bytes."""

    place: dict[str, int]
    loss: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    settling: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    telemetry: list[dict[str, Any]] = field(default_factory=list)
    probe: list[tuple[float, float]] = field(default_factory=list)
    profiled_s: float = 0.0
    kernels: list[ProfiledKernel] = field(default_factory=list)


def train(
    workload: Workload, rank: int, device: torch.device, control: dist.ProcessGroup, length: Length
) -> RankRun | None:
    """Collective over all processes; None on those that the layout does not use. ``control`` has all of them."""
    groups = ProcessGroups.from_layout(workload.parallelism, rank)
    run = None
    try:
        if groups is not None:
            before = probe(device, PROBES)
            if device.type == "cuda":
                # What cuBLAS holds for the probe would be missing from the run's own memory.
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()
            run = _train(workload, groups, device, length)
            run.probe = [*before, *run.probe, *probe(device, PROBES)]
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier(control)
    return run


def _train(workload: Workload, groups: ProcessGroups, device: torch.device, length: Length) -> RankRun:
    cuda = device.type == "cuda"
    left = torch.cuda.memory_allocated() if cuda else 0
    trainer, run = _trainer(workload, groups, device), RankRun(dict(groups.place))
    if groups.expert is not None:
        run.place["ep"] = dist.get_rank(groups.expert)
    telemetry = Telemetry(device.index if cuda else None)
    losses, highest = _warm_up(trainer, run, length.warm_up, cuda=cuda)
    while True:
        for _ in _in_a_row(length.settle_s, groups, device):
            losses.append(trainer.step())
            run.settling += 1
        for _ in _in_a_row(length.row_s, groups, device, least=1):
            with BackwardClock() as clock:
                seconds, wall, loss = _timed(trainer.step, lambda: run.telemetry.append(telemetry.read()), cuda=cuda)
            losses.append(loss)
            run.events.append(seconds)
            run.wall.append(wall)
            run.backward.append(clock.seconds)
            if len(run.events) == length.most:
                break
        done, enough = len(run.events), sum(run.wall) >= length.seconds
        if done == length.most or _any_says(done >= length.least and enough, groups, device):
            break
        run.probe += probe(device, PROBES)
    if cuda:
        run.memory |= {**_memory(highest), "left_allocated_bytes": left}
    walls: list[float] = []

    def step() -> None:
        _, wall, loss = _timed(trainer.step, lambda: None, cuda=cuda)
        walls.append(wall)
        losses.append(loss)

    kinds = {"send_recv": "pp", "": "dp" if workload.parallelism.dp > 1 else "tp"}
    run.kernels = profiled(step, lambda: _any_says(True, groups, device), PROFILED - 1, kinds, cuda=cuda)
    run.profiled_s = walls[-1]
    run.loss = [float(loss) for loss in losses]
    trainer.close()
    if is_stack(workload):
        groups.close()
    return run


def _trainer(workload: Workload, groups: ProcessGroups, device: torch.device) -> Trainer | StackTrainer:
    if is_stack(workload):
        return stack_trainer(workload, groups, device)
    return Trainer(workload, groups, device)


def _warm_up(
    trainer: Trainer | StackTrainer, run: RankRun, steps: int, *, cuda: bool
) -> tuple[list[torch.Tensor], int]:
    """Make the first steps; return their losses, and the most bytes that were allocated meanwhile."""
    if not cuda:
        return [trainer.step() for _ in range(steps)], 0
    losses = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for number in range(steps):
        losses.append(trainer.step())
        if number == 0:
            torch.cuda.synchronize()
            run.memory["first_step_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
    highest = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return losses, highest


def _memory(highest: int) -> dict[str, int]:
    """Return the bytes of the steps since the warm-up, in which at most ``highest`` bytes were allocated."""
    steady = torch.cuda.max_memory_allocated()
    return {
        "steady_allocated_bytes": steady,
        "peak_allocated_bytes": max(highest, steady),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _timed(
    step: Callable[[], torch.Tensor], issued: Callable[[], object], *, cuda: bool
) -> tuple[float, float, torch.Tensor]:
    """(seconds between events on the stream, seconds on the host, loss) of a step that starts on an idle GPU.

    The host runs ahead of the GPU within a step and waits at its end, as where a training loop logs its loss. Before
    the wait it calls ``issued``, while the GPU is still at work: at the end of a step clocks are the optimizer's.
    """
    if not cuda:
        began = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - began
        issued()
        return seconds, seconds, loss
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    start.record()
    loss = step()
    end.record()
    issued()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3, time.perf_counter() - began, loss


def _in_a_row(seconds: float, groups: ProcessGroups, device: torch.device, *, least: int = 0) -> Iterator[int]:
    """A turn for each of the steps that all ranks make in a row, ``least`` of them and until any rank has spent so
    long."""
    began = time.perf_counter()
    for number in itertools.count():
        if _any_says(number >= least and time.perf_counter() - began >= seconds, groups, device):
            return
        yield number


def _any_says(mine: bool, groups: ProcessGroups, device: torch.device) -> bool:
    """Return True where any rank says so.

    Ranks meet here, so that all make the same steps: none goes on before all have come, as the root of a broadcast
    would.
    """
    votes = torch.tensor([float(mine)], device=device)
    if groups.everyone is not None:
        dist.all_reduce(votes, group=groups.everyone)
    return bool(votes.item())


def spread(values: Sequence[float]) -> dict[str, object]:
    """median, p10, p90, min, max, spread and each."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    median = statistics.median(ordered)
    figures = {"median": median, "p10": at(0.1), "p90": at(0.9), "min": ordered[0], "max": ordered[-1]}
    return {
        **{name: float(f"{value:.6g}") for name, value in figures.items()},
        "spread": float(f"{(at(0.9) - at(0.1)) / median:.4g}"),
        "each": [float(f"{value:.6g}") for value in values],
    }


def rank_record(rank: int, run: RankRun) -> dict[str, object]:
    """An entry of ``ranks``, see `calibration.train.record`."""
    return {
        "rank": rank,
        "place": run.place,
        "step_time_s": spread(run.events),
        "wall_time_s": spread(run.wall),
        "memory": run.memory,
        "clocks": _clocks(run.telemetry),
        "host": {
            "probe_s": [float(f"{sum(seconds):.5g}") for seconds in run.probe],
            "probe_forward_s": [float(f"{forward_s:.5g}") for forward_s, _ in run.probe],
            "backward_s": float(f"{statistics.median(run.backward):.6g}"),
        },
        "profile": {**exposure(run.kernels), "step_s": float(f"{run.profiled_s:.6g}")},
        "kernels": table(run.kernels),
    }


def _clocks(readings: Sequence[dict[str, Any]]) -> dict[str, object]:
    readings = [reading for reading in readings if reading]
    if not readings:
        return {}
    clocks: dict[str, object] = {}
    for name in ("sm_mhz", "power_w", "temp_c"):
        values = [reading[name] for reading in readings]
        clocks[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {**clocks, "throttle": sorted({reading["throttle"] for reading in readings if "throttle" in reading})}
