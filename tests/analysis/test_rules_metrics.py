"""R40 to R43: what MFU divides by, what FLOPs count, and units."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

import simulator
from simulator import models
from simulator.config import load_workload
from simulator.config.profile import load_profile
from tests.support.jobs import job

NODE = {"name": "dgx_a100", "nodes": 2}


def llama(preset: str = "llama2-70b", **training: Any) -> dict[str, Any]:
    """Llama 2 on 16 A100s, 16 sequences of 2,048 tokens a step."""
    return {
        "model": {"preset": preset},
        "training": {"seq": 2048, "global_batch": 16, **training},
        "parallelism": {"tp": 8, "pp": 2, "dp": 1},
        "cluster": NODE,
    }


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "h100-sxm-80gb"])
def test_r40_mfu_divides_by_all_gpus_and_the_dense_peak_of_the_precision(gpu: str, precision: str) -> None:
    """Dense bf16 and fp16: 312 TFLOP/s of an A100, 989.4 of an H100 (data sheets, without sparsity); the summary names
    the peak, the JSON both."""
    peak = {"a100-sxm-80gb": 312e12, "h100-sxm-80gb": 989.4e12}[gpu]
    cluster = {"a100-sxm-80gb": "dgx_a100", "h100-sxm-80gb": "dgx_h100"}[gpu]
    result = simulator.run({**job(parallelism__tp=2, training__precision=precision), "cluster": {"name": cluster}})
    report = result.to_dict()
    assert load_profile(gpu).gpu_spec.peak_flops_per_s[precision].value == peak
    assert report["peak_flops_per_s_per_gpu"] == peak
    step, n = report["step_time_s"], report["n_gpus"]
    assert report["mfu"] == pytest.approx(report["model_flops_per_step"] / (step * n * peak), rel=1e-12)
    assert report["model_flops_per_s_per_gpu"] == pytest.approx(report["mfu"] * peak, rel=1e-12)
    assert f"{peak / 1e12:,.1f} TFLOP/s" in printed(result)


def test_r41_recompute_counts_in_hfu_alone() -> None:
    """Forward, backward (twice the forward), and with full recomputation the forward once more: 4/3. Causal attention
    is computed as half, so flash kernels at a short sequence leave it near that."""
    for preset in ("llama2-7b", "gpt3-6.7b"):
        plain, full = (
            load_workload({**llama(preset, recompute=kind), "parallelism": {"tp": 8, "pp": 2, "dp": 1}})
            for kind in ("none", "full")
        )
        assert models.model_flops_per_step(plain) == models.model_flops_per_step(full)
        ratio = models.hardware_flops_per_step(full) / models.model_flops_per_step_causal(full)
        assert ratio == pytest.approx(4 / 3, rel=0.02)


def test_r42_a_published_run_is_3_percent_not_45() -> None:
    """500 steps of 16 x 2,048 tokens in 13.5 h: 97.2 s a step. 6 x 69e9 x 32,768 FLOPs of them are 1.36e16, with
    attention (12 l h s of 2,048 tokens, 4 %) 1.41e16, of 16 x 312e12 x 97.2 = 4.85e17: 2.9 %."""
    workload = load_workload(llama())
    share = models.model_flops_per_step(workload) / (16 * 312e12 * 13.5 * 3600 / 500)
    assert share == pytest.approx(0.028, abs=0.0015)


def test_r43_one_unit_of_bytes_in_a_table() -> None:
    """Tables of the summary end with an empty line; none has both GB and GiB."""
    text = printed(simulator.run("llama2_7b_zero2"))
    blocks = re.split(r"\n\s*\n(?=\S)", text)
    assert any("GiB" in block for block in blocks)
    assert any(re.search(r"\bGB\b", block) for block in blocks)
    assert not [block for block in blocks if "GiB" in block and re.search(r"\bGB\b", block)]


def test_r43_capacity_is_what_the_device_reports() -> None:
    """Sold as 80 GB, an A100 reports 79.3 GiB and an H100 79.2 GiB, which are 85.1 and 85.0 GB."""
    for gpu, gib in (("a100-sxm-80gb", 79.3), ("h100-sxm-80gb", 79.2)):
        assert load_profile(gpu).gpu_spec.memory_bytes.value / 2**30 == pytest.approx(gib, abs=0.06)


def printed(result: simulator.StepResult) -> str:
    console = Console(width=110, file=io.StringIO())
    console.print(result.summary())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
