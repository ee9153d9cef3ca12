"""What names of links and GPUs in a cluster file mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from simulator.cluster.cluster import Link
from simulator.errors import InputError
from simulator.hardware.overrides import name_pattern
from simulator.input_files import closest


def of_links(links: Iterable[Link]) -> dict[str, list[int]]:
    """Name -> the links that it means, by index: a name without ``:tx`` or ``:rx`` means both ways."""
    known: dict[str, list[int]] = {}
    for link in links:
        known[link.name] = [link.index]
        both, way, _ = link.name.partition(":")
        if way:
            known.setdefault(both, []).append(link.index)
    return known


def meant(name: str, known: Mapping[str, list[int]], key: str, what: str) -> list[int]:
    """The indices that ``name`` means among those of ``known`` names, each once; it may hold ``*``, as
    `simulator.hardware.overrides.name_pattern` reads it. ``key`` says where it stands, ``what`` what it is a name of.

    Raises `InputError` where it means nothing.
    """
    if "*" not in name:
        if name not in known:
            raise unknown(key, name, list(known), what)
        return known[name]
    match = name_pattern(name).fullmatch
    found = list(dict.fromkeys(at for one, indices in known.items() if match(one) for at in indices))
    if not found:
        raise InputError(f"no {what} has such a name", key=key, found=name)
    return found


def unknown(key: str, found: str, known: Sequence[str], what: str) -> InputError:
    """The error of a name that nothing has."""
    return InputError(f"this {what} does not exist", key=key, found=found, fix=closest(found, known))
