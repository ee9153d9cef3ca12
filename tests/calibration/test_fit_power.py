"""What the fit makes of kernels run for seconds: loads, exponents, and the clock that a share of the time leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calibration.fit import power
from calibration.fit.cases import Cases, MeasuredCase
from simulator.config.profile import load_profile
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.costs.power import Drawn, PowerBudget
from simulator.frameworks import pytorch
from simulator.hardware.power import Power
from simulator.program import Attention, Kernel, Matmul
from tests.support.grids import one_in

PROFILE = load_profile("h200-sxm-141gb")
IDLE_W, LIMIT_W, HIGHEST_MHZ, ALONE_MHZ = 120.0, 690.0, 1980, 1500
SIZES: dict[str, Any] = {"m": 8192, "n": 8192, "k": 8192, "role": "fwd", "dtype": "bf16"}
SCORES: dict[str, Any] = {"batch": 4, "heads": 16, "kv_heads": 16, "length": 4096, "head_dim": 128, "causal": True}
PRODUCT = Matmul(8192, 8192, 8192)
COSTS = Costs.from_profile(PROFILE)


def lasting(op: str, params: dict[str, Any], mhz: float, watts: float, seconds: float, first_s: float) -> MeasuredCase:
    row = {"sm_mhz": [HIGHEST_MHZ, mhz, mhz], "power_w": [watts] * 3, "series_s": [first_s, seconds, seconds]}
    return MeasuredCase("sustained", op, params, (0,), row)


def waiting(share: float, exponent: float, speed: float) -> MeasuredCase:
    """A GPU that keeps to the model: share * (power of a product) is what the limit leaves, up to the highest clock."""
    mhz = min(ALONE_MHZ * share ** (-1 / exponent), HIGHEST_MHZ)
    watts = IDLE_W + share * (LIMIT_W - IDLE_W) * (mhz / ALONE_MHZ) ** exponent
    seconds = COSTS.kernel_s(PRODUCT, PROFILE.gpu) * (ALONE_MHZ / mhz) ** speed
    row = {"sm_mhz": [mhz] * 4, "power_w": [watts] * 4, "series_s": [seconds] * 4, "share": share}
    return MeasuredCase("shared", "mm", SIZES | {"beside": "wait", "period_s": 0.02}, (0,), row)


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
        MeasuredCase("copy", "to_device_pinned", {"bytes": 1}, (0,), {"power_w": IDLE_W}),
        MeasuredCase("collective", "all_reduce", {"bytes": 1}, (0, 1), {"power_w": 300.0}),
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
    found = validated(Power, part.figures["power"])
    assert found.loads["matmul"].power_exponent == pytest.approx(exponent, rel=0.01)
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
    found = validated(Power, power.fit(machine(3.0, 0.5, ()), PROFILE).figures["power"])
    assert power.ASSUMED in found.note
    assert found.averaged_s == power.AVERAGED_S
    for kind in ("matmul", "attention", "arithmetic"):
        load = found.loads[kind]
        assert (load.power_exponent, load.speed_exponent) == (power.EXPONENT, power.SPEED_EXPONENT)


def test_the_budget_of_a_shipped_profile_leaves_products_alone_their_clock() -> None:
    for name in ("h100-sxm-80gb", "h200-sxm-141gb"):
        model = load_profile(name).power
        assert model is not None
        budget = PowerBudget(model)
        products = budget.trace([Drawn(0.0, 1.0, {"matmul": 1.0}, {"matmul": 1.0})], 1.0)
        clock_hz = budget.clock_hz(products, model.highest_clock_hz)
        assert clock_hz == pytest.approx(model.loads["matmul"].clock_hz, rel=3e-3)


def test_nothing_is_fitted_where_a_class_was_not_run_for_long() -> None:
    whole = machine(2.0, 0.5, ())
    assert not power.fit(Cases(whole.rows[1:], whole.environments), PROFILE).figures


@pytest.mark.parametrize("follows", [0.3, 0.6, 0.9])
def test_attention_in_turns_with_products_says_how_it_follows_the_clock(follows: float) -> None:
    """Products that take 0.85 of what they take alone have a clock of 1500 MHz / 0.85^(1 / speed). Attention, which
    alone took t at 1700 MHz, takes t * (1700 / clock)^follows beside them. It was faster in its first batch by what
    the clock up to which it follows is above 1700 MHz."""
    speed = 0.8
    whole = machine(2.0, speed, (0.6, 0.8, 1.0))
    (first_s, alone_s) = next(case.row["series_s"][:2] for case in whole.rows if case.op == "attention_fwd")
    seconds = COSTS.kernel_s(PRODUCT, PROFILE.gpu) * 0.85
    mhz = ALONE_MHZ * 0.85 ** (-1 / speed)
    row = {"sm_mhz": [mhz] * 4, "power_w": [LIMIT_W] * 4, "series_s": [seconds] * 4, "share": 0.8}
    row["other_s"] = alone_s * (1700 / mhz) ** follows
    beside = MeasuredCase("shared", "mm", SIZES | {"beside": "attention_fwd", "period_s": 0.02}, (0,), row)
    found = validated(Power, power.fit(Cases((*whole.rows, beside), whole.environments), PROFILE).figures["power"])
    load = found.loads["attention"]
    assert load.speed_exponent == pytest.approx(follows, rel=0.02)
    highest_mhz = min(1700 * (alone_s / first_s) ** (1 / follows), HIGHEST_MHZ)
    assert load.highest_clock_hz == pytest.approx(highest_mhz * 1e6, rel=2e-2)
    # At that clock it took first_s, where this is below the GPU's highest; its price at ``priced_at_hz``.
    price = COSTS.kernel_s(attention(), PROFILE.gpu)
    took_s = alone_s * (1700e6 / load.highest_clock_hz) ** follows
    assert (load.highest_clock_hz / load.priced_at_hz) ** follows == pytest.approx(price / took_s, rel=5e-3)


@pytest.mark.parametrize("ceiling_mhz", [1700, 1800, 1900])
def test_products_that_no_higher_clock_helps_say_so(ceiling_mhz: int) -> None:
    """Beside 30 to 90 % of waiting the clock that is read rises to the highest, while seconds and power stop where the
    clock passes the ceiling."""
    whole, cases = machine(2.0, 0.8, ()), []
    for share in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        wanted = ALONE_MHZ * share**-0.5
        mhz = HIGHEST_MHZ if wanted > ceiling_mhz else wanted
        works_at = min(mhz, ceiling_mhz)
        watts = IDLE_W + share * (LIMIT_W - IDLE_W) * (works_at / ALONE_MHZ) ** 2
        seconds = COSTS.kernel_s(PRODUCT, PROFILE.gpu) * (ALONE_MHZ / works_at) ** 0.8
        row = {"sm_mhz": [mhz] * 4, "power_w": [watts] * 4, "series_s": [seconds] * 4, "share": share}
        cases.append(MeasuredCase("shared", "mm", SIZES | {"beside": "wait", "period_s": 0.02}, (0,), row))
    found = validated(Power, power.fit(Cases((*whole.rows, *cases), whole.environments), PROFILE).figures["power"])
    product = found.loads["matmul"]
    assert product.highest_clock_hz == pytest.approx(ceiling_mhz * 1e6, rel=5e-3)
    assert product.speed_exponent == pytest.approx(0.8, rel=0.02)
    assert product.power_exponent == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("averaged_s", one_in(2, [0.03, 0.06, 0.12]))
def test_turns_that_are_long_say_how_long_the_limit_averages(averaged_s: float) -> None:
    """A GPU that keeps to the model with one time constant gives it back, as far as pieces of half of it can tell."""
    whole = machine(2.0, 0.8, (0.6, 0.7, 0.8, 0.9, 1.0))
    first = validated(Power, power.fit(whole, PROFILE).figures["power"])
    budget = PowerBudget(replace(first, averaged_s=averaged_s))
    costs = Costs.from_profile(replace(PROFILE, power=first), pytorch.FRAMEWORK)
    cases = []
    for share, period_s in ((0.5, 0.2), (0.8, 0.2), (0.5, 0.5), (0.8, 0.5)):
        busy_s = share * period_s
        spans = [Drawn(0.0, busy_s, {"matmul": busy_s}, {"matmul": busy_s})]
        clock_hz = budget.clock_hz(budget.trace(spans, period_s), 1.6e9)
        seconds = costs.kernel_s(PRODUCT, PROFILE.gpu, clock_hz)
        longer_s = seconds / costs.kernel_s(PRODUCT, PROFILE.gpu, 1.6e9) * busy_s
        took = longer_s / (longer_s + period_s - busy_s)
        row = {"sm_mhz": [1600] * 4, "power_w": [600.0] * 4, "series_s": [seconds] * 4, "share": took}
        turns = SIZES | {"beside": "wait", "period_s": longer_s + period_s - busy_s}
        cases.append(MeasuredCase("shared", "mm", turns, (0,), row))
    found = power.fit(Cases((*whole.rows, *cases), whole.environments), PROFILE).figures["power"]
    assert found["averaged_s"] == pytest.approx(averaged_s, rel=0.25)


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
    beside = MeasuredCase("shared", "mm", SIZES | {"beside": "copy", "period_s": 0.02}, (0,), row)
    part = power.fit(Cases((*whole.rows, beside), whole.environments), PROFILE)
    assert part.figures["power"]["loads"]["memory"]["watts"] == pytest.approx(watts, rel=0.02)


def test_what_is_assumed_of_others_is_what_the_h200_was_measured_to_do() -> None:
    model = PROFILE.power
    assert model is not None
    product = model.loads["matmul"]
    assert (product.power_exponent, product.speed_exponent) == (power.EXPONENT, power.SPEED_EXPONENT)
    assert model.averaged_s == power.AVERAGED_S
    assert product.highest_clock_hz / model.highest_clock_hz == pytest.approx(power.HIGHEST, abs=1e-3)
