"""Products of fp32 on CUDA cores, in place of TF32."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from simulator.config import load_workload
from simulator.config.profile import load_profiles
from simulator.costs.attention import AttentionCost
from simulator.costs.matmul import MatmulCost
from simulator.errors import InputError
from simulator.models import warnings
from simulator.program import Attention, Matmul

MEASURED = Path(__file__).parents[2] / "calibration" / "measurements"

JOB: dict[str, Any] = {
    "name": "job",
    "model": {"layers": 2, "hidden": 1024, "heads": 16, "vocab": 32_000, "attention": "unfused"},
    "training": {"seq": 1024, "global_batch": 8, "precision": "fp32"},
    "cluster": {"name": "dgx_a100", "nodes": 1},
}


LARGE = Matmul(8192, 8192, 8192, dtype="fp32", role="fwd")


def seconds(cluster: str, tf32: bool, product: Matmul = LARGE) -> float:
    """Return the seconds of a product on the GPUs of a cluster."""
    workload = load_workload(JOB | {"cluster": {"name": cluster, "nodes": 1}}, {"training.tf32": tf32})
    (profile,) = load_profiles(workload.calibrations, workload.training).values()
    cost = MatmulCost(profile.gpu_spec, profile.kernels.matmul)
    return cost.seconds(product)


@pytest.mark.parametrize(
    ("cluster", "ratio"), [("dgx_a100", 156 / 19.5), ("dgx_h100", 494.7 / 66.9), ("dgx1_v100", 1.0)]
)
def test_cuda_cores_take_as_much_longer_as_their_peak_is_lower(cluster: str, ratio: float) -> None:
    """Data sheets: 156 and 19.5 TFLOP/s of an A100, 494.7 and 66.9 of an H100. A V100 has no TF32 to do without. What a
    product takes for memory and its start is no longer, but hidden in so large a one."""
    assert seconds(cluster, False) / seconds(cluster, True) == pytest.approx(ratio, rel=0.04)


def test_layouts_are_alike_on_cuda_cores() -> None:
    """TF32 takes 1.7 times as long for a weight's gradient on an H100, as operands lie across. Cores take any order."""
    product = Matmul(8192, 8192, 8192, dtype="fp32", role="wgrad")
    assert seconds("dgx_h100", False, product) == seconds("dgx_h100", False)
    assert seconds("dgx_h100", True, product) > 1.3 * seconds("dgx_h100", True)


def test_products_on_an_h200s_cores_take_what_they_took() -> None:
    """All but the smallest product (1,024 in each dimension, 55 to 60 us) within a sixth, 5 per cent in the mean."""
    off = []
    with (MEASURED / "fp32-products.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            m, n, k = (int(row[size]) for size in "mnk")
            if row["tf32"] == "true" or m * n * k == 1024**3:
                continue
            for role, sizes in (("fwd", (m, n, k)), ("dgrad", (m, k, n)), ("wgrad", (n, k, m))):
                product = Matmul(*sizes, dtype="fp32", role=role)
                off.append(seconds("hgx_h200_8gpu", False, product) / (1e-6 * float(row[f"{role}_us"])) - 1)
    assert len(off) == 42
    assert max(map(abs, off)) < 1 / 6
    assert sum(map(abs, off)) / len(off) < 0.05


def test_a_profile_without_the_speed_of_cuda_cores_is_refused() -> None:
    with pytest.raises(InputError, match="gb300-288gb has no speed of fp32 on CUDA cores") as caught:
        load_workload(JOB | {"cluster": {"name": "gb300_nvl72"}}, {"training.tf32": False})
    assert caught.value.key == "training.tf32"


@pytest.mark.parametrize(("cluster", "told"), [("dgx_h100", True), ("gb300_nvl72", False)])
def test_cuda_cores_are_proposed_where_the_profile_has_their_speed(cluster: str, told: bool) -> None:
    """The warning proposes CUDA cores only where a job on them is not refused."""
    workload = load_workload(JOB | {"cluster": {"name": cluster}})
    (warning,) = [text for text in warnings(workload) if "allow_tf32" in text]
    assert ("training.tf32=false" in warning) is told


def test_without_a_product_in_fp32_the_key_says_nothing() -> None:
    workload = load_workload(JOB, {"training.tf32": False, "training.precision": "bf16"})
    assert any("training.tf32" in text and "no product is in fp32" in text for text in warnings(workload))
    assert not any("tf32" in text for text in warnings(load_workload(JOB, {"training.tf32": False})))


@pytest.mark.parametrize(
    ("head_dim", "sequences", "seq", "backward", "measured_s"),
    [
        (64, 4, 2048, False, 1161e-6),
        (64, 4, 2048, True, 2816e-6),
        (128, 2, 1024, False, 276e-6),
        (128, 2, 1024, True, 822e-6),
    ],
)
def test_fused_attention_of_fp32_is_no_faster_with_tf32(
    head_dim: int, sequences: int, seq: int, backward: bool, measured_s: float
) -> None:
    """An H200's kernels of 16 heads, alike with TF32 and without: calibration/measurements/eager-kernels.csv, and of
    heads of 64 those of calibration/results/frameworks/hf1_llama300m_tf32_mha."""
    kernel = Attention(sequences, 16, 16, seq, seq, head_dim, dtype="fp32", backward=backward)
    for tf32 in (True, False):
        workload = load_workload(JOB | {"cluster": {"name": "hgx_h200_8gpu", "nodes": 1}}, {"training.tf32": tf32})
        (profile,) = load_profiles(workload.calibrations, workload.training).values()
        cost = AttentionCost(profile.gpu_spec, profile.kernels.attention)
        assert cost.seconds(kernel) == pytest.approx(measured_s, rel=0.05)


@pytest.mark.parametrize(
    ("cluster", "kind", "head_dim", "seq", "beyond"),
    [
        ("hgx_h200_8gpu", "measured", 64, 2048, 1.0),
        ("hgx_h200_8gpu", "measured", 128, 8192, 4.0),
        ("hgx_h200_8gpu", "measured", 256, 1024, 2.0),
        ("dgx_h100", "assumed", 128, 2048, math.inf),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_a_price_of_fused_attention_names_what_priced_it(
    cluster: str, kind: str, head_dim: int, seq: int, beyond: float, backward: bool
) -> None:
    """Heads of 64 and 128 and sequences of 1,024 to 2,048 were measured on an H200; an H100 is taken to be alike."""
    workload = load_workload(JOB | {"cluster": {"name": cluster, "nodes": 1}})
    (profile,) = load_profiles(workload.calibrations, workload.training).values()
    cost = AttentionCost(profile.gpu_spec, profile.kernels.attention)
    fp32, half = (
        cost.origin(Attention(1, 16, 16, seq, seq, head_dim, dtype=dtype, backward=backward))
        for dtype in ("fp32", "bf16")
    )
    assert (fp32.kind, fp32.source, fp32.beyond) == (kind, profile.kernels.attention.fp32.source, beyond)
    assert half.source != fp32.source
