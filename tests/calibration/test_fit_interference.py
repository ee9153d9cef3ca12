"""Kernels beside collectives on H100s, beside receives that wait on H200s: slow-downs measured, and those of a race."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import pytest

from calibration.fit import interference
from calibration.fit.cases import Cases, MeasuredCase, read
from calibration.fit.part import ProfilePart
from simulator.config.profile import load_profile
from simulator.config.section import as_data

H100, H200 = "h100-sxm-80gb", "h200-sxm-141gb"


@cache
def cases(gpu: str = H100) -> Cases:
    return read(Path(__file__).parents[2] / "calibration" / "measurements" / gpu)


@cache
def fitted(gpu: str = H100) -> ProfilePart:
    return interference.fit(cases(gpu), load_profile(gpu))


def slow_downs(kernel: str, op: str, nbytes: int, gpu: str = H100) -> dict[int, tuple[float, float]]:
    """Number of GPUs -> predicted and measured slow-down."""
    every = cases(gpu).rows_of("interference", op)
    chosen = [case for case in every if (case.params["kernel"], case.params["bytes"]) == (kernel, nbytes)]
    speed = interference.speeds(load_profile(gpu))
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
    off = [abs(point.error) for point in fitted().points if point.group.startswith(f"interference.{kernel}.")]
    assert len(off) > 20
    assert statistics.fmean(off) < points


@pytest.mark.parametrize(
    ("kernel", "points"),
    [
        ("attention", 0.03),
        ("attention_bwd", 0.05),
        ("layer_norm", 0.01),
        ("residual_add", 0.01),
        ("matmul", 0.11),
        ("matmul_small", 0.28),
    ],
)
def test_a_receive_whose_sender_is_late_slows_as_measured(kernel: str, points: float) -> None:
    ((predicted, measured),) = slow_downs(kernel, interference.LATE, 2**24, H200).values()
    assert predicted == pytest.approx(measured, abs=points)


def test_what_waits_holds_the_sms_of_what_moves_and_leaves_memory_alone() -> None:
    """Measured alone: products and attention beside a waiting receive lose at least 9 tenths of what they lose beside
    256 MiB sent and received all the time, kernels that memory bounds less than half."""
    for kernel in interference.RACED:
        waiting, moving = (
            slow_downs(kernel, *of, H200)[2][1] for of in ((interference.LATE, 2**24), ("send_recv", 2**28))
        )
        assert waiting - 1 > 0.9 * (moving - 1) > 0.05
    for kernel in ("layer_norm", "residual_add"):
        waiting, moving = (
            slow_downs(kernel, *of, H200)[2][1] for of in ((interference.LATE, 2**24), ("send_recv", 2**28))
        )
        assert waiting - 1 < 0.5 * (moving - 1)


@pytest.mark.parametrize("gpu", [H100, H200])
def test_the_shipped_profile_has_what_the_fit_gives(gpu: str) -> None:
    found = fitted(gpu).figures["interference"]
    shipped = load_profile(gpu).interference
    assert (as_data(shipped.sms), shipped.matmul_sms) == (found["sms"], found["matmul_sms"])
    assert as_data(shipped.memory_speed) == found["memory_speed"]
    assert as_data(shipped.waiting_speed) == found["waiting_speed"]
    assert as_data(shipped.leaves) == found["leaves"]


@pytest.mark.parametrize(("gpu", "mean", "most"), [(H100, 0.1, 0.2), (H200, 0.06, 0.1)])
@pytest.mark.parametrize("name", list(interference.LEAVING))
def test_collectives_beside_kernels_take_as_long_as_measured(name: str, gpu: str, mean: float, most: float) -> None:
    """256 MiB on two H200s: seconds in which bytes move, from the profiler. On 2, 3 and 4 H100s, 3 held out,
    collectives in a row beside kernels in a row, which wait until the last of n has ended its kernel."""
    profile = load_profile(gpu)
    some = interference.beside_kernels(cases(gpu), interference.LEAVING[name])
    large = [case for case in some if case.params["bytes"] == 2**28]
    assert {len(case.ranks) for case in large} == ({2, 3, 4} if gpu == H100 else {2})
    share = getattr(profile.interference.leaves, name)
    off = [interference.collective_s(case, share, profile) / interference.slowed_s(case) - 1 for case in large]
    assert statistics.fmean(map(abs, off)) < mean
    assert max(map(abs, off)) < most


def test_kernels_that_saturate_memory_lose_what_they_leave() -> None:
    """Sums of two tensors beside collectives, and collectives beside them, measured apart: what one loses of its speed
    the others have of the memory's time, on both GPUs."""
    for gpu in (H100, H200):
        figures = load_profile(gpu).interference
        assert figures.leaves.other == pytest.approx(1 - figures.memory_speed.other, abs=0.02)


