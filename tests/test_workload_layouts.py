"""Shipped layouts from 7B to 540B: they run, and fit on GPUs of 80 GB."""

from __future__ import annotations

import pytest

from simulator.api import run

#: Name, GPUs, parameters in billions, and the sizes (tp, pp, dp, ZeRO stage).
LAYOUTS = [
    ("llama2_7b_zero2", 8, 6.74, (1, 1, 8, 2)),
    ("gpt3_13b_zero2", 8, 12.86, (2, 1, 4, 2)),
    ("llama2_70b_64", 64, 69.0, (8, 2, 4, 1)),
    ("gpt3_175b_256", 256, 174.6, (8, 4, 8, 1)),
    ("palm_540b_1024", 1024, 540.35, (8, 8, 16, 1)),
]


@pytest.mark.parametrize(("name", "gpus", "billions", "sizes"), LAYOUTS)
def test_it_runs_and_fits(name: str, gpus: int, billions: float, sizes: tuple[int, int, int, int]) -> None:
    result = run(name)
    answer = result.to_dict()
    layout = result.workload.parallelism
    assert (layout.tp, layout.pp, layout.dp, layout.zero) == sizes
    assert answer["n_gpus"] == gpus
    assert answer["params_total"] / 1e9 == pytest.approx(billions, rel=2e-3)
    assert answer["warnings"] == []
    assert answer["memory"]["capacity_bytes"] < 86e9
    assert answer["memory"]["fits"]
    # Neither faster than the hardware nor far below what such jobs are reported to reach.
    assert 0.3 < answer["mfu"] < 0.8
