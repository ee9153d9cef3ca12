"""Errors of the user's input. All of them end a command with exit status 2 and no traceback."""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

#: Errors of one file that are listed; the others are counted.
MAX_ERRORS = 20

_ABSENT = object()


class Bare(str):
    """Text that an error shows without quotes: what was found, in words or as written."""

    __slots__ = ()
    __repr__ = str.__str__


class _Writer(reprlib.Repr):
    """Values as YAML writes them in one line; text stands in quotes."""

    def repr1(self, x: Any, level: int) -> str:
        if x is None or isinstance(x, bool):
            return {None: "null", True: "true", False: "false"}[x]
        if isinstance(x, Bare):
            return str(x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            x = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
        return super().repr1(x, level)

    def repr_int(self, x: int, level: int) -> str:
        return f"{x:g}" if _MOST_DIGITS < abs(x) < _MOST_OF_FLOATS else super().repr_int(x, level)

    def repr_tuple(self, x: tuple[Any, ...], level: int) -> str:
        return self.repr_list(list(x), level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        bare = {Bare(key) if isinstance(key, str) and _PLAIN.fullmatch(key) else key: value for key, value in x.items()}
        if len(bare) > self.maxdict or level <= 0:
            return super().repr_dict(bare, level)
        return f"{{{', '.join(f'{self.repr1(key, level - 1)}: {self.repr1(bare[key], level - 1)}' for key in bare)}}}"


#: Whole numbers that are larger are shown as 1e+30, as most are written; Python's floats end at the second one.
_MOST_DIGITS, _MOST_OF_FLOATS = 10**20, 10**308
#: Keys that YAML reads as text without quotes.
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")
_WRITER = _Writer()
_WRITER.maxlevel, _WRITER.maxdict, _WRITER.maxlist = 2, 6, 8
_WRITER.maxstring = _WRITER.maxother = 100


def written(value: object) -> Bare:
    """Return ``value`` as YAML writes it, cut where it is long or deep.

    >>> written(("a", None)), written({"training.seq": 1024, "on": [True]}), written("text")
    (['a', null], {training.seq: 1024, on: [true]}, 'text')
    """
    return Bare(_WRITER.repr(value))


class SimulatorError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(SimulatorError):
    """Something the user wrote cannot be used.

    The message names the file, the dotted key, the value that was ``found``, allowed values, and the nearest fix. Any
    of them may be missing.

    >>> print(InputError("not a divisor", file="w.yaml", key="parallelism.tp", found=5, allowed="1, 2, 4", fix="tp: 4"))
    w.yaml: parallelism.tp: not a divisor
      found:   5
      allowed: 1, 2, 4
      fix:     tp: 4
    """

    def __init__(
        self,
        message: str,
        *,
        file: object = None,
        key: str | None = None,
        found: Any = _ABSENT,
        allowed: object = None,
        fix: str | None = None,
    ) -> None:
        self.message = message
        self.file = None if file is None else str(file)
        self.key = key
        self.found = found
        self.allowed = None if allowed is None else str(allowed)
        self.fix = fix
        super().__init__(message)

    def __str__(self) -> str:
        head = ": ".join(part for part in (self.file, self.key, self.message) if part)
        lines = [head]
        if self.found is not _ABSENT:
            shown = repr(self.found) if isinstance(self.found, str) else written(self.found)
            lines.append(f"  found:   {shown}")
        if self.allowed:
            lines.append(f"  allowed: {self.allowed}")
        if self.fix:
            lines.append(f"  fix:     {self.fix}")
        return "\n".join(lines)


class UnknownKeyError(InputError):
    """A key that its section does not have."""


class MissingKeyError(InputError):
    """A key that its section needs and does not have."""


def in_one_line(error: SimulatorError) -> str:
    """Return the message of an error in one line, for a cell of a table.

    >>> in_one_line(InputError("not a divisor", key="parallelism.tp", found=5, allowed="1, 2, 4"))
    'parallelism.tp: not a divisor; found: 5; allowed: 1, 2, 4'
    """
    return "; ".join(" ".join(line.split()) for line in str(error).splitlines())


class DeadlockError(SimulatorError):
    """No rank can go on: the message lists, per rank, the next operation and what it waits for."""


class CombinedInputError(InputError):
    """Several input errors at once; the message lists them, and says how many ``more`` there are."""

    def __init__(self, errors: Iterable[InputError], more: int = 0) -> None:
        self.errors, self.more = tuple(errors), more
        rest = [f"... and {more:,} more"] if more else []
        super().__init__("\n".join([*(str(error) for error in self.errors), *rest]))


def each(error: InputError) -> tuple[tuple[InputError, ...], int]:
    """Return the single errors that an error lists, and how many more it counts."""
    return (error.errors, error.more) if isinstance(error, CombinedInputError) else ((error,), 0)


def raise_all(errors: Iterable[InputError], more: int = 0) -> None:
    """Raise one `InputError` that lists the first of ``errors``, and counts the rest; nothing where there is none.

    What two errors say alike is listed once. ``more``: errors that the caller has left out already.
    """
    by_text: dict[str, InputError] = {}
    for error in errors:
        single, unlisted = each(error)
        for one in single:
            by_text.setdefault(str(one), one)
        more += unlisted
    listed = list(by_text.values())
    more += len(listed[MAX_ERRORS:])
    if listed:
        alone = len(listed) == 1 and not more
        raise (listed[0] if alone else CombinedInputError(listed[:MAX_ERRORS], more)) from None


#: Where a dotted key was written: the file to name, and the key as it stands there.
PlaceOfKey = Callable[[str], tuple[object, str]]


@contextmanager
def amended(amend: Callable[[InputError], None]) -> Iterator[None]:
    """Each single error of the block goes through ``amend``, which may change it, before it is raised."""
    try:
        yield
    except InputError as failure:
        errors, more = each(failure)
    else:
        return
    for error in errors:
        amend(error)
    raise_all(errors, more)


def located(place: PlaceOfKey) -> AbstractContextManager[None]:
    """Errors of the block name the file and the key that ``place`` says, unless they name a file already."""

    def locate(error: InputError) -> None:
        if error.file is None:
            where, key = place(error.key or "")
            error.key, error.file = key or None, None if where is None else str(where)

    return amended(locate)


def install_extra(extra: str) -> str:
    """Return how to install the packages of an extra, from an index and in a checkout.

    >>> install_extra("report")
    "pip install 'llm-cluster-simulator[report]', in a checkout pip install '.[report]'"
    """
    return f"pip install 'llm-cluster-simulator[{extra}]', in a checkout pip install '.[{extra}]'"


#: Names of which all are listed in an error; of more the nearest few.
_MOST_NAMES, _NEAREST = 12, 5


def nearest_names(word: object, names: Iterable[str], all_of_them: str) -> str:
    """Return the names that an error lists as allowed: all of a few, else those most like ``word``.

    Without a word they are the first few. ``all_of_them``: where all are listed.

    >>> nearest_names("d", "abc", "the page of letters")
    'a, b, c'
    >>> nearest_names("gpt2", [*(f"gpt2-{size}b" for size in range(1, 7)), *"abcdefgh"], "llmsim list models")
    'gpt2-1b, gpt2-2b, gpt2-3b, gpt2-4b, gpt2-5b ... (14 in all: llmsim list models)'
    >>> nearest_names("", "nmlkjihgfedcba", "llmsim list letters")
    'n, m, l, k, j ... (14 in all: llmsim list letters)'
    """
    listed = list(dict.fromkeys(names))
    if len(listed) <= _MOST_NAMES:
        return ", ".join(listed)
    lower = str(word).lower()

    def likeness(name: str) -> tuple[bool, float]:
        begins = bool(lower) and name.lower().startswith(lower)
        return begins, difflib.SequenceMatcher(None, lower, name.lower()).ratio()

    nearest = sorted(listed, key=likeness, reverse=True)[:_NEAREST]
    return f"{', '.join(nearest)} ... ({len(listed)} in all: {all_of_them})"