@pytest.mark.parametrize("share", [0.1, 0.22, 0.4])
@pytest.mark.parametrize("kind", ["moving", "interference"])
def test_a_share_is_told_where_it_slows_and_not_where_it_does_not(kind: str, share: float) -> None:
    """All-gathers of 256 MiB on two GPUs in 1 ms alone read and write 2.5 bytes for each, and take T of the memory's
    time: beside kernels that leave them ``share`` they take T / share as long, in a row 2/3 of a kernel, 0.1 ms, more.
    Where none takes longer than alone, nothing says how much less would have been enough."""
    profile, size, alone_s = load_profile(H200), 2**28, 1e-3
    waits_s = 2 / 3 * 1e-4 if kind == "interference" else 0.0

    def case(slower: float) -> MeasuredCase:
        beside_s, of = alone_s * slower + waits_s, {"kernel": "attention", "bytes": size}
        row = {"time_s": alone_s, "beside_s": beside_s, "collective_s": alone_s, "collective_beside_s": beside_s}
        return MeasuredCase(kind, "all_gather", of, (0, 1), row | {"kernel_s": 9e-5, "kernel_beside_s": 1e-4})

    takes = interference.takes(case(1.0), profile)
    plain_Bps = profile.kernels.memory.eager["residual"].share * profile.gpu_spec.memory_bandwidth_Bps.value
    assert takes == pytest.approx(2.5 * size / alone_s / plain_Bps, rel=0.01)
    assert interference._share([case(max(1.0, takes / share))], profile) == (share if share < takes else 1.0)
    assert interference._share([], profile) == 0


def test_what_slowed_nothing_is_noted() -> None:
    """Collectives beside attention are best explained as fast as alone on the H100: all is left to them, and the note
    says so. On the H200 every class slows them."""
    for gpu, attention, note in (
        (H100, 1.0, "1: no smaller share explains collectives beside attention better"),
        (H200, 0.24, ""),
    ):
        leaves = load_profile(gpu).interference.leaves
        assert (leaves.attention, leaves.note) == (attention, note)
        assert max(leaves.matmul, leaves.norm, leaves.other) < 0.5


def test_points_say_what_kind_of_case_they_are_of() -> None:
    """The H100 was measured with collectives in a row alone, the H200 with the profiler."""
    for gpu, kind, others in ((H100, "interference.collective.", "moving."), (H200, "moving.", "interference.coll")):
        groups = {point.group for point in fitted(gpu).points}
        assert {name.removeprefix(kind).split(".")[0] for name in groups if name.startswith(kind)} == set(
            interference.LEAVING
        )
        assert not any(name.startswith(others) for name in groups)


def test_what_was_not_measured_is_not_called_so() -> None:
    """Receives that wait were measured on the H200 only. A fit to half of its cases, without norms, without products,
    leaves both pairs of figures to which they belong as the profile has them, of whatever origin."""
    assert load_profile(H200).interference.waiting_speed.kind == "measured"
    assert load_profile(H100).interference.waiting_speed.kind == "assumed"
    some = [case for case in cases(H200).rows if case.params.get("kernel") not in ("layer_norm", "matmul")]
    some = [case for case in some if case.params.get("kernel") != "matmul_small"]
    base = load_profile(H100)
    figures = interference.fit(Cases(tuple(some), ()), base).figures["interference"]
    assert figures == as_data(base.interference)
