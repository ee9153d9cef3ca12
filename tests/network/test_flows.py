"""Transfers on shared links: max-min fair rates, and when the last byte arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog  # type: ignore[import-untyped]

from simulator.network.max_min import max_min_rates, saturations
from simulator.network.plan import Phase
from tests.support.flows import CAPACITIES, SEEDED, assert_fair, bottleneck_first, phase, phases_on

# Rates


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
def test_equal_flows_share_a_link_equally(n: int) -> None:
    """n flows on a link of 12 B/s get 12/n each."""
    assert max_min_rates([phase(1, 0)] * n, [12.0]) == pytest.approx([12 / n] * n, rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5, 10])
def test_the_long_flow_of_a_parking_lot_is_not_starved(n: int) -> None:
    """One flow crosses n links of 1 B/s, one more sits on each: every link is shared by two, all get 1/2."""
    flows = [phase(1, *range(n)), *(phase(1, link) for link in range(n))]
    assert max_min_rates(flows, [1.0] * n) == pytest.approx([0.5] * (n + 1), rel=1e-12)


@pytest.mark.parametrize("narrow", [1.0, 3.0, 5.0, 9.0])
def test_what_a_bottleneck_leaves_goes_to_the_others(narrow: float) -> None:
    """A crosses links 0 (10 B/s) and 1 (``narrow``), B only link 0. Alone on link 1, A takes the smaller of ``narrow``
    and half of link 0; B takes what is left of link 0."""
    a = min(narrow, 5.0)
    assert max_min_rates([phase(1, 0, 1), phase(1, 0)], [10.0, narrow]) == pytest.approx([a, 10 - a], rel=1e-12)


def test_three_levels_fill_one_after_another() -> None:
    """Links of 6, 12 and 30 B/s. Link 0 carries a, b and c: 2 each. Link 1 carries c and d: c has 2, d takes 10. Link
    2 carries d and e: e takes 20."""
    flows = [phase(1, 0), phase(1, 0), phase(1, 0, 1), phase(1, 1, 2), phase(1, 2)]
    assert max_min_rates(flows, [6.0, 12.0, 30.0]) == pytest.approx([2, 2, 2, 10, 20], rel=1e-12)


@pytest.mark.parametrize("load", [0.25, 0.5, 2.0, 8.0])
def test_loads_weigh_on_links_and_rates_stay_equal(load: float) -> None:
    """Two phases rise together at rate r; one puts ``load`` bytes on the link for each byte of its own: r + load r
    fills 9 B/s at r = 9 / (1 + load)."""
    rates = max_min_rates([phase(1, 0), Phase(1, ((0, load),), 0.0)], [9.0])
    assert rates == pytest.approx([9 / (1 + load)] * 2, rel=1e-12)


@pytest.mark.parametrize("cap", [0.5, 2.0, 4.9, 5.0, 7.0])
def test_a_cap_frees_bandwidth_only_below_the_fair_share(cap: float) -> None:
    """Two flows on 10 B/s, one capped: at 5 or more the cap does not bind."""
    capped = min(cap, 5.0)
    assert max_min_rates([phase(1, 0, cap=cap), phase(1, 0)], [10.0]) == pytest.approx([capped, 10 - capped])


def test_nothing_bounds_a_phase_without_links_or_cap() -> None:
    assert max_min_rates([phase(1), phase(1, 0), phase(1, cap=3.0)], [2.0]) == [math.inf, 2.0, 3.0]
    assert max_min_rates([], [1.0]) == []


@st.composite
def sharing(draw: st.DrawFn, most: int = 6) -> tuple[list[Phase], list[float]]:
    capacity = draw(CAPACITIES)
    return draw(st.lists(phases_on(len(capacity)), min_size=1, max_size=most)), capacity


def lexicographic(phases: Sequence[Phase], capacity: Sequence[float]) -> list[float]:
    """The definition itself, by linear programs: raise the smallest rate as far as it goes, fix the flows that cannot
    have more, raise the smallest of the others, and so on."""
    n = len(phases)
    loads = np.zeros((len(capacity), n))
    for i, p in enumerate(phases):
        for link, load in p.loads:
            loads[link, i] = load
    fixed: dict[int, float] = {}

    def best(objective: np.ndarray, floor: float | None) -> float:
        """The largest value of ``objective`` over (rates, level); with ``floor`` given, no rate below it."""
        rows = [np.append(row, 0.0) for row in loads]
        room = list(capacity)
        bounds: list[tuple[float, float | None]] = []
        for i, p in enumerate(phases):
            if i in fixed:
                bounds.append((fixed[i] - 1e-9, fixed[i]))
                continue
            bounds.append((floor - 1e-9 if floor is not None else 0.0, None if math.isinf(p.cap_Bps) else p.cap_Bps))
            if floor is None:
                row = np.zeros(n + 1)
                row[i], row[n] = -1.0, 1.0
                rows.append(row)
                room.append(0.0)
        found = linprog(-objective, A_ub=np.array(rows), b_ub=room, bounds=[*bounds, (0.0, None)], method="highs")
        assert found.status == 0
        return float(-found.fun)

    while len(fixed) < n:
        level = best(np.eye(n + 1)[n], None)
        most = {i: best(np.eye(n + 1)[i], level) for i in range(n) if i not in fixed}
        fixed |= {i: level for i, value in most.items() if value <= level + 1e-6}
    return [fixed[i] for i in range(n)]


@settings(SEEDED, max_examples=20)
@given(sharing(most=4))
def test_rates_are_lexicographically_largest(case: tuple[list[Phase], list[float]]) -> None:
    """Among all feasible rates the sorted vector is the largest: what linear programs find."""
    phases, capacity = case
    assert max_min_rates(phases, capacity) == pytest.approx(lexicographic(phases, capacity), rel=1e-5)
    assert bottleneck_first(phases, capacity) == pytest.approx(lexicographic(phases, capacity), rel=1e-5)


@SEEDED
@given(sharing())
def test_every_flow_has_a_bottleneck(case: tuple[list[Phase], list[float]]) -> None:
    phases, capacity = case
    rates = max_min_rates(phases, capacity)
    assert_fair(phases, rates, capacity)
    assert rates == pytest.approx(bottleneck_first(phases, capacity), rel=1e-9)


def crowd(seed: int) -> tuple[list[Phase], list[float]]:
    """Up to 60 flows over up to 25 links; loads and capacities over two orders of magnitude, some with a cap."""
    random = Random(seed)
    links, flows = random.randint(2, 25), random.randint(5, 60)
    capacity = [10 ** random.uniform(0, 2) for _ in range(links)]
    phases = []
    for _ in range(flows):
        crossed = random.sample(range(links), random.randint(1, min(links, 6)))
        loads = tuple((link, 10 ** random.uniform(-1, 1)) for link in crossed)
        phases.append(Phase(1.0, loads, 0.0, 10 ** random.uniform(-2, 1) if random.random() < 0.3 else math.inf))
    return phases, capacity


@pytest.mark.parametrize("seed", range(40))
def test_crowds_share_fairly(seed: int) -> None:
    """Nothing over its capacity, a bottleneck for everyone (so that nothing that somebody could use is idle), and the
    same as by fixing bottlenecks one by one; the smallest rate is as large as a linear program makes it. What is said
    to hold a flow up is such a bottleneck."""
    phases, capacity = crowd(seed)
    rates = max_min_rates(phases, capacity)
    assert_fair(phases, rates, capacity)
    assert rates == pytest.approx(bottleneck_first(phases, capacity), rel=1e-9)
    n = len(phases)
    rows = np.zeros((len(capacity) + n, n + 1))
    for i, p in enumerate(phases):
        for link, load in p.loads:
            rows[link, i] = load
        rows[len(capacity) + i, [i, n]] = -1.0, 1.0
    bounds = [(0.0, None if math.isinf(p.cap_Bps) else p.cap_Bps) for p in phases]
    least = linprog(-np.eye(n + 1)[n], A_ub=rows, b_ub=[*capacity, *[0.0] * n], bounds=[*bounds, (0.0, None)])
    assert min(rates) == pytest.approx(-least.fun, rel=1e-6)
    held = {
        id(p)
        for full in saturations(phases, rates, capacity)
        for p, is_held in zip(full.phases, full.held_up, strict=True)
        if is_held
    }
    assert held == {id(p) for p, rate in zip(phases, rates, strict=True) if rate < p.cap_Bps * (1 - 1e-9)}


@SEEDED
@given(sharing(), st.sampled_from([1e-9, 1e-3, 1e9, 1e12]))
def test_rates_scale_with_capacity(case: tuple[list[Phase], list[float]], scale: float) -> None:
    """There is no unit in fairness: everything times ``scale``, rates too."""
    phases, capacity = case
    scaled = [replace(p, cap_Bps=p.cap_Bps * scale) for p in phases]
    expected = [rate * scale for rate in max_min_rates(phases, capacity)]
    assert max_min_rates(scaled, [room * scale for room in capacity]) == pytest.approx(expected, rel=1e-9)
