"""Records of runs as `python -m calibration train` leaves them, made from simulated ones: for tests without GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from calibration.commits import sha256
from calibration.compare.kernels import CLASSES, simulated_kernels
from calibration.predict.predictions import simulate

GPT = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "tied_embeddings": False}


def workload(directory: Path, name: str, parallelism: dict[str, object]) -> Path:
    """A small workload file."""
    path = directory / f"{name}.yaml"
    training = {"seq": 512, "micro_batch": 1, "global_batch": 8}
    cluster = "hgx_h100_4gpu"
    path.write_text(
        json.dumps(
            {"model": GPT, "training": training, "framework": "pytorch", "parallelism": parallelism, "cluster": cluster}
        ),
        encoding="utf-8",
    )
    return path


def record(
    directory: Path,
    path: Path,
    slower: float,
    *,
    more_memory: float = 1.0,
    spread: float = 0.0,
    date: str = "2030-01-01T00:00:00+00:00",
) -> None:
    """A run of ``path`` that was the simulated one in every respect, but its kernels took ``slower`` times as long."""
    one = simulate(path)
    assert one.result is not None
    kernels, step = simulated_kernels(one.result), one.result.to_dict()
    by_rank = {memory.rank: memory.allocated for memory in one.result.memories}
    names = {"hand-over": "communication"}
    # Both ends of a hand-over are posted as its bytes come, so that they come in one order on both ranks.
    late = kernels.kind == "pp"
    frame = pd.DataFrame(
        {
            "rank": kernels.rank,
            "stream": "compute0",
            "class": [names.get(CLASSES[code], CLASSES[code]) for code in kernels.code],
            "kind": kernels.kind,
            "name": "kernel",
            "start_s": np.where(late, kernels.moves_s, kernels.start_s) * slower,
            "end_s": kernels.end_s * slower,
        }
    )
    ranks = []
    for rank, like in enumerate(one.result.spans.simulated_as):
        own = frame[frame["rank"] == rank]
        lengths = (own["end_s"] - own["start_s"]).groupby([own["class"], own["kind"]]).agg(["sum", "count"])
        ranks.append(
            {
                "rank": rank,
                "memory": {"steady_allocated_bytes": by_rank[like] * more_memory},
                "profile": {
                    "exposed_s": kernels.exposed_s(one.result.spans.n_ranks) * slower,
                    "step_s": 1.03 * step["step_time_s"] * slower,
                },
                "kernels": [
                    {"class": name, "kind": kind, "op": "", "seconds": float(seconds), "launches": int(count)}
                    for (name, kind), (seconds, count) in zip(lengths.index, lengths.to_numpy(), strict=True)
                ],
            }
        )
    step_s = {"median": step["step_time_s"] * slower, "spread": spread}
    save(directory, path, "ok", date, n_gpus=len(ranks), step_time_s=step_s, ranks=ranks)
    frame.to_csv(directory / f"{path.stem}.timeline.csv.gz", index=False)


def save(directory: Path, path: Path, status: str, date: str, reason: str = "", **more: object) -> None:
    """A record of ``path`` with this ``status``."""
    content = {
        "format": 1,
        "name": path.stem,
        "status": status,
        "reason": reason,
        "date": date,
        "command": "python -m calibration train",
        "workload": {"sha256": sha256(path.read_text(encoding="utf-8"))},
        "environment": {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11", "cuda": "13.0", "nccl": "2.28"},
        **more,
    }
    (directory / f"{path.stem}.json").write_text(json.dumps(content), encoding="utf-8")
