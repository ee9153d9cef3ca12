"""Names of links and GPUs in a cluster file, and the indices that they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from simulator.cluster.parts import ClusterGpus, ClusterLinks
from simulator.errors import InputError
from simulator.hardware.overrides import name_pattern
from simulator.input_files import closest

_IN_NODE = re.compile(r"node(0|[1-9]\d*)\.(.+)")


class PartNames(Mapping[str, list[int]]):
    """The numbers of the parts that each name stands for.

    ``inside``: names within every node, with positions in it, one mapping for nodes that are alike. ``first[n]`` is the
    number of the first part of node n. ``outside``: names of parts in no node, with their numbers.
    """

    def __init__(
        self, inside: Sequence[Mapping[str, list[int]]], first: Sequence[int], outside: Mapping[str, list[int]]
    ) -> None:
        self._inside, self._first, self._others = inside, first, outside

    def __getitem__(self, name: str) -> list[int]:
        in_node = _IN_NODE.fullmatch(name)
        if in_node and int(in_node[1]) < len(self._inside):
            node = int(in_node[1])
            return [self._first[node] + position for position in self._inside[node][in_node[2]]]
        return self._others[name]

    def __iter__(self) -> Iterator[str]:
        for node, names in enumerate(self._inside):
            yield from (f"node{node}.{name}" for name in names)
        yield from self._others

    def __len__(self) -> int:
        return sum(map(len, self._inside)) + len(self._others)

    def matching(self, name: str) -> list[int]:
        """Return the numbers that a name with ``*`` stands for, each once. No ``*`` stands for a dot."""
        head, dot, rest = name.partition(".")
        in_head, in_rest, in_all = map(name_pattern, (head, rest, name))
        positions: dict[int, list[int]] = {}  # by the id of a node's names, which are kept by this object
        matches: dict[int, None] = {}
        for node, names in enumerate(self._inside if dot else ()):
            if in_head.fullmatch(f"node{node}"):
                if id(names) not in positions:
                    positions[id(names)] = [
                        at
                        for inner, numbers_inside in names.items()
                        if in_rest.fullmatch(inner)
                        for at in numbers_inside
                    ]
                matches |= dict.fromkeys(self._first[node] + at for at in positions[id(names)])
        for other, numbers in self._others.items():
            if in_all.fullmatch(other):
                matches |= dict.fromkeys(numbers)
        return list(matches)


def link_names(links: ClusterLinks) -> PartNames:
    """Return the numbers of the links that each name stands for.

    A name without ``:tx`` or ``:rx`` stands for both ways.
    """
    in_layout = {id(layout): _both_ways(edge.name for edge in layout.edges) for layout in links.layouts}
    trunks = _both_ways(link.name for link in links.trunks)
    outside = {name: [links.n_inside + at for at in numbers] for name, numbers in trunks.items()}
    return PartNames([in_layout[id(layout)] for layout in links.layouts], links.first, outside)


def gpu_names(gpus: ClusterGpus) -> PartNames:
    """Return the number of the GPU that each name stands for."""
    in_layout = {id(layout): {f"gpu{index}": [at] for at, index in enumerate(layout.gpus)} for layout in gpus.layouts}
    return PartNames([in_layout[id(layout)] for layout in gpus.layouts], gpus.first, {})


def _both_ways(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the numbers of the links that each name stands for, counted from 0."""
    numbers: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        numbers[name] = [at]
        both, way, _ = name.partition(":")
        if way:
            numbers.setdefault(both, []).append(at)
    return numbers


def matching(name: str, names: PartNames, key: str, noun: str) -> list[int]:
    """Return the numbers that ``name`` stands for, each once.

    A name may hold ``*``, as `simulator.hardware.overrides.name_pattern` reads it. ``key`` and ``noun`` are for errors:
    the place of the name, and the kind of thing that it names. Raises `InputError` where there is no such thing.
    """
    if "*" not in name:
        if name not in names:
            raise unknown_name(key, name, list(names), noun)
        return names[name]
    matches = names.matching(name)
    if not matches:
        raise InputError(f"no {noun} has such a name", key=key, found=name)
    return matches


def unknown_name(key: str, name: str, names: Sequence[str], noun: str) -> InputError:
    """Return the error of a name that stands for nothing."""
    return InputError(f"this {noun} does not exist", key=key, found=name, fix=closest(name, names))
