"""What the fit makes of kernels run for seconds: loads, exponents, and the clock that a share of the time leaves."""

from __future__ import annotations

from typing import Any

import pytest

from calibration.fit import power
from calibration.fit.cases import Cases, Measured
from simulator.config.power import Power
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.costs.power import Loads, PowerBudget
from simulator.program import Attention, Kernel, Matmul

PROFILE = load_profile("h200-sxm-141gb")
IDLE_W, LIMIT_W, HIGHEST_MHZ, ALONE_MHZ = 120.0, 690.0, 1980, 1500
SIZES: dict[str, Any] = {"m": 8192, "n": 8192, "k": 8192, "role": "fwd", "dtype": "bf16"}
SCORES: dict[str, Any] = {"batch": 4, "heads": 16, "kv_heads": 16, "length": 4096, "head_dim": 128, "causal": True}
PRODUCT = Matmul(8192, 8192, 8192)
COSTS = Costs.from_profile(PROFILE)


def lasting(op: str, params: dict[str, Any], mhz: float, watts: float, seconds: float, first_s: float) -> Measured:
    row = {"sm_mhz": [HIGHEST_MHZ, mhz, mhz], "power_w": [watts] * 3, "series_s": [first_s, seconds, seconds]}
    return Measured("sustained", op, params, (0,), row)


def waiting(share: float, exponent: float, speed: float) -> Measured:
    """A GPU that keeps to the model: share * (power of a product) is what the limit leaves, up to the highest clock."""
    mhz = min(ALONE_MHZ * share ** (-1 / exponent), HIGHEST_MHZ)
    watts = IDLE_W + share * (LIMIT_W - IDLE_W) * (mhz / ALONE_MHZ) ** exponent
    seconds = COSTS.kernel_s(PRODUCT, PROFILE.gpu) * (ALONE_MHZ / mhz) ** speed
    row = {"sm_mhz": [mhz] * 4, "power_w": [watts] * 4, "series_s": [seconds] * 4, "share": share}
    return Measured("shared", "mm", SIZES | {"beside": "wait", "period_s": 0.02}, (0,), row)


def machine(exponent: float, speed: float, shares: tuple[float, ...]) -> Cases:
    """Products at ``ALONE_MHZ`` that take what the profile says; attention at 1700 MHz that takes 10 % more."""
    attention_s = 1.1 * COSTS.kernel_s(attention(), PROFILE.gpu)
    rows = [
        lasting("mm", SIZES, ALONE_MHZ, LIMIT_W, COSTS.kernel_s(PRODUCT, PROFILE.gpu), 1e-3),
        lasting(
            "attention_fwd",
            SCORES | {"backend": "cudnn"},
            1700,
            LIMIT_W,
            attention_s,
            attention_s * (1700 / HIGHEST_MHZ) ** speed,
        ),
        lasting("copy", {}, HIGHEST_MHZ, 600.0, 1e-4, 1e-4),
        lasting("layer_norm", {}, HIGHEST_MHZ, 650.0, 1e-4, 1e-4),
        Measured("copy", "to_device_pinned", {"bytes": 1}, (0,), {"power_w": IDLE_W}),
        Measured("collective", "all_reduce", {"bytes": 1}, (0, 1), {"power_w": 300.0}),
        *(waiting(share, exponent, speed) for share in shares),
    ]
    return Cases(tuple(rows), ({"kind": "environment"},))


def attention() -> Kernel:
    return Attention(4, 16, 16, 4096, 4096, 128, causal=True)


@pytest.mark.parametrize(("exponent", "speed"), [(1.5, 0.4), (2.0, 0.55), (3.0, 1.0)])
def test_a_gpu_that_keeps_to_the_model_gives_its_constants_back(exponent: float, speed: float) -> None:
    """Products alone and with shares of the time between: slopes of log power and log speed against log clock.
    Attention took 10 % more than its price at 1700 MHz, so that the price holds at 1700 MHz * 1.1^(1 / speed)."""
    part = power.fit(machine(exponent, speed, (0.6, 0.7, 0.8, 0.9, 1.0)), PROFILE)
    found = Power.model_validate(part.figures["power"])
    assert found.exponent == pytest.approx(exponent, rel=0.01)
    assert (found.idle_w, found.limit_w, found.highest_clock_hz) == (IDLE_W, LIMIT_W, HIGHEST_MHZ * 1e6)
    product, scores = found.loads["matmul"], found.loads["attention"]
    assert product.speed_exponent == pytest.approx(speed, rel=0.01)
    assert (product.watts, product.clock_hz) == pytest.approx((LIMIT_W, ALONE_MHZ * 1e6))
    assert product.priced_at_hz == pytest.approx(ALONE_MHZ * 1e6, rel=1e-3)
    assert scores.speed_exponent == pytest.approx(speed, rel=0.01)
    assert scores.priced_at_hz == pytest.approx(1700e6 * 1.1 ** (1 / speed), rel=2e-3)
    assert found.loads["communication"].watts == 300
    # What the budget leaves a share of the time is what was measured there.
    assert all(abs(point.error) < 0.01 for point in part.points)
    assert len(part.points) == 5


