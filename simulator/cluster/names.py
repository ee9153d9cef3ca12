"""Names of links and GPUs in a cluster file, and the indices that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from simulator.cluster.link import Link
from simulator.errors import InputError
from simulator.hardware.overrides import name_pattern
from simulator.input_files import closest


def link_names(links: Iterable[Link]) -> dict[str, list[int]]:
    """Return the indices of the links that each name stands for; without ``:tx`` or ``:rx`` it stands for both ways."""
    names: dict[str, list[int]] = {}
    for link in links:
        names[link.name] = [link.index]
        both, way, _ = link.name.partition(":")
        if way:
            names.setdefault(both, []).append(link.index)
    return names


def matching(name: str, names: Mapping[str, list[int]], key: str, noun: str) -> list[int]:
    """Return the indices that ``name`` stands for, each once.

    A name may hold ``*``, as `simulator.hardware.overrides.name_pattern` reads it. ``key`` and ``noun`` are for errors:
    the place of the name, and the kind of thing that it names. Raises `InputError` where there is no such thing.
    """
    if "*" not in name:
        if name not in names:
            raise unknown_name(key, name, list(names), noun)
        return names[name]
    match = name_pattern(name).fullmatch
    matches = list(
        dict.fromkeys(index for candidate, indices in names.items() if match(candidate) for index in indices)
    )
    if not matches:
        raise InputError(f"no {noun} has such a name", key=key, found=name)
    return matches


def unknown_name(key: str, name: str, names: Sequence[str], noun: str) -> InputError:
    """Return the error of a name that stands for nothing."""
    return InputError(f"this {noun} does not exist", key=key, found=name, fix=closest(name, names))
