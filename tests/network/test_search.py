"""Ways along NVLinks through all GPUs of a board, found by hand on boards of three and four."""

from __future__ import annotations

from itertools import combinations

from simulator.network.search import path


def both_ways(**links: float) -> dict[tuple[int, int], float]:
    """Return bandwidths by pairs of GPUs, of links that are called by their two digits, such as ``_01``."""
    pairs = {(int(name[1]), int(name[2])): Bps for name, Bps in links.items()}
    return pairs | {(b, a): Bps for (a, b), Bps in pairs.items()}


def test_a_path_goes_through_all_and_ends_where_it_should() -> None:
    """A square 0, 1, 3, 2: from 0 to 2 there is a link, but the way through all is the long one."""
    assert path((0, 1, 2, 3), 0, 2, both_ways(_01=1.0, _13=1.0, _23=1.0, _02=1.0)) == (0, 1, 3, 2)


def test_a_path_takes_the_wider_link_first() -> None:
    """Each of four is joined to each. From 0 to 3 the way by 1 comes first, unless the link to 2 is twice as wide."""
    even = {f"_{a}{b}": 1.0 for a, b in combinations(range(4), 2)}
    assert path((0, 1, 2, 3), 0, 3, both_ways(**even)) == (0, 1, 2, 3)
    assert path((0, 1, 2, 3), 0, 3, both_ways(**{**even, "_02": 2.0})) == (0, 2, 1, 3)


def test_a_gpu_without_a_link_is_on_no_path() -> None:
    assert path((0, 1, 2), 0, 2, both_ways(_01=1.0)) is None
