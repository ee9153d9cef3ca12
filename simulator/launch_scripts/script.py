"""A launch script as keys of a workload file, with what became of each of its options."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.input_files import brief


@dataclass(frozen=True)
class UnderstoodOption:
    """An option of a script and the key of the workload that holds it."""

    option: str
    key: str
    value: Any


@dataclass(frozen=True)
class LaunchScript:
    """A script as far as it was read.

    ``workload``: keys of a workload file, without what depends on the number of GPUs. ``gpus``: how many the script
    runs on; None where it leaves that open. ``accumulation``: micro-batches of a step; None where it says the global
    batch. ``assumed``: keys that the script leaves open, and their values. ``neutral``: options that change neither
    time nor memory. ``ignored``: options that are not simulated, or not known here.
    ``copies``: of a model that the other replicas share in shards; None where no number of GPUs decides how many share.
    ``steps``: updates of the whole run; None where the script leaves that open, or says the tokens.
    """

    format: str
    workload: dict[str, Any]
    gpus: int | None
    accumulation: int | None
    understood: tuple[UnderstoodOption, ...]
    assumed: tuple[str, ...]
    neutral: tuple[str, ...]
    ignored: tuple[str, ...]
    copies: int | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Unsaid:
    """A value that comes from outside the script. ``text``: as the script writes it, such as ``$1``."""

    text: str


@dataclass
class ScriptReading:
    """A script while it is read, option by option; `script` is what came of it.

    ``path``: its file, for errors. ``names``: what the script calls an option, where its reader has another name. Every
    option ends in one list. What is only looked at ends among those that are not simulated, unless it is off.
    """

    format: str
    path: Path
    options: Mapping[str, Any]
    gpus: int | None = None
    accumulation: int | None = None
    copies: int | None = None
    steps: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    understood: list[UnderstoodOption] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    neutral: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    _looked_at: set[str] = field(default_factory=set)
    _sorted: set[str] = field(default_factory=set)

    def look(self, option: str, default: Any = None) -> Any:
        """Return the value of an option; ``default`` where it is not there, null, or not said."""
        self._looked_at.add(option)
        value = self.options.get(option)
        return default if value is None or isinstance(value, Unsaid) else value

    def first_of(self, *options: str) -> tuple[str, Any]:
        """Return the first option that has a value, and that value; the first name and None where none has."""
        values = ((option, self.look(option)) for option in options)
        return next((pair for pair in values if pair[1] is not None), (options[0], None))

    def flag(self, option: str) -> bool:
        """Return whether an option is on."""
        value = self.look(option, False)
        return value is True or str(value).lower() in ("true", "1", "yes", "enabled")

    def first_on(self, *switches: str) -> str | None:
        """Return the first of several switches that is on; None where none is."""
        return next((switch for switch in switches if self.flag(switch)), None)

    def refuse_both(self, first: str, second: str) -> None:
        """Raise `InputError` where two switches are on that exclude each other; one that is auto is not."""
        if self.flag(first) and self.flag(second):
            raise InputError(
                f"cannot be on beside {self._name(first)}",
                file=self.path,
                key=self._name(second),
                fix=f"{self._name(first)} or {self._name(second)}",
            )

    def number(self, option: str) -> int | None:
        """Return a whole number; None where it is not said, or auto. Raises `InputError` on something else."""
        value = self.fraction(option, "is no whole number")
        if value is None:
            return None
        if value != int(value):
            raise self._error(option, "is no whole number")
        return int(value)

    def first_number(self, *options: str) -> tuple[str, int | None]:
        """Return the first option that has a value, and its whole number. Raises `InputError` as `number`."""
        option, _ = self.first_of(*options)
        return option, self.number(option)

    def fraction(self, option: str, otherwise: str = "is no number") -> float | None:
        """Return a number; None where it is not said, or auto. Raises `InputError` on something else."""
        value = self.look(option)
        if value is None or (isinstance(value, str) and value.lower() == "auto"):
            return None
        try:
            number = float(str(value).replace("_", ""))
        except ValueError:
            raise self._error(option, otherwise) from None
        if isinstance(value, bool) or not math.isfinite(number):
            raise self._error(option, otherwise)
        return number

    def put(self, key: str, value: Any, *options: str) -> None:
        """Put a value that ``options`` say under the dotted ``key`` of the workload."""
        self._store(key, value)
        for option in options:
            self.understand(option, key, value)

    def understand(self, option: str, key: str, value: Any) -> None:
        """Enter an option among those that are understood; ``key``: what it says, where that is no key."""
        if option not in self.options:
            raise KeyError(f"{option} is not in {self.path}")
        entry = UnderstoodOption(self._name(option), key, value)
        self._sorted.add(option)
        if entry not in self.understood:
            self.understood.append(entry)

    def take(self, option: str, key: str) -> int | None:
        """Put a whole number under ``key`` if the script says it; return it. Raises `InputError` on a negative one."""
        value = self.number(option)
        if value is not None and value < 0:
            raise self._error(option, "is negative")
        if value is not None:
            self.put(key, value, option)
        return value

    def take_steps(self, option: str) -> None:
        """Take the updates of the whole run; what is no positive number leaves them open, as without the option."""
        updates = self.number(option)
        if updates is not None and updates > 0:
            self.steps = updates
            self.understand(option, "training.total_tokens", f"{updates} steps")
        else:
            self.leave(option)

    def switch(self, key: str, option: str) -> None:
        """Put whether a switch is on under ``key``; off where the script lacks it."""
        if self.look(option) is None:
            self.assume(key, False, f"without {self._name(option)}")
        else:
            self.put(key, self.flag(option), option)

    def assume(self, key: str, value: Any, why: str) -> None:
        """Put a value that the script does not say under ``key``."""
        self._store(key, value)
        self.assumed.append(f"{key}: {value}, {why}")

    def leave(self, *options: str) -> None:
        """Enter options among those that change nothing; names that the script lacks are passed over."""
        for option in options:
            if option in self.options and option not in self._sorted:
                self._sorted.add(option)
                self.neutral.append(self._name(option))

    def leave_where(self, option: str, *values: str) -> None:
        """Leave an option that has one of ``values``, in small letters, which are simulated anyhow."""
        if str(self.look(option)).lower() in values:
            self.leave(option)

    def ignore(self, option: str, why: str = "") -> None:
        """Enter an option among those that are not simulated."""
        value = self.options[option]
        self._sorted.add(option)
        if isinstance(value, Unsaid):
            text = f"{self._name(option)} ({value.text} is not in the file)"
        else:
            text = self._name(option) if value is True else textwrap.shorten(f"{self._name(option)} {value}", 100)
        self.ignored.append(f"{text}: {why}" if why else text)

    def sort_rest(self, neutral: frozenset[str], prefixes: tuple[str, ...] = (), *, under: str = "") -> None:
        """Sort what is left into options that change nothing and those that are not simulated.

        ``under``: only options whose names begin so. ``neutral`` and ``prefixes`` are of what follows it.
        """
        for option, value in self.options.items():
            if option in self._sorted or not option.startswith(under):
                continue
            rest = option.removeprefix(under)
            named = rest in neutral or rest.startswith(prefixes)
            if (named and option not in self._looked_at) or is_off(value):
                self.leave(option)
            else:
                self.ignore(option)

    @property
    def script(self) -> LaunchScript:
        """The script as far as it was read."""
        lists = (tuple(self.understood), tuple(self.assumed), tuple(self.neutral), tuple(self.ignored))
        return LaunchScript(self.format, self.workload, self.gpus, self.accumulation, *lists, self.copies, self.steps)

    def _name(self, option: str) -> str:
        return self.names.get(option, option)

    def _error(self, option: str, message: str) -> InputError:
        return InputError(message, file=self.path, key=self._name(option), found=brief(self.options[option]))

    def _store(self, key: str, value: Any) -> None:
        *sections, last = key.split(".")
        section = self.workload
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value


def is_off(value: object) -> bool:
    """Return whether a value switches an option off, or leaves it to others."""
    return value is None or str(value).lower() in ("", "auto", "false", "no", "none")


def flattened(data: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return a mapping of mappings as one with dotted keys.

    >>> flattened({"zero": {"stage": 3}, "bf16": {}})
    {'zero.stage': 3}
    """
    flat: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{section}{name}"
        flat |= flattened(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat


def words_of(value: object) -> list[str]:
    """Return the words of a list, or of a text with blanks or commas between them.

    >>> words_of("q_proj,v_proj"), words_of(["q_proj"]), words_of(None)
    (['q_proj', 'v_proj'], ['q_proj'], [])
    """
    return [str(word) for word in value] if isinstance(value, list) else str(value or "").replace(",", " ").split()
