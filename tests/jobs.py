"""Small jobs for tests: workload mappings, and what it takes to play them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from simulator.api import Result, run
from simulator.config import load_workload
from simulator.errors import InputError


def job(**changes: Any) -> dict[str, Any]:
    """A tiny GPT on DGX A100s. ``changes``: dotted keys with __ for the dot, such as parallelism__tp=2."""
    workload: dict[str, Any] = {
        "name": "tiny",
        "model": {"layers": 8, "hidden": 256, "heads": 8, "vocab": 1024},
        "training": {"seq": 128, "global_batch": 16, "precision": "bf16"},
        "parallelism": {},
        "cluster": {"name": "dgx_a100"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        workload[section][name] = value
    return workload


def play(workload: dict[str, Any], **simulation: bool) -> Result:
    return run({**workload, "simulation": simulation})


def layouts(limit: int) -> Iterator[dict[str, Any]]:
    """Legal parallelism sections of at most ``limit`` ranks: every schedule x tp, dp, pp, with overlap and without."""
    for tp, dp, pp in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        if tp * dp * pp > limit:
            continue
        for number, (schedule, vpp) in enumerate((("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2))):
            overlap = (tp.bit_length() + dp.bit_length() + pp.bit_length() + number) % 2 == 0
            section = {
                "tp": tp,
                "dp": dp,
                "pp": pp,
                "vpp": vpp,
                "schedule": schedule,
                "sequence_parallel": tp > 1 and dp > 1,
                "zero": int(dp == 4),
                "overlap": {"grad_reduce": overlap, "p2p": overlap, "param_gather": overlap},
                "bucket_bytes": 400_000,
            }
            try:
                load_workload(job() | {"parallelism": section})
            except InputError:
                continue
            yield section
