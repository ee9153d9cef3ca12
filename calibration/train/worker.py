"""`python -m calibration.train.worker`: trains the workloads that its agent tells it to, one after another."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from calibration.measure.gpu import environment
from calibration.measure.team import FOREVER
from calibration.train.length import PROFILED, Length
from calibration.train.record import write_timeline
from calibration.train.run import RankRun, rank_record, spread, train
from simulator.config.files import read_text
from simulator.config.workload import load_workload


def main() -> None:
    """Reads its orders (JSON) from standard input; writes reports to the file descriptor that they name."""
    orders = json.load(sys.stdin)
    rank, world, cuda = int(orders["rank"]), int(orders["world"]), orders["device"] == "cuda"
    device = torch.device("cuda", int(orders["local_rank"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.TCPStore(orders["host"], int(orders["port"]), timeout=FOREVER)
    store = dist.PrefixStore(f"workers/{orders['generation']}", store)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=FOREVER)
    control = dist.new_group(timeout=FOREVER, backend="gloo")
    with os.fdopen(int(orders["report_fd"]), "w", buffering=1) if rank == 0 else contextlib.nullcontext() as stream:

        def report(message: dict[str, object]) -> None:
            if stream is not None:
                print(json.dumps(message), file=stream, flush=True)

        found = environment(device, world, orders["command"])
        report({"environment": found})
        gc.disable()  # collected between runs instead of within a step
        names = list(orders["paths"])
        for name in (names[index] for index in orders["pending"]):
            report({"start": orders["keys"][name], "limit_s": orders["limit_s"]})
            report({"row": {"name": name, **_one(name, Path(orders["paths"][name]), rank, device, control, orders)}})
        dist.barrier(control)
        report({"done": True})
    sys.stdout.flush()
    os._exit(0)  # NCCL may wait for ever in its destructors


def _one(
    name: str, path: Path, rank: int, device: torch.device, control: dist.ProcessGroup, orders: dict[str, object]
) -> dict[str, object]:
    """Train one workload; at rank 0 what is recorded of it. An error of a rank goes up, and ends all workers."""
    workload = load_workload(path)
    run = train(workload, rank, device, control, Length(**orders["length"]))  # type: ignore[arg-type]
    runs: list[RankRun | None] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(run, runs, 0, group=control)
    if runs is None:
        return {}
    took_part = [one for one in runs if one is not None]
    slowest = [max(steps) for steps in zip(*(one.events for one in took_part), strict=True)]
    wall = [max(steps) for steps in zip(*(one.wall for one in took_part), strict=True)]
    tokens, step_time = workload.training.global_batch * workload.training.seq, spread(slowest)
    write_timeline(Path(str(orders["out"])), name, [one.spans for one in took_part])
    length = Length(**orders["length"])  # type: ignore[arg-type]
    return {
        "workload": {"text": read_text(path), "resolved": workload.model_dump(mode="json")},
        "n_gpus": len(took_part),
        "tokens_per_step": tokens,
        "steps": {"warm_up": length.warm_up, "timed": len(slowest), "profiled": PROFILED},
        "step_time_s": step_time,
        "wall_time_s": spread(wall),
        "tokens_per_s": float(f"{tokens / step_time['median']:.6g}"),  # type: ignore[operator]
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
