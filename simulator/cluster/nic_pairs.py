"""Network cards of two nodes that a fabric with dead links still joins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from simulator.errors import InputError

#: A network card of one node and one of another, by their numbers.
NicPair = tuple[int, int]


def joined_pair(
    wanted: NicPair, cards: tuple[Iterable[int], Iterable[int]], joins: Callable[[NicPair], bool]
) -> NicPair | None:
    """Return two cards that the fabric ``joins``: the ``wanted`` ones, else others of one number, else any, or None.

    ``cards``: those that each of two nodes has.
    """
    on_a, on_b = map(tuple, cards)
    alike = ((nic, nic) for nic in on_a if nic in on_b)
    return next(filter(joins, itertools.chain([wanted], alike, itertools.product(on_a, on_b))), None)


def no_way_between(
    nodes: tuple[int, int], leaves: Sequence[Iterable[str]], hops_to: Callable[[str], Mapping[str, int]]
) -> InputError:
    """Return the error of two nodes that dead links leave without a way; its fix is the most nodes still joined.

    ``leaves``: the switches of every node's cards. ``hops_to``: the switches from which trunks lead to one, as keys.
    """
    piece: dict[str, str] = {}  # of the fabric that each switch is in, by its first switch
    for leaf in itertools.chain.from_iterable(leaves):
        if leaf not in piece:
            piece |= dict.fromkeys(hops_to(leaf), leaf)
    nodes_at: dict[str, list[int]] = {}
    for node, on_node in enumerate(leaves):
        for first in dict.fromkeys(piece[leaf] for leaf in on_node):
            nodes_at.setdefault(first, []).append(node)
    return InputError(
        f"dead links leave no way from node{nodes[0]} to node{nodes[1]}",
        key="cluster.overrides",
        fix=f"placement: {max(nodes_at.values(), key=len)}",
    )
