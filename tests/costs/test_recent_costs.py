"""Costs are kept for jobs of the same profiles, software and network, and for no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from simulator.config.profile import load_profile
from simulator.config.stack import load_stack
from simulator.costs import costs as pricing
from simulator.costs import recent, recent_costs
from simulator.frameworks import FRAMEWORKS, Framework
from simulator.hardware.profile import Profile
from simulator.hardware.stack import Stack
from simulator.program import Matmul
from simulator.recent import RecentValues

GPU = "h100-sxm-80gb"
PROFILES = {GPU: load_profile(GPU)}
SOFTWARE = FRAMEWORKS["megatron_core"]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_recent", RecentValues(recent.MOST_COSTS))


@pytest.mark.parametrize(
    ("profiles", "software", "network"),
    [
        ({GPU: replace(PROFILES[GPU], date="2020-01-01")}, SOFTWARE, None),
        ({**PROFILES, "h200-sxm-141gb": load_profile("h200-sxm-141gb")}, SOFTWARE, None),
        (PROFILES, FRAMEWORKS["pytorch"], None),
        (PROFILES, SOFTWARE, load_stack("h100-efa-old")),
    ],
    ids=["profile", "types of GPU", "software", "network"],
)
def test_each_of_them_tells_costs_apart(
    profiles: Mapping[str, Profile], software: Framework, network: Stack | None
) -> None:
    """Equal ones are given the same costs again."""
    first, other = recent_costs(PROFILES, SOFTWARE, None), recent_costs(profiles, software, network)
    assert other is not first
    assert recent_costs(dict(PROFILES), SOFTWARE, None) is first
    assert recent_costs(dict(profiles), software, network) is other


def test_so_many_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth kernel is kept alone where three are the most. Kernels that were given up are priced as before."""
    monkeypatch.setattr(pricing, "MOST_KERNELS", 3)
    costs = recent_costs(PROFILES, SOFTWARE, None)
    kernels = [Matmul(1024 * size, 1024, 1024) for size in (1, 2, 3, 4)]
    seconds = [costs.kernel_s(kernel, GPU) for kernel in kernels]
    assert len(costs._seconds) == 1
    assert [costs.kernel_s(kernel, GPU) for kernel in kernels] == seconds
    assert len(set(seconds)) == 4
