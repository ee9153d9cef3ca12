"""Values that are kept weigh no more together than is allowed, whatever is asked for."""

from __future__ import annotations

from random import Random

from simulator.recent import RecentValues


def test_kept_values_weigh_what_they_weigh_together() -> None:
    """The last keys stay whose random weights fit together."""
    random = Random(0)
    kept, weights = RecentValues[int](10), list[int]()
    for number in range(200):
        weights.append(random.randint(1, 10))
        kept.get(number, weights[-1], int)
        fitting = next(first for first in range(number + 1) if sum(weights[first:]) <= 10)
        assert [key for key in range(number + 1) if key in kept] == list(range(fitting, number + 1))


def test_a_value_whose_making_asks_for_it_weighs_once() -> None:
    """Two keys of weight 2 fit where 4 is the most, though the first was made twice."""
    kept = RecentValues[str](4)
    assert kept.get("a", 2, lambda: "outer " + kept.get("a", 2, lambda: "inner")) == "outer inner"
    assert kept.get("b", 2, lambda: "b") == "b"
    assert "a" in kept
    assert kept.get("a", 2, lambda: "another") == "outer inner"
