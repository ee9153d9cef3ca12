"""Transfers on shared links: max-min fair rates, and when the last byte arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog  # type: ignore[import-untyped]

from simulator.network.flows import Network
from simulator.network.max_min import max_min_rates, saturations
from simulator.network.plan import Phase, Plan
from simulator.network.simulated_time import SimulatedTime
from tests.support.grids import every_pair

SEEDED = settings(max_examples=60, deadline=None, derandomize=True)


def phase(nbytes: float, *links: int, latency: float = 0.0, cap: float = math.inf) -> Phase:
    """One that loads each of ``links`` with 1 byte per byte."""
    return Phase(nbytes, tuple((link, 1.0) for link in links), latency, cap)


def plan(*phases: Phase) -> Plan:
    return Plan("test", phases)


@dataclass
class Played:
    """When each transfer ended; SimPy events beside those that started them; and after every instant its time and
    (phase, rate, since when its bytes move at it) of all that is on a link."""

    ends: list[float]
    events: int
    instants: list[tuple[float, list[tuple[Phase, float, float]]]] = field(default_factory=list)


def play(capacity: Sequence[float], *transfers: tuple[float, Plan]) -> Played:
    """Start every plan at its time on links of ``capacity``."""
    env = SimulatedTime()
    network = Network(env, capacity)
    played = Played([math.nan] * len(transfers), -len(transfers))

    def start(index: int, wanted: Plan, _: simpy.Event) -> None:
        def landed() -> None:
            assert math.isnan(played.ends[index]), "a transfer ended twice"
            played.ends[index] = env.now

        network.transfer(wanted, landed)

    for index, (at, wanted) in enumerate(transfers):
        env.timeout(at).callbacks.append(partial(start, index, wanted))
    while env.peek() < math.inf:
        env.step()
        played.events += 1
        if env.peek() > env.now:
            flows = {id(flow): flow for link in network._links for flow in link.flows}
            played.instants.append((env.now, [(flow.phase, flow.rate_Bps, flow.since_s) for flow in flows.values()]))
    return played


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


SIZE = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 7.0, 10.0])
CAPACITIES = st.lists(SIZE, min_size=1, max_size=5)


@st.composite
def phases_on(draw: st.DrawFn, links: int, latency: bool = False) -> Phase:
    """A phase that crosses some of ``links`` links with some loads."""
    crossed = draw(st.lists(st.integers(0, links - 1), min_size=1, max_size=links, unique=True))
    loads = tuple((link, draw(st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0]))) for link in crossed)
    cap = draw(st.one_of(st.just(math.inf), SIZE))
    return Phase(draw(SIZE), loads, draw(SIZE) if latency and draw(st.booleans()) else 0.0, cap)


@st.composite
def sharing(draw: st.DrawFn, most: int = 6) -> tuple[list[Phase], list[float]]:
    capacity = draw(CAPACITIES)
    return draw(st.lists(phases_on(len(capacity)), min_size=1, max_size=most)), capacity


def bottleneck_first(phases: Sequence[Phase], capacity: Sequence[float]) -> list[float]:
    """Max-min rates written the other way round: find the constraint with the smallest fair share, fix its flows at
    it, take them out with what they use, and start over. A cap is a link of the flow's own."""
    constraints = [
        (capacity[link], {i: load for i, p in enumerate(phases) for on, load in p.loads if on == link})
        for link in range(len(capacity))
    ]
    constraints += [(p.cap_Bps, {i: 1.0}) for i, p in enumerate(phases) if p.cap_Bps < math.inf]
    rates: dict[int, float] = {}
    while len(rates) < len(phases):
        shares = []
        for room, loads in constraints:
            used = sum(load * rates[i] for i, load in loads.items() if i in rates)
            free = {i: load for i, load in loads.items() if i not in rates}
            if free:
                shares.append(((room - used) / sum(free.values()), tuple(free)))
        share, bound = min(shares)
        rates |= dict.fromkeys(bound, max(share, 0.0))
    return [rates[i] for i in range(len(phases))]


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


