"""The space of a search: every choice of the dimensions' values that arithmetic leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simulator.config import Workload
from simulator.config.variants import Variants
from simulator.errors import InputError, located
from simulator.input_files import brief, closest
from simulator.searching.dimensions import DIMENSIONS, LayoutDimension

#: Keys that change how much work a step is, so that step times could not be compared.
_WORK = ("training.seq", "training.global_batch")
_SECTIONS = ("parallelism.", "training.")


class SizeLimit(NamedTuple):
    """Least and most of a number."""

    least: float
    most: float


@dataclass(frozen=True)
class LayoutSpace:
    """Layouts of ``variants`` on ``gpus`` GPUs.

    ``fixed``: key -> the only values that are tried. ``limits``: key of a number -> its bounds. ``skipped``: key ->
    branches whose value of it is impossible beside the values chosen before.
    """

    variants: Variants
    gpus: int
    fixed: Mapping[str, Sequence[Any]]
    limits: Mapping[str, SizeLimit] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def dimensions(self) -> tuple[LayoutDimension, ...]:
        """All that are searched: other keys that have values here, then those of `DIMENSIONS`."""
        keys = {one.key for one in DIMENSIONS}
        more = [key for key in self.fixed if key not in keys]
        return (*(LayoutDimension(key, lambda workload, gpus, chosen: ()) for key in more), *DIMENSIONS)

    def layouts(self) -> Iterator[dict[str, Any]]:
        """Yield layouts as dotted keys with their values. Rules have not been asked yet."""
        self.skipped.clear()
        return self._below({}, self.dimensions)

    def _below(self, chosen: dict[str, Any], left: Sequence[LayoutDimension]) -> Iterator[dict[str, Any]]:
        if not left:
            yield dict(chosen)
            return
        dimension, workload = left[0], self.variants.workload
        key = dimension.key
        values = self.fixed[key] if key in self.fixed else dimension.usual(workload, self.gpus, chosen)
        for value in values:
            if key in self.limits and not self._within(key, value):
                continue
            if dimension.possible(workload, self.gpus, chosen, value):
                yield from self._below({**chosen, key: value}, left[1:])
            else:
                self.skipped[key] += 1

    def _within(self, key: str, value: object) -> bool:
        """Tell whether a value is within the limits of its key. Raises `InputError` where it is no number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            fix = f"--fix {key}=V1,V2"
            raise InputError("has values that are no numbers", file="limit", key=key, found=brief(value), fix=fix)
        return self.limits[key].least <= value <= self.limits[key].most


def whole_key(name: str, option: str) -> str:
    """Return the dotted key that ``name`` means: a key, or the last part of one of `DIMENSIONS`.

    Raises `InputError`, naming ``option``, where the search cannot vary it.

    >>> whole_key("tp", "--fix"), whole_key("training.recompute", "--fix")
    ('parallelism.tp', 'training.recompute')
    """
    keys = [one.key for one in DIMENSIONS]
    by_name = {key.rpartition(".")[2]: key for key in keys}
    key = by_name.get(name, name)
    if key in _WORK:
        raise InputError("changes the work of a step; a search compares step times", file=option, found=key)
    if not key.startswith(_SECTIONS):
        near = closest(name, [*by_name, *keys])
        allowed = f"{', '.join(by_name)}, or another key of training or parallelism"
        raise InputError("is no key of a layout", file=option, found=name, allowed=allowed, fix=near)
    return key


def legal_values(variants: Variants, key: str, values: Sequence[Any]) -> list[Any]:
    """Return the values of ``fix`` as files are read, each once. Raises `InputError` where the key cannot have one."""
    read: list[Any] = []
    for value in values:
        with located(lambda place: ("fix", place)):
            one = variants.value(key, value)
        if one not in read:
            read.append(one)
    return read


def value_at(workload: Workload, key: str) -> Any:
    """Return the value that a loaded workload has of a dotted key. Raises `InputError` where there is no such key."""
    value: Any = workload
    for part in key.split("."):
        if not hasattr(value, part):
            raise InputError("is no key of the workload", key=key)
        value = getattr(value, part)
    return value
