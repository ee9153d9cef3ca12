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
    pytest.param("palm_540b_1024", 1024, 540.35, (8, 8, 16, 1), marks=pytest.mark.slow),
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cp", "dp"), [("llama3_405b", 1, 128), ("llama3_405b_131k", 16, 8)])
def test_llama_405b_on_its_makers_layouts(name: str, cp: int, dp: int) -> None:
    """Table 4 of arXiv 2407.21783: 16,384 GPUs, TP 8, PP 16; it fits without recomputation, as there."""
    result = run(name)
    answer, layout = result.to_dict(), result.workload.parallelism
    assert (layout.tp, layout.cp, layout.pp, layout.dp, answer["n_gpus"]) == (8, cp, 16, dp, 16384)
    assert answer["params_total"] / 1e9 == pytest.approx(405.85, rel=2e-3)
    assert answer["memory"]["fits"]
    assert 0.25 < answer["mfu_causal"] < 0.45  # measured: 0.41 and 0.38