def assert_fair(phases: Sequence[Phase], rates: Sequence[float], capacity: Sequence[float]) -> None:
    """Bertsekas and Gallager's proposition: rates are max-min fair exactly if no link is over its capacity and every
    flow has a bottleneck, its cap or a full link on which nobody is faster."""
    used = [0.0] * len(capacity)
    fastest = [0.0] * len(capacity)
    for p, rate in zip(phases, rates, strict=True):
        assert rate <= p.cap_Bps * (1 + 1e-9)
        for link, load in p.loads:
            used[link] += load * rate
            fastest[link] = max(fastest[link], rate)
    assert all(x <= room * (1 + 1e-9) for x, room in zip(used, capacity, strict=True))
    for p, rate in zip(phases, rates, strict=True):
        assert rate >= p.cap_Bps * (1 - 1e-9) or any(
            used[link] >= capacity[link] * (1 - 1e-9) and rate >= fastest[link] * (1 - 1e-9) for link, _ in p.loads
        )


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


# The clock


@every_pair(
    {
        "nbytes": [0.0, 1.0, 10.0, 12345.0],
        "latency": [0.0, 0.5, 30.0],
        "cap": [math.inf, 20.0, 2.0],
    }
)
def test_a_lone_transfer_takes_latency_and_bytes_and_one_event(nbytes: float, latency: float, cap: float) -> None:
    """Latency first, then the bytes at the smaller of link and cap. Nobody is met: one event, the end."""
    alone = play([5.0], (1.0, plan(phase(nbytes, 0, latency=latency, cap=cap))))
    assert alone.ends == pytest.approx([1.0 + latency + nbytes / min(5.0, cap)], rel=1e-12)
    assert alone.events == 1


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_phases_follow_one_another(n: int) -> None:
    """Phase k has latency k and 10 k bytes on a link of its own of 5 B/s: the sum over k of k + 2 k, an event each."""
    phases = [phase(10.0 * k, k, latency=float(k)) for k in range(1, n + 1)]
    alone = play([5.0] * (n + 1), (0.0, plan(*phases)))
    assert alone.ends == pytest.approx([3 * n * (n + 1) / 2], rel=1e-12)
    assert alone.events == n
    env = SimulatedTime()
    assert Network(env, [5.0] * (n + 1)).alone_s(plan(*phases)) == pytest.approx(alone.ends[0], rel=1e-12)


def test_a_plan_without_phases_is_over_at_once() -> None:
    assert play([1.0], (2.0, plan())).ends == [2.0]


@pytest.mark.parametrize("cap", [math.inf, 4.0])
def test_a_phase_that_crosses_nothing_runs_at_its_cap(cap: float) -> None:
    """8 bytes on no link: 1 second of latency, then 8 / 4 at the cap, or nothing."""
    assert play([1.0], (0.0, plan(phase(8.0, latency=1.0, cap=cap)))).ends == pytest.approx([1 + 8 / cap])


@pytest.mark.parametrize("small", [1.0, 10.0, 50.0, 99.0, 100.0])
def test_two_flows_meet_on_a_nic_and_one_ends_early(small: float) -> None:
    """100 bytes and ``small`` bytes start together on 10 B/s, 5 B/s each. The small one ends at small / 5; by then the
    large one has sent as much, and the rest goes at 10: small / 5 + (100 - small) / 10 = (100 + small) / 10."""
    ends = play([10.0], (0.0, plan(phase(100.0, 0))), (0.0, plan(phase(small, 0)))).ends
    assert ends == pytest.approx([(100 + small) / 10, small / 5], rel=1e-12)


@pytest.mark.parametrize("late", [0.0, 1.0, 4.0, 9.0, 10.0, 15.0])
def test_a_flow_that_comes_later_delays_the_first(late: float) -> None:
    """A: 100 bytes from 0; B: 100 bytes from ``late``; 10 B/s. Until ``late`` A has sent 10 late. If that is less than
    100, both go on at 5: A ends at late + (100 - 10 late) / 5 = 20 - late, and B, alone again, when all 200 bytes are
    through, at 20. From ``late`` = 10 on they do not meet."""
    a, b = (20 - late, 20.0) if late < 10 else (10.0, late + 10)
    ends = play([10.0], (0.0, plan(phase(100.0, 0))), (late, plan(phase(100.0, 0)))).ends
    assert ends == pytest.approx([a, b], rel=1e-12)


