"""The fit of a B200's profile: its kernels beside the published times that it was fitted to.

None was held out: they tell how near its constants come to these kernels, not how near they come to others.
"""

from __future__ import annotations

import math
from statistics import fmean

import pytest

from simulator.program import Attention, GroupedMatmul
from tests.support.profiles import COSTS

#: Of a B200, github.com/MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json: keys, heads, those of keys ->
#: shares of 2,250 TFLOP/s, forward and backward, of FLOPs that a causal mask does not halve.
SIMUMAX = {
    (4096, 64, 8): (0.8715, 0.7294),
    (4096, 128, 16): (0.9967, 0.8316),
    (32768, 8, 1): (1.2018, 0.9549),
    (131072, 16, 2): (0.9888, 0.8267),
}
#: The same, 128 heads of which 8 of keys: keys -> milliseconds (cudnn-frontend, artifacts, cuDNN 9.10.2).
CUDNN_OF_B200 = {4096: (0.642, 1.960), 16384: (6.602, 20.460), 131072: (415.333, 1343.117)}
#: Grouped products of a B200 (SimuMax): groups, rows, n, k -> shares of the peak: forward, input, weight gradient.
GROUPED = {
    (20, 1232, 3072, 5120): (0.4502, 0.3896, 0.3849),
    (32, 1024, 4096, 7168): (0.4580, 0.4336, 0.3469),
    (32, 1024, 7168, 2048): (0.4021, 0.4575, 0.2948),
    (40, 2460, 5120, 1536): (0.4958, 0.4888, 0.4026),
    (40, 9832, 3072, 5120): (0.4746, 0.4755, 0.4186),
}
PEAK = 2250e12
GPU = "b200-sxm-180gb"


def attention_s(keys: int, heads: int, kv_heads: int, *, backward: bool) -> float:
    """Return what a kernel of causal attention takes by the profile."""
    return COSTS[GPU].kernel_s(Attention(1, heads, kv_heads, keys, keys, 128, True, backward), GPU)


@pytest.mark.parametrize("backward", [False, True])
def test_the_fit_of_a_b200s_attention_lies_between_two_publications(backward: bool) -> None:
    """Kernel by kernel the two differ by up to a quarter, on either side. Backward computes 2.5 times as much."""
    measured = {(keys, 128, 8): times[backward] * 1e-3 for keys, times in CUDNN_OF_B200.items()}
    for (keys, heads, kv_heads), shares in SIMUMAX.items():
        flops = 2 * keys**2 * heads * (128 + 128) * (2.5 if backward else 1)
        measured[keys, heads, kv_heads] = flops / (shares[backward] * PEAK)
    errors = [math.log(attention_s(*sizes, backward=backward) / seconds) for sizes, seconds in measured.items()]
    assert max(map(abs, errors)) < 0.25
    assert abs(fmean(errors)) < 0.05


@pytest.mark.parametrize(("number", "role"), list(enumerate(["fwd", "dgrad", "wgrad"])))
def test_the_fit_of_a_b200s_grouped_products_meets_those_published(number: int, role: str) -> None:
    errors = []
    for (groups, rows, n, k), shares in GROUPED.items():
        width, depth = (k, n) if role == "dgrad" else (n, k)
        added = {"out_dtype": "bf16", "accumulate": True} if role == "wgrad" else {}
        kernel = GroupedMatmul((rows,) * groups, width, depth, dtype="bf16", role=role, **added)
        seconds = 2 * groups * rows * n * k / (shares[number] * PEAK)
        errors.append(math.log(COSTS[GPU].kernel_s(kernel, GPU) / seconds))
    assert max(map(abs, errors)) < 0.15
    assert abs(fmean(errors)) < 0.05
