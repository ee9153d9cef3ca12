"""The points of a sweep: every combination of some settings of some keys, for one or several workloads."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from simulator.config import catalog, load_workload
from simulator.errors import InputError, UnknownKeyError, each, raise_all
from simulator.input_files import brief, read_yaml
from simulator.sweeping.point import Point, Source, source_name

#: Points beyond which a sweep is a mistake: at a hundredth of a second each they would take a day.
MOST_POINTS = 10_000_000
#: Place of a point's changes in errors, until the option that they came by is named.
_CHANGES = "the point"


@dataclass(frozen=True)
class Dimension:
    """Settings of some keys, of which a point has one.

    ``settings``: changes of dotted keys. A grid has one key, a zip several that walk together. ``option``: where they
    come from, for errors.
    """

    option: str
    settings: tuple[Mapping[str, Any], ...]

    def __post_init__(self) -> None:
        """Raise `InputError` where there are no settings, one stands twice, or one cannot be written down."""
        if not self.settings:
            raise InputError("lists no values", file=self.option, fix="at least one")
        texts: set[str] = set()
        for setting in self.settings:
            _check_written(dict(setting), self.option)
            if (text := repr(sorted(setting.items()))) in texts:
                raise InputError("stands twice", file=self.option, found=brief(dict(setting)), fix="once is enough")
            texts.add(text)

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of its settings, in order of appearance."""
        return tuple(dict.fromkeys(key for setting in self.settings for key in setting))

    @property
    def forms(self) -> tuple[Mapping[str, Any], ...]:
        """The first setting of every set of keys: one, unless values have keys inside or rows leave some out."""
        firsts: dict[object, Mapping[str, Any]] = {}
        for setting in self.settings:
            firsts.setdefault(_shape(setting), setting)
        return tuple(firsts.values())


@dataclass(frozen=True)
class Space:
    """Workloads x every combination of the settings of some dimensions.

    ``changes``: dotted keys that all points change. The first workload comes first; the last dimension is the fastest.
    """

    workloads: tuple[Source, ...]
    dimensions: tuple[Dimension, ...]
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Raise `InputError` where a key stands in two places, or there are too many points."""
        if not self.workloads:
            raise InputError("there is no workload to sweep", key="workloads")
        for workload in self.workloads:
            if not isinstance(workload, str | Path | Mapping):
                allowed = "a file, a shipped name or a mapping, in which keys can be changed"
                raise InputError("is no workload to sweep", key="workloads", found=brief(workload), allowed=allowed)
            if isinstance(workload, Mapping):
                _check_written(dict(workload), "workloads")
        if not isinstance(self.changes, Mapping) or not all(isinstance(key, str) for key in self.changes):
            allowed = "a mapping of dotted keys, such as {'parallelism.tp': 4}"
            raise InputError("must be a mapping of keys", file="set", found=brief(self.changes), allowed=allowed)
        _check_written(dict(self.changes), "--set")
        options: dict[str, str] = dict.fromkeys(self.changes, "--set")
        for dimension in self.dimensions:
            for key in dimension.keys:
                if key in options:
                    other = options[key]
                    repetition = f"by {other} too" if other != dimension.option else "twice"
                    raise InputError(
                        f"is given {repetition}", file=dimension.option, key=key, fix="all its values in one"
                    )
                options[key] = dimension.option
        if len(self) > MOST_POINTS:
            raise InputError(f"{len(self):,} points", allowed=f"at most {MOST_POINTS:,}", fix="fewer values")

    def __len__(self) -> int:
        return len(self.workloads) * math.prod(len(dimension.settings) for dimension in self.dimensions)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys in which points differ, in the order of the dimensions."""
        return tuple(key for dimension in self.dimensions for key in dimension.keys)

    def points(self) -> Iterator[Point]:
        """Yield all points, in order."""
        combinations = itertools.product(self.workloads, *(dimension.settings for dimension in self.dimensions))
        for number, (workload, *settings) in enumerate(combinations):
            changes = dict(self.changes)
            for setting in settings:
                changes |= setting
            yield Point(number, workload, changes)

    def check(self) -> None:
        """Raise `InputError` where a workload lacks one of the keys, or its file cannot be read.

        A point that is not legal is no error: it has its own outcome.
        """
        for workload in self.workloads:
            if not isinstance(workload, Mapping):
                read_yaml(catalog.find("workload", str(workload)))
        for point in self._forms():
            try:
                load_workload(point.workload, point.changes, by=_CHANGES)
            except InputError as error:
                unknown = [one for one in each(error)[0] if isinstance(one, UnknownKeyError)]
                for one in unknown:
                    one.file = self._place(one, point.workload)
                raise_all(unknown)

    def _forms(self) -> Iterator[Point]:
        """Yield points in which each dimension has each of its forms, with the first ones of the others."""
        firsts = [replace(dimension, settings=dimension.forms[:1]) for dimension in self.dimensions]
        yield from replace(self, dimensions=tuple(firsts)).points()
        for place, dimension in enumerate(self.dimensions):
            if later := dimension.forms[1:]:
                varied = [*firsts[:place], replace(dimension, settings=later), *firsts[place + 1 :]]
                yield from replace(self, dimensions=tuple(varied)).points()

    def _place(self, error: InputError, workload: Source) -> str | None:
        """Return the option that an unknown key came by, or the file of the workload where it stands there."""
        if error.file is None or not error.file.startswith(_CHANGES):
            return catalog.name_of(error.file) if error.file else source_name(workload)
        named = error.file.removeprefix(_CHANGES)  # the key too, where the error has it as a part of its place
        unknown = f"{error.key or named.strip()}."
        inside = [
            dimension.option
            for dimension in self.dimensions
            if any(unknown.startswith(f"{key}.") or f"{key}.".startswith(unknown) for key in dimension.keys)
        ]
        return f"{inside[0] if inside else '--set'}{named}"


