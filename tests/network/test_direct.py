"""Unequal exchanges whose bytes travel to another node once, hop by hop against figures by hand."""

from __future__ import annotations

import pytest

from simulator.network.direct import ByteShares, spread
from simulator.network.moves import Hop
from tests.support.collectives import TWO

#: Two GPUs of the first node and one of the second.
RANKS = (0, 1, 8)
THIRD = 1 / 3


def hops(shares: ByteShares) -> list[Hop]:
    (moves,) = spread(shares, TWO, RANKS)
    return sorted(moves.hops)


def assert_hops(actual: list[Hop], expected: list[tuple[int, int, float, float]]) -> None:
    assert [(hop.sender, hop.receiver, hop.nic) for hop in actual] == [(*row[:2], None) for row in expected]
    assert [hop.load for hop in actual] == pytest.approx([row[2] for row in expected])
    assert [hop.weight for hop in actual] == pytest.approx([row[3] for row in expected])


def test_a_dispatch_goes_to_its_place_in_the_other_node_and_on_from_there() -> None:
    """Each of three members sends 1 byte per byte of size; 1/2, 1/4 and 1/4 of it go to members 0, 1 and 8.

    Half of the bytes for a node travel there: 0 and 1 send 1/4 / 2 to 8, the one member there, whatever their places.
    Member 8 sends 3/4 / 2 to 0, which has its place, and 0 hands 1/4 on to 1. Inside the first node 0 sends 1 another
    1/4, and 1 sends 0 1/2. A critical path has one of the 3 hops between nodes, 3 members each with 1 other node, and
    one of the 2 inside.
    """
    shares = ByteShares(receive=(0.5, 0.25, 0.25), per_node=0.5)
    expected = [(0, 1, 0.5, 0.5), (0, 8, 0.125, THIRD), (1, 0, 0.5, 0.5), (1, 8, 0.125, THIRD), (8, 0, 0.375, THIRD)]
    assert_hops(hops(shares), expected)


def test_a_combine_is_the_dispatch_the_other_way_round() -> None:
    shares = ByteShares(send=(0.5, 0.25, 0.25), per_node=0.5)
    expected = [(0, 1, 0.5, 0.5), (0, 8, 0.375, THIRD), (1, 0, 0.5, 0.5), (8, 0, 0.125, THIRD), (8, 1, 0.125, THIRD)]
    assert_hops(hops(shares), expected)
