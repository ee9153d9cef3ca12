"""Transfers that begin and end: latency, meetings, events, and a slow simulator that says the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from simulator.network.flows import Network
from simulator.network.plan import Phase, Plan
from simulator.network.simulated_time import SimulatedTime
from tests.support.flows import CAPACITIES, SEEDED, assert_fair, bottleneck_first, phase, phases_on
from tests.support.grids import every_pair


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


def test_states_of_links_end_in_the_order_in_which_links_are_reached() -> None:
    """Traffic fills links 5 and 2, which it names in this order; after a second more of it comes, for two seconds.

    The first states end as links are named, and the last, when all is over, as links are numbered.
    """
    env = SimulatedTime()
    network = Network(env, [1.0] * 6)
    network.occupy(phase(math.inf, 5, 2))
    env.timeout(1.0).callbacks.append(lambda _: network.occupy(phase(math.inf, 5, 2)))
    env.run()
    network.finish(3.0)
    ended = [(state.link, seconds) for state, seconds in network.saturated_s.items()]
    assert ended == [(5, 1.0), (2, 1.0), (2, 2.0), (5, 2.0)]