@pytest.mark.parametrize("latency", [0.0, 2.0, 5.0, 8.0])
def test_latency_comes_before_bytes(latency: float) -> None:
    """A: 100 bytes at once; B starts with it but its bytes come after ``latency``: as if it had come that much later,
    the link is A's alone until then."""
    ends = play([10.0], (0.0, plan(phase(100.0, 0))), (0.0, plan(phase(100.0, 0, latency=latency)))).ends
    assert ends == pytest.approx([20 - latency, 20.0], rel=1e-12)


@pytest.mark.parametrize("first", [3.0, 5.0])
@pytest.mark.parametrize("second", [0.0, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("start", [0.0, 1.0, 2.5])
def test_a_flow_starts_while_another_is_still_in_its_latency(first: float, second: float, start: float) -> None:
    """A starts at 0 with latency ``first``, B at ``start`` with ``second``: only when bytes move counts. Whoever moves
    first (at x) is alone until the other (at y) moves too, then both have 5 B/s, and 200 bytes end at x + 20:
    the first one's end at y + (100 - 10 (y - x)) / 5."""
    moves = {"a": first, "b": start + second}
    x, y = sorted(moves.values())
    early, late = (y + (100 - 10 * (y - x)) / 5, x + 20) if y > x else (x + 20, x + 20)
    ends = play(
        [10.0], (0.0, plan(phase(100.0, 0, latency=first))), (start, plan(phase(100.0, 0, latency=second)))
    ).ends
    expected = [early, late] if moves["a"] <= moves["b"] else [late, early]
    assert ends == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_simultaneous_starts_share_from_the_first_byte(n: int) -> None:
    """Flow k of n brings 10 k bytes. While j flows are left each has 10 / j B/s, so flow k ends when the n - k + 1
    largest have all sent 10 k: the sum over i <= k of (n - i + 1) 10 / 10."""
    ends = play([10.0], *[(1.0, plan(phase(10.0 * k, 0))) for k in range(1, n + 1)]).ends
    assert ends == pytest.approx([1 + sum(n - i + 1 for i in range(1, k + 1)) for k in range(1, n + 1)], rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 8, 50])
def test_flows_on_disjoint_links_do_not_touch_each_other(n: int) -> None:
    """Each on a link of its own: all end as if alone, an event each."""
    played = play([2.0] * n, *[(0.5 * k, plan(phase(3.0 + k, k, latency=0.25))) for k in range(n)])
    assert played.ends == pytest.approx([0.5 * k + 0.25 + (3.0 + k) / 2 for k in range(n)], rel=1e-12)
    assert played.events == n


@pytest.mark.parametrize("n", [1, 2, 8, 50])
def test_transfers_in_turn_cost_one_event_each(n: int) -> None:
    """One after another on one link, a pause between them: nobody is met, nothing is solved again."""
    played = play([10.0], *[(2.0 * k, plan(phase(10.0, 0, latency=0.5))) for k in range(n)])
    assert played.ends == pytest.approx([2.0 * k + 1.5 for k in range(n)], rel=1e-12)
    assert played.events == n


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_events_of_a_meeting_grow_with_its_flows(n: int) -> None:
    """n flows that meet: per flow a start of its bytes and an end, per instant of change one solving, and a new end for
    everyone left whenever somebody leaves: n (n + 1) / 2 of those, and no more than 3 n beside them."""
    played = play([10.0], *[(0.0, plan(phase(10.0 * k, 0))) for k in range(1, n + 1)])
    assert played.events <= n * (n + 1) / 2 + 3 * n + 1


def test_what_two_flows_do_moves_a_third_that_neither_of_them_meets() -> None:
    """A on link 0; B on 0 and 1; C on 1; 10 B/s each. All with 5 B/s. A has 10 bytes and is gone at 2; then B and C
    still share link 1: nothing changes for them. C, 20 bytes, ends at 4; B has sent 20 of 60 and goes on at 10: ends
    at 8. Then with A capped at 2, so that it lasts to 5: C holds B to 5 B/s until 4 (what A leaves of link 0 stays
    unused), A to 8 until 5; B has sent 28, and ends at 5 + 32 / 10."""
    a, b, c = (0.0, plan(phase(10.0, 0))), (0.0, plan(phase(60.0, 0, 1))), (0.0, plan(phase(20.0, 1)))
    assert play([10.0, 10.0], a, b, c).ends == pytest.approx([2, 8, 4], rel=1e-12)
    slow = (0.0, plan(phase(10.0, 0, cap=2.0)))
    assert play([10.0, 10.0], slow, b, c).ends == pytest.approx([5, 8.2, 4], rel=1e-12)


def test_a_second_phase_meets_what_its_first_did_not() -> None:
    """A: 10 bytes on link 0, then 10 on link 1; B: 30 bytes on link 1; 10 B/s. A's first phase ends at 1, when B has
    sent 10. Then both at 5: A's 10 bytes end at 3; B has 10 left of 20 and ends at 4."""
    ends = play([10.0, 10.0], (0.0, plan(phase(10.0, 0), phase(10.0, 1))), (0.0, plan(phase(30.0, 1)))).ends
    assert ends == pytest.approx([3, 4], rel=1e-12)


def test_a_transfer_of_no_bytes_waits_for_nobody() -> None:
    """Its latency on a link that others fill."""
    ends = play([1.0], (0.0, plan(phase(50.0, 0))), (1.0, plan(phase(0.0, 0, latency=0.5)))).ends
    assert ends == pytest.approx([50.0, 1.5], rel=1e-12)


def fluid(capacity: Sequence[float], transfers: Sequence[tuple[float, Plan]]) -> list[float]:
    """The same transfers by stepping from change to change, all rates worked out anew each time."""
    ends = [0.0] * len(transfers)
    waiting = [(at + wanted.phases[0].latency_s, i, 0) for i, (at, wanted) in enumerate(transfers)]
    moving: dict[tuple[int, int], float] = {}
    now = 0.0
    while waiting or moving:
        keys = list(moving)
        rates = bottleneck_first([transfers[i][1].phases[k] for i, k in keys], capacity) if keys else []
        finish = min((now + moving[key] / rate for key, rate in zip(keys, rates, strict=True)), default=math.inf)
        then = min([finish, *(at for at, _, _ in waiting)])
        for key, rate in zip(keys, rates, strict=True):
            moving[key] -= rate * (then - now)
        now = then
        for i, k in [key for key in keys if moving[key] <= 1e-12 * transfers[key[0]][1].phases[key[1]].nbytes]:
            del moving[i, k]
            following = transfers[i][1].phases[k + 1 :]
            if following:
                waiting.append((now + following[0].latency_s, i, k + 1))
            else:
                ends[i] = now
        for item in [item for item in waiting if item[0] <= now]:
            waiting.remove(item)
            moving[item[1], item[2]] = transfers[item[1]][1].phases[item[2]].nbytes
    return ends


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[tuple[float, Plan]], list[float]]:
    """Plans of one or two phases that start at whole and half seconds, many at once."""
    capacity = draw(CAPACITIES)
    starts = st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0, 3.5])
    plans = st.lists(phases_on(len(capacity), latency=True), min_size=1, max_size=2).map(lambda ps: plan(*ps))
    return draw(st.lists(st.tuples(starts, plans), min_size=1, max_size=7)), capacity


