"""Kernels beside collectives on H100s: measured slow-downs, and those of a race of the two."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import pytest

from calibration.fit import interference
from calibration.fit.cases import Cases, read
from calibration.fit.part import Part
from simulator.config.profile import load_profile

PROFILE = load_profile("h100-sxm-80gb")


@cache
def cases() -> Cases:
    return read(Path(__file__).parent.parent / "calibration" / "measurements" / "h100-sxm-80gb")


@cache
def fitted() -> Part:
    return interference.fit(cases(), PROFILE)


def slow_downs(kernel: str, op: str, nbytes: int) -> dict[int, tuple[float, float]]:
    """Number of GPUs -> predicted and measured slow-down."""
    chosen = [c for c in cases().of("interference", op) if (c.params["kernel"], c.params["bytes"]) == (kernel, nbytes)]
    speed = interference.speeds(PROFILE)
    return {
        len(case.ranks): (
            interference.slow_down(case, speed),
            float(case.row["kernel_beside_s"]) / float(case.row["kernel_s"]),
        )
        for case in chosen
    }


def test_a_product_beside_an_all_reduce_is_slowed_as_measured() -> None:
    """On 2, 3 and 4 GPUs within 5 points, 3 being held out."""
    found = slow_downs("matmul", "all_reduce", 2**28)
    assert sorted(found) == [2, 3, 4]
    for predicted, measured in found.values():
        assert measured > 1.1
        assert predicted == pytest.approx(measured, abs=0.05)


def test_a_product_of_two_waves_is_slowed_most() -> None:
    """On the SMs that are left it takes four waves instead of two; measured is a little more than predicted."""
    for predicted, measured in slow_downs("matmul_small", "all_reduce", 2**28).values():
        assert 1.55 < predicted < measured < predicted + 0.3


@pytest.mark.parametrize(("kernel", "points"), [("attention", 0.03), ("attention_bwd", 0.05), ("residual_add", 0.03)])
def test_other_kernels_are_slowed_as_measured_on_average(kernel: str, points: float) -> None:
    off = [abs(point.error) for point in fitted().points if point.group.split(".")[1] == kernel]
    assert len(off) > 20
    assert statistics.fmean(off) < points


def test_the_shipped_profile_has_what_the_fit_gives() -> None:
    found = fitted().figures["interference"]
    shipped = PROFILE.interference
    assert (shipped.sms, shipped.matmul_sms) == (found["sms"], found["matmul_sms"])
    assert shipped.memory_speed == found["memory_speed"]
