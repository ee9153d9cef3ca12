"""Shipped layouts of models with experts: they run, and fit on GPUs of 80 GB unless their file says otherwise."""

from __future__ import annotations

import pytest

from simulator.api import run

SLOW = pytest.mark.slow
#: Name, GPUs, parameters and active ones in billions, and whether it fits.
LAYOUTS = [
    pytest.param("mixtral_8x7b", 64, 46.70, 12.88, True),
    pytest.param("qwen3_235b", 256, 235.09, 22.19, True, marks=SLOW),
    pytest.param("deepseek_v3", 1024, 671.03, 37.55, True, marks=SLOW),
    pytest.param("deepseek_v3_dualpipe", 2048, 671.03, 37.55, False, marks=SLOW),
]


@pytest.mark.parametrize(("name", "gpus", "total", "active", "fits"), LAYOUTS)
def test_it_runs_and_fits(name: str, gpus: int, total: float, active: float, fits: bool) -> None:
    result = run(name)
    answer = result.to_dict()
    assert answer["n_gpus"] == gpus
    assert answer["params_total"] / 1e9 == pytest.approx(total, rel=1e-3)
    assert answer["params_active"] / 1e9 == pytest.approx(active, rel=1e-3)
    assert answer["memory"]["fits"] == fits
    # Ranks of one stage are alike: one of each is played.
    assert answer["simulation"]["ranks_simulated"] <= result.workload.parallelism.pp
    assert 0.15 < answer["mfu"] < 0.65
