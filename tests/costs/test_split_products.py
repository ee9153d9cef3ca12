"""Products that are cut along k, priced by hand on a GPU of 4 SMs with one tile of 128 x 128.

An SM does 1e12 FLOP/s. A wave takes 1 us to begin and 1 us to store 128 x 128 elements of 2 bytes; a kernel takes 2 us
to start. Memory is endless. A product of 128 x 256 has 2 tiles, and so leaves two SMs idle unless k is cut.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.costs.matmul import MatmulCost, Products
from simulator.program import GroupedMatmul, Matmul
from tests.support.profiles import PROFILE

US = 1e-6
#: FLOPs of 8,192 products and sums in each element of a tile, at the speed of an SM.
WHOLE_s = 2 * 128 * 128 * 8192 / 1e12


def seconds(kernel: Matmul | GroupedMatmul, min_k: float = 1.0, sum_Bps: float = 1e12, sms: int = 4) -> float:
    """Return the price of ``kernel``; slices of k are summed at ``sum_Bps`` after 3 us, and have ``min_k`` at least.

    The GPU has 4 SMs or as many as ``sms``, each as fast.
    """
    profile = PROFILE["a100-sxm-80gb"]
    spec, model = profile.gpu_spec, profile.kernels.matmul
    peak = replace(spec.peak_flops_per_s["bf16"], value=sms * 1e12)
    speed = {role: replace(figure, value=1.0) for role, figure in model.layout_speed["bf16"].items()}
    endless = replace(spec.memory_bandwidth_Bps, value=1e30)
    cost = MatmulCost(
        replace(spec, sms=sms, peak_flops_per_s={"bf16": peak}, memory_bandwidth_Bps=endless),
        replace(
            model,
            tile_efficiency={"128x128": 1.0},
            wave_start_s=US,
            store_Bps_per_sm=128 * 128 * 2 / US,
            start_s=2 * US,
            split_start_s=3 * US,
            split_sum_Bps=sum_Bps,
            min_k_per_split=min_k,
            layout_speed={"bf16": speed},
            grouped=replace(model.grouped, tiles=("128x128",), speed=dict.fromkeys(model.grouped.speed, 1.0)),
        ),
    )
    return float(cost.burst_seconds(Products.from_kernels([kernel]))[0])


@pytest.mark.parametrize("kernel", [Matmul(128, 256, 8192), Matmul(256, 128, 8192), Matmul(128, 128, 8192, batch=2)])
@pytest.mark.parametrize("sum_Bps", [1e12, 1e11])
def test_two_tiles_are_cut_in_two(kernel: Matmul, sum_Bps: float) -> None:
    """4 halves fill the SMs in one wave. Their sum begins after 3 us. For each slice 32,768 elements of fp32 are
    written and read. Three slices are 6 pieces in 2 waves, and so take longer, as do more."""
    summed_s = 3 * US + 2 * (2 * 4 * 128 * 256) / sum_Bps
    assert seconds(kernel, sum_Bps=sum_Bps) == pytest.approx(2 * US + WHOLE_s / 2 + 2 * US + summed_s, rel=1e-12)


@pytest.mark.parametrize(
    ("kernel", "min_k", "sum_Bps"),
    [
        (Matmul(128, 256, 8192), 4097, 1e12),  # halves of k are too short
        (Matmul(128, 256, 8192), 1, 1e9),  # sums take longer than what they save
        (GroupedMatmul((128, 128), 128, 8192), 1, 1e12),  # kernels of several products do not cut k
    ],
)
def test_two_tiles_that_are_not_cut_take_a_wave(kernel: Matmul | GroupedMatmul, min_k: float, sum_Bps: float) -> None:
    assert seconds(kernel, min_k, sum_Bps) == pytest.approx(2 * US + WHOLE_s + 2 * US, rel=1e-12)


@pytest.mark.parametrize(
    ("sms", "slices"),
    [*((n, n) for n in (2, 3, 4, 6, 8, 12, 16)), (5, 4), (7, 6), (11, 8), (15, 12), (20, 16)],
)
def test_one_tile_has_as_many_slices_as_there_are_sms(sms: int, slices: int) -> None:
    """One tile is cut into 2, 3, 4, 6, 8, 12 or 16 slices, of which the most are taken that run in one wave. More of
    them would be two waves, and the next number is less than twice as many. Sums cost their start alone."""
    expected_s = 2 * US + WHOLE_s / slices + 2 * US + 3 * US
    assert seconds(Matmul(128, 128, 8192), sum_Bps=1e18, sms=sms) == pytest.approx(expected_s, rel=1e-6)


def test_from_four_waves_on_k_is_not_cut() -> None:
    """15 tiles are 3.75 waves: 4 without cuts. In 4 slices they are 15 waves of a quarter, a quarter wave less. 16
    tiles are 4 waves either way."""
    fifteen, sixteen = (seconds(Matmul(128 * tiles, 128, 8192), sum_Bps=1e15) for tiles in (15, 16))
    slices_s = 15 * (WHOLE_s / 4 + 2 * US) + 3 * US + 4 * (2 * 4 * 128 * 128 * 15) / 1e15
    assert fifteen == pytest.approx(2 * US + slices_s, rel=1e-12)
    assert sixteen == pytest.approx(2 * US + 4 * (WHOLE_s + 2 * US), rel=1e-12)
