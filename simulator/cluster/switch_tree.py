"""Fabrics whose trunks form a tree: one way between any two switches, up to where they meet and down again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.arrays import Ints
from simulator.cluster.link import Link, Spread

#: Names of switches, from a leaf up to the top.
Ancestors = tuple[str, ...]


class SwitchTree:
    """The trunks of a fabric of which no switch has more than one above it, as two links each, up and down."""

    def __init__(self, parents: dict[str, tuple[str, Link, Link]]) -> None:
        self._parents = parents
        self._lines: dict[str, Ancestors] = {}

    @classmethod
    def from_trunks(cls, trunks: Sequence[Link]) -> SwitchTree | None:
        """Return the tree of ``trunks``, of which every second one leads up; None where they form none."""
        parents: dict[str, tuple[str, Link, Link]] = {}
        for up, down in zip(trunks[::2], trunks[1::2], strict=True):
            if up.src in parents:
                return None
            parents[up.src] = up.dst, up, down
        safe: set[str] = set()
        for switch in parents:
            line: set[str] = set()
            while switch in parents and switch not in safe:
                if switch in line:
                    return None
                line.add(switch)
                switch = parents[switch][0]
            safe |= line
        return cls(parents)

    def line(self, switch: str) -> Ancestors:
        """Return a switch and all above it, in order."""
        line = self._lines.get(switch)
        if line is None:
            upper = self._parents.get(switch)
            line = self._lines[switch] = (switch,) if upper is None else (switch, *self.line(upper[0]))
        return line

    def trunk_above(self, switch: str) -> tuple[Link, Link] | None:
        """Return the links from a switch up and back down; None at the top."""
        return self._parents[switch][1:] if switch in self._parents else None

    def joins(self, start: str, goal: str) -> bool:
        """Tell whether trunks lead from one switch to the other."""
        return self.line(start)[-1] == self.line(goal)[-1]

    def between(self, start: str, goal: str) -> Spread | None:
        """Return the links from one switch to another, each with all of the traffic; None where there is no way."""
        if not self.joins(start, goal):
            return None
        up, down = list(self.line(start)), list(self.line(goal))
        while len(up) > 1 and len(down) > 1 and up[-2] == down[-2]:
            up.pop()
            down.pop()
        if start in down:
            up = [start]
            down = down[: down.index(start) + 1]
        elif goal in up:
            down = [goal]
            up = up[: up.index(goal) + 1]
        links = [self._parents[switch][1] for switch in up[:-1]]
        links += [self._parents[switch][2] for switch in reversed(down[:-1])]
        return tuple([(link.index, 1.0) for link in links])


@dataclass(frozen=True, eq=False)
class NodePlaces:
    """The places where nodes hang in a tree of switches, level by level.

    ``trunks[n, k, level, way]``: the link from the switch at this level above NIC k of node n; -1 where there is none.
    Way 0 leads up to the next level, way 1 back down.

    ``subtrees[level][n]``: a number that nodes share whose NICs are below the same switches at this level. Nodes with
    other numbers have no switch of this level in common. ``trunk_makes[n]``: a number that nodes share whose trunks are
    as fast, and whose NICs share switches alike.
    """

    trunks: Ints
    subtrees: tuple[Ints, ...]
    trunk_makes: Ints

    @classmethod
    def in_tree(cls, tree: SwitchTree, leaves: Sequence[tuple[str, ...]]) -> NodePlaces | None:
        """Return the places of nodes, by the ``leaves`` of their NICs; levels are counted from the leaves.

        The answer is None where nodes share some of their switches at a level, or a switch is at several levels.
        """
        kinds = list(dict.fromkeys(leaves))
        number_of = {on_node: number for number, on_node in enumerate(kinds)}
        kind_of = np.array([number_of[on_node] for on_node in leaves], dtype=np.int64)
        lines = [[tree.line(leaf) for leaf in on_node] for on_node in kinds]
        depth = max((len(line) for kind_lines in lines for line in kind_lines), default=1)
        trunks = np.full((len(kinds), max(map(len, kinds), default=0), depth, 2), -1, dtype=np.int64)
        facts: list[list[object]] = [[] for _ in kinds]
        subtrees: list[Ints] = []
        level_of: dict[str, int] = {}
        for level in range(depth):
            switches = [
                tuple([line[level] if level < len(line) else "" for line in kind_lines]) for kind_lines in lines
            ]
            numbers = {one: number for number, one in enumerate(dict.fromkeys(switches))}
            owners: dict[str, tuple[str, ...]] = {}
            for one in numbers:
                for switch in filter(None, one):
                    if owners.setdefault(switch, one) != one or level_of.setdefault(switch, level) != level:
                        return None
            subtrees.append(np.array([numbers[one] for one in switches], dtype=np.int64)[kind_of])
            for kind, one in enumerate(switches):
                firsts = {switch: place for place, switch in reversed(list(enumerate(one)))}
                for nic, switch in enumerate(one):
                    both = tree.trunk_above(switch)
                    facts[kind].append((firsts[switch], switch == "", *_facts(both)))
                    if both is not None:
                        trunks[kind, nic, level] = [link.index for link in both]
        make_numbers: dict[object, int] = {}
        makes = [make_numbers.setdefault(tuple(one), len(make_numbers)) for one in facts]
        return cls(trunks[kind_of], tuple(subtrees), np.array(makes, dtype=np.int64)[kind_of])


def _facts(both: tuple[Link, Link] | None) -> tuple[float, ...]:
    """Return what the time over a trunk depends on."""
    return () if both is None else tuple([fact for link in both for fact in (link.bandwidth_Bps, link.latency_s)])