@SEEDED
@given(traffic())
def test_ends_are_those_of_a_slow_simulator(case: tuple[list[tuple[float, Plan]], list[float]]) -> None:
    """Solving only for what a change concerns, and guessing that a flow stays alone, loses nothing."""
    transfers, capacity = case
    assert play(capacity, *transfers).ends == pytest.approx(fluid(capacity, transfers), rel=1e-9)


@SEEDED
@given(traffic())
def test_rates_are_fair_at_every_instant(case: tuple[list[tuple[float, Plan]], list[float]]) -> None:
    """Never more than a link's capacity, never an idle one that somebody could use; and what rates move from instant to
    instant adds up to the bytes of all phases."""
    transfers, capacity = case
    instants = play(capacity, *transfers).instants
    moved = 0.0
    for (now, flows), (later, _) in pairwise(instants):
        # A flow that is alone is put on its links at once, and known to move after its latency.
        for at in sorted({max(now, since) for _, _, since in flows}):
            moving = [(p, rate) for p, rate, since in flows if since <= at]
            assert_fair([p for p, _ in moving], [rate for _, rate in moving], capacity)
        moved += sum(rate * max(later - max(now, since), 0.0) for _, rate, since in flows)
    assert instants[-1][1] == []
    assert moved == pytest.approx(sum(p.nbytes for _, wanted in transfers for p in wanted.phases), rel=1e-9)
