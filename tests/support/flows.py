"""Flows on links, and their play by the network."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st

from simulator.network.plan import Phase

SEEDED = settings(max_examples=60, deadline=None, derandomize=True)


def phase(nbytes: float, *links: int, latency: float = 0.0, cap: float = math.inf) -> Phase:
    """One that loads each of ``links`` with 1 byte per byte."""
    return Phase(nbytes, tuple((link, 1.0) for link in links), latency, cap)


SIZE = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 7.0, 10.0])

CAPACITIES = st.lists(SIZE, min_size=1, max_size=5)


@st.composite
def phases_on(draw: st.DrawFn, links: int, latency: bool = False) -> Phase:
    """A phase that crosses some of ``links`` links with some loads."""
    crossed = draw(st.lists(st.integers(0, links - 1), min_size=1, max_size=links, unique=True))
    loads = tuple((link, draw(st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0]))) for link in crossed)
    cap = draw(st.one_of(st.just(math.inf), SIZE))
    return Phase(draw(SIZE), loads, draw(SIZE) if latency and draw(st.booleans()) else 0.0, cap)


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