def _shape(value: object) -> object:
    """Return the keys inside of a value, and inside of its own values; nothing of a number or text."""
    if isinstance(value, Mapping):
        return frozenset((key, _shape(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return frozenset(map(_shape, value))
    return None


def _check_written(data: Mapping[str, Any], place: str) -> None:
    """Raise `InputError`, naming ``place``, where data cannot be written to the database, as of a value in itself."""
    try:
        json.dumps(data, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        allowed = "keys of one kind, and values that do not hold themselves"
        raise InputError(f"cannot be written down: {error}", file=place, found=brief(data), allowed=allowed) from None


def grid(values: Mapping[str, Sequence[Any]], option: str = "grid") -> tuple[Dimension, ...]:
    """Return a dimension per key, all of whose ``values`` are tried with all of the others."""
    _check_keys(values, option)
    return tuple(
        Dimension(option, tuple({key: value} for value in listed_values(key, several, option)))
        for key, several in values.items()
    )


def zipped(values: Mapping[str, Sequence[Any]], option: str = "zip") -> tuple[Dimension, ...]:
    """Return one dimension of keys whose ``values`` walk together; none where there are no keys.

    Raises `InputError` where they are not equally many.
    """
    _check_keys(values, option)
    if not values:
        return ()
    columns = {key: listed_values(key, several, option) for key, several in values.items()}
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        lengths_text = ", ".join(f"{key}: {length}" for key, length in lengths.items())
        raise InputError("keys that walk together have equally many values", file=option, found=lengths_text)
    settings = tuple(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return (Dimension(option, settings),)


def listed(settings: Sequence[Mapping[str, Any]], option: str | Path = "points") -> Dimension:
    """Return the dimension of settings that are listed one by one."""
    if isinstance(settings, str) or not isinstance(settings, Sequence):
        allowed = "a list of mappings, such as [{'parallelism.tp': 4}]"
        raise InputError("must be a list", file=option, found=brief(settings), allowed=allowed)
    for number, setting in enumerate(settings, 1):
        if not isinstance(setting, Mapping) or not all(isinstance(key, str) for key in setting):
            allowed = "a mapping of dotted keys, such as {parallelism.tp: 4}"
            raise InputError(f"point {number} is none", file=option, found=brief(setting), allowed=allowed)
    return Dimension(str(option), tuple(settings))


def _check_keys(values: object, option: str) -> None:
    """Raise `InputError` unless values belong to keys that are texts."""
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        allowed = "a mapping of dotted keys to lists, such as {'parallelism.tp': [1, 2]}"
        raise InputError("must be a mapping of keys", file=option, found=brief(values), allowed=allowed)


def listed_values(key: str, values: object, option: str) -> list[Any]:
    """Return the values of a key as a list: those of any sequence, an array, or a column of a DataFrame.

    Raises `InputError` where there are none, or where they are no sequence.
    """
    plain = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(plain, str | Mapping) or not isinstance(plain, Sequence):
        raise InputError("must be a list of values", file=option, key=key, found=brief(values))
    if not plain:
        raise InputError("has no values", file=option, key=key, fix="at least one")
    return list(plain)