def test_without_shares_of_the_time_the_exponent_is_said_to_be_assumed() -> None:
    found = Power.model_validate(power.fit(machine(3.0, 0.5, ()), PROFILE).figures["power"])
    assert found.exponent == power.EXPONENT
    assert power.ASSUMED in found.note
    assert (
        found.loads["matmul"].speed_exponent == found.loads["attention"].speed_exponent == pytest.approx(0.5, rel=0.01)
    )


def test_the_budget_of_a_shipped_profile_leaves_products_alone_their_clock() -> None:
    for name in ("h100-sxm-80gb", "h200-sxm-141gb"):
        model = load_profile(name).power
        assert model is not None
        clock_hz = PowerBudget(model).clock_hz(Loads({"matmul": 1.0}, {"matmul": 1.0}), 1.0, model.highest_clock_hz)
        assert clock_hz == pytest.approx(model.loads["matmul"].clock_hz, rel=2e-3)


def test_nothing_is_fitted_where_a_class_was_not_run_for_long() -> None:
    whole = machine(2.0, 0.5, ())
    assert not power.fit(Cases(whole.rows[1:], whole.environments), PROFILE).figures


@pytest.mark.parametrize("follows", [0.3, 0.6, 0.9])
def test_attention_in_turns_with_products_says_how_it_follows_the_clock(follows: float) -> None:
    """Products that take 1.1 times what they take alone have a clock of 1500 MHz / 1.1^(1 / speed). Attention, which
    took t in its first batch at 1980 MHz, takes t * (1980 / clock)^follows beside them."""
    speed = 0.5
    whole = machine(2.0, speed, (0.6, 0.8, 1.0))
    first_s = next(case.row["series_s"][0] for case in whole.rows if case.op == "attention_fwd")
    seconds = COSTS.kernel_s(PRODUCT, PROFILE.gpu) * 1.1
    mhz = ALONE_MHZ * 1.1 ** (-1 / speed)
    row = {"sm_mhz": [mhz] * 4, "power_w": [LIMIT_W] * 4, "series_s": [seconds] * 4, "share": 0.8}
    row["other_s"] = first_s * (HIGHEST_MHZ / mhz) ** follows
    beside = Measured("shared", "mm", SIZES | {"beside": "attention_fwd", "period_s": 0.02}, (0,), row)
    found = Power.model_validate(power.fit(Cases((*whole.rows, beside), whole.environments), PROFILE).figures["power"])
    load = found.loads["attention"]
    assert load.speed_exponent == pytest.approx(follows, rel=0.01)
    # At the highest clock it took first_s, and its price at ``priced_at_hz``.
    price = COSTS.kernel_s(attention(), PROFILE.gpu)
    assert (HIGHEST_MHZ * 1e6 / load.priced_at_hz) ** follows == pytest.approx(price / first_s, rel=2e-3)


@pytest.mark.parametrize("watts", [300.0, 450.0, 560.0])
def test_copies_draw_what_they_leave_products_in_turns(watts: float) -> None:
    """Products with half of the time beside copies that draw ``watts`` at the highest clock: the clock f at which half
    of a product's power and half of a copy's are what the limit leaves. Alone copies were seen to draw 600 W."""
    whole = machine(2.0, 0.5, (0.6, 0.8, 1.0))
    over = LIMIT_W - IDLE_W
    of_square = over / ALONE_MHZ**2 + (watts - IDLE_W) / HIGHEST_MHZ**2
    mhz = min((2 * over / of_square) ** 0.5, HIGHEST_MHZ)
    seconds = COSTS.kernel_s(PRODUCT, PROFILE.gpu) * (ALONE_MHZ / mhz) ** 0.5
    row = {"sm_mhz": [mhz] * 4, "power_w": [LIMIT_W] * 4, "series_s": [seconds] * 4, "share": 0.5}
    beside = Measured("shared", "mm", SIZES | {"beside": "copy", "period_s": 0.02}, (0,), row)
    part = power.fit(Cases((*whole.rows, beside), whole.environments), PROFILE)
    assert part.figures["power"]["loads"]["memory"]["watts"] == pytest.approx(watts, rel=0.02)
