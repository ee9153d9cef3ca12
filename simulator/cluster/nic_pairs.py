"""Network cards of two nodes that a fabric with dead links still joins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from simulator.errors import InputError

#: A network card of one node and one of another, by their numbers.
NicPair = tuple[int, int]


def joined_pair(
    wanted: NicPair,
    nodes: tuple[int, int],
    cards: tuple[Iterable[int], Iterable[int]],
    joins: Callable[[NicPair], bool],
) -> NicPair:
    """Return two cards that the fabric joins: the ``wanted`` ones, else others of one number, else any.

    ``cards``: those that each of the two ``nodes`` has. Raises `InputError` where the fabric ``joins`` none of them.
    """
    on_a, on_b = map(tuple, cards)
    alike = ((nic, nic) for nic in on_a if nic in on_b)
    pair = next(filter(joins, itertools.chain([wanted], alike, itertools.product(on_a, on_b))), None)
    if pair is None:
        raise InputError(
            f"dead links leave no way from node{nodes[0]} to node{nodes[1]}",
            key="cluster.overrides",
            fix="placement: a list of nodes that are still joined",
        )
    return pair
