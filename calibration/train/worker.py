"""`python -m calibration.train.worker`: trains the workloads that its agent tells it to, one after another."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from calibration.measure.gpu import environment
from calibration.measure.start import absent_others, device_of, end_with_parent, join, reporting
from calibration.measure.team import FOREVER
from calibration.train.length import PROFILED, Length
from calibration.train.record import now, write_timeline
from calibration.train.run import RankRun, rank_record, spread, train
from simulator.config import load_workload


def main() -> None:
    """Reads its orders (JSON) from standard input; writes reports to the file descriptor that they name."""
    orders = json.load(sys.stdin)
    end_with_parent(int(orders["agent"]))
    rank, device = int(orders["rank"]), device_of(orders)
    # A profiler that ends has to give up CUPTI, or it slows the host's later launches. On an H200 autograd's thread
    # took 37 ms for the same passes before, 46 ms behind one profiler and 57 ms behind two
    # (github.com/pytorch/pytorch/pull/146604).
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    warnings.simplefilter("ignore")
    gc.disable()  # collected between runs instead of within a step
    with reporting(orders) as report:
        control = None if orders["alone"] else _control(orders)
        report({"environment": environment(device, int(orders["world"]), orders["command"])})
        names = list(orders["paths"])
        for name in (names[index] for index in orders["pending"]):
            report({"start": orders["keys"][name], "limit_s": orders["limit_s"]})
            report({"row": {"name": name, **_one(name, rank, device, control, orders)}})
        if control is not None:
            dist.barrier(control)


def _control(orders: dict[str, Any]) -> dist.ProcessGroup:
    """Meet the other workers, and return the group of all of them."""
    join(orders)
    return dist.new_group(timeout=FOREVER, backend="gloo")


def _one(
    name: str, rank: int, device: torch.device, control: dist.ProcessGroup | None, orders: dict[str, Any]
) -> dict[str, object]:
    """Train one workload; at rank 0 what is recorded of it. An error of a rank goes up, and ends all workers.

    Without a ``control`` of all ranks this one is alone.
    """
    workload, length = load_workload(Path(orders["paths"][name])), Length(**orders["length"])
    began = now()
    if control is None:
        with absent_others(workload.n_ranks):
            run = train(workload, rank, device, dist.new_group(), length)
        runs: list[RankRun | None] | None = [run]
    else:
        run = train(workload, rank, device, control, length)
        runs = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(run, runs, 0, group=control)
    if runs is None:
        return {}
    took_part = [one for one in runs if one is not None]
    slowest = [max(steps) for steps in zip(*(one.events for one in took_part), strict=True)]
    wall = [max(steps) for steps in zip(*(one.wall for one in took_part), strict=True)]
    tokens = workload.training.global_batch * workload.training.seq
    write_timeline(Path(orders["out"]), name, [one.kernels for one in took_part])
    return {
        "date": began,
        "workload": {"resolved": workload.model_dump(mode="json")},
        "n_gpus": len(took_part),
        "tokens_per_step": tokens,
        "steps": {
            "warm_up": length.warm_up,
            "settling": took_part[0].settling,
            "timed": len(slowest),
            "profiled": PROFILED,
        },
        "step_time_s": spread(slowest),
        "wall_time_s": spread(wall),
        "tokens_per_s": float(f"{tokens / statistics.median(slowest):.6g}"),
        "loss": _loss([one for one in took_part if any(one.loss)]),
        "ranks": [rank_record(number, one) for number, one in enumerate(took_part)],
    }


def _loss(last_stages: list[RankRun]) -> list[float]:
    """Mean over replicas, whose ranks with the last stage know it."""
    return [
        float(f"{sum(losses) / len(losses):.6g}") for losses in zip(*(one.loss for one in last_stages), strict=True)
    ]


if __name__ == "__main__":
    main()
