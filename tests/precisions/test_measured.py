"""Prices of casts and of products in 8 bits, beside what they took on an H200 (calibration/measurements/fp8-*.csv)."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean, median

import pytest

from simulator.config.profile import load_profile
from simulator.costs.matmul import MatmulCost
from simulator.costs.memory import MemoryCost
from simulator.program import Matmul, Memory

MEASUREMENTS = Path(__file__).resolve().parents[2] / "calibration" / "measurements"
PROFILE = load_profile("h200-sxm-141gb")
#: Cast and place of a kernel in it -> its class, and what it reads and writes of a tensor in bf16.
CASTS = {
    ("tensor", 0): ("fp8_amax", 1.0, 0.0),
    ("tensor", 2): ("fp8_cast", 1.0, 0.5),
    ("tensor_t", 2): ("fp8_turned", 1.0, 0.5),
    ("tensor_both", 2): ("fp8_both", 1.0, 1.0),
    ("rows", 0): ("fp8_rows", 1.0, 0.5),
}
#: Scales as the table has them -> as kernels have them.
SCALES = {"tensor": "tensor", "blocks 1x128 and 128x128": "blocks", "blocks 1x128 both": "blocks"}


def rows(name: str) -> list[dict[str, str]]:
    with (MEASUREMENTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("cast", "place"), CASTS)
def test_casts_of_inductor_take_as_long_as_measured(cast: str, place: int) -> None:
    """Within a sixth in the mean over sizes from 2 to 117 million elements. The profiler leaves the gap out."""
    assert PROFILE.kernels.gap_s is not None
    cost = MemoryCost.from_sections(PROFILE.gpu_spec, PROFILE.kernels.memory, ("eager", "fused", "fp8"))
    op, read, written = CASTS[cast, place]
    errors = []
    for row in rows("fp8-kernels.csv"):
        if (row["cast"], int(row["kernel"]), row["compiled"]) != (cast, place, "true"):
            continue
        elements, width = int(row["rows"]) * int(row["width"]), int(row["width"])
        kernel = Memory(op, 2 * elements * read, 2 * elements * written, width=width)
        errors.append((cost.seconds(kernel) - PROFILE.kernels.gap_s.value) / (1e-6 * float(row["us"])) - 1)
    assert len(errors) == 5
    assert fmean(map(abs, errors)) < 1 / 6


@pytest.mark.parametrize("scales", SCALES)
def test_products_with_scales_take_as_long_as_measured(scales: str) -> None:
    """Within 7 % in the median of each role, where products of bf16 of that day are 3 to 7 % shorter than the price."""
    cost = MatmulCost(PROFILE.gpu_spec, PROFILE.kernels.matmul)
    ratios: dict[str, list[float]] = {}
    for row in rows("fp8-products.csv"):
        same = row["scales"] == scales and (scales != "tensor" or row["fast_sums"] == str(row["role"] == "fwd").lower())
        if same and (scales != "blocks 1x128 both" or row["role"] == "wgrad"):
            m, n, k = (int(row[size]) for size in "mnk")
            kernel = Matmul(m, n, k, dtype="fp8", role=row["role"], out_dtype="bf16", scaling=SCALES[scales])
            ratios.setdefault(row["role"], []).append(cost.seconds(kernel) / (1e-6 * float(row["us"])))
    assert ratios
    assert all(median(some) == pytest.approx(1.0, abs=0.07) for some in ratios.values())
