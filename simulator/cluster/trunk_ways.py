"""Ways between the switches of a fabric, and around its dead trunks."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.cluster.link import Link, Spread
from simulator.cluster.switch_tree import SwitchTree

#: The switches at the two ends of a trunk, from one to the other.
TrunkEnds = tuple[str, str]


class TrunkWays:
    """The ways that traffic takes between switches over ``trunks``, one link for each direction.

    ``dead``: ends of the trunks that are not there, in both directions. Without them every way would have as few
    trunks as possible; where several are equally short at a switch, they share the traffic as their bandwidths there.

    Of these shortest ways those without a dead trunk remain, as long as there are any. A detour has more trunks, and is
    one way for the two switches, not all that are equally short. Tables of forwarding have one entry in its place, as
    those that a subnet manager of InfiniBand writes anew. A dead trunk thus never hands its traffic to several others.
    """

    def __init__(self, trunks: Sequence[Link], dead: Sequence[TrunkEnds]) -> None:
        self.tree = None if dead else SwitchTree.from_trunks(trunks)
        self._outward: dict[str, list[Link]] = {}
        self._towards: dict[str, list[str]] = {}
        for link in trunks:
            self._outward.setdefault(link.src, []).append(link)
            self._towards.setdefault(link.dst, []).append(link.src)
        self._towards_whole = {switch: list(before) for switch, before in self._towards.items()}
        for src, dst in dead:
            self._towards_whole.setdefault(dst, []).append(src)
        self._hops: dict[str, dict[str, int]] = {}
        self._hops_whole = {} if self._towards_whole != self._towards else self._hops
        self._spreads: dict[TrunkEnds, Spread] = {}

    def hops_to(self, goal: str) -> dict[str, int]:
        """Return the fewest trunks from every switch to ``goal``; switches that dead trunks cut off are left out."""
        if goal not in self._hops:
            self._hops[goal] = _fewest_hops(self._towards, goal)
        return self._hops[goal]

    def whole_hops_to(self, goal: str) -> dict[str, int]:
        """Return the fewest trunks from every switch to ``goal`` if no trunk were dead."""
        if goal not in self._hops_whole:
            self._hops_whole[goal] = _fewest_hops(self._towards_whole, goal)
        return self._hops_whole[goal]

    def joins(self, start: str, goal: str) -> bool:
        """Tell whether trunks lead from one switch to another."""
        if self.tree is not None:
            return self.tree.joins(start, goal)
        return start in self.hops_to(goal)

    def between(self, start: str, goal: str) -> Spread | None:
        """Return the links from one switch to another, with the share of the traffic on each; None if cut off."""
        if self.tree is not None:
            return self.tree.between(start, goal)
        spread = self._spreads.get((start, goal))
        if spread is None and start in self.hops_to(goal):
            detour = self.hops_to(goal)[start] > self.whole_hops_to(goal)[start]
            spread = self._spreads[start, goal] = self._spread(start, goal, most_ways=1 if detour else None)
        return spread

    def _spread(self, start: str, goal: str, most_ways: int | None) -> Spread:
        """Return the links with their shares; at every switch the first ``most_ways`` that are shortest, or all."""
        left = self.hops_to(goal)
        shares: dict[int, float] = {}
        at = {start: 1.0}
        for hops in range(left[start] - 1, -1, -1):
            then: dict[str, float] = {}
            for switch, share in at.items():
                ways = [link for link in self._outward[switch] if left.get(link.dst) == hops][:most_ways]
                total_Bps = sum(link.bandwidth_Bps for link in ways)
                for link in ways:
                    part = share * link.bandwidth_Bps / total_Bps
                    shares[link.index] = shares.get(link.index, 0.0) + part
                    then[link.dst] = then.get(link.dst, 0.0) + part
            at = then
        return tuple(shares.items())


def _fewest_hops(towards: dict[str, list[str]], goal: str) -> dict[str, int]:
    """Return the fewest hops from every switch to ``goal``. ``towards``: the switches from which a hop leads there."""
    left, reached = {goal: 0}, [goal]
    for switch in reached:  # grows while it is walked
        for before in towards.get(switch, ()):
            if before not in left:
                left[before] = left[switch] + 1
                reached.append(before)
    return left
