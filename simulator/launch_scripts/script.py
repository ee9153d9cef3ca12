"""A launch script as keys of a workload file, with what became of each of its options."""

from __future__ import annotations

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
    """

    format: str
    workload: dict[str, Any]
    gpus: int | None
    accumulation: int | None
    understood: tuple[UnderstoodOption, ...]
    assumed: tuple[str, ...]
    neutral: tuple[str, ...]
    ignored: tuple[str, ...]


@dataclass
class ScriptReading:
    """A script while it is read, option by option; `script` is what came of it. ``path``: its file, for errors."""

    format: str
    path: Path
    options: Mapping[str, Any]
    gpus: int | None = None
    accumulation: int | None = None
    workload: dict[str, Any] = field(default_factory=dict)
    understood: list[UnderstoodOption] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    neutral: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def get(self, option: str, default: Any = None) -> Any:
        """Return the value of an option, which is then used; ``default`` where it is not there or null."""
        self.used.add(option)
        value = self.options.get(option)
        return default if value is None else value

    def flag(self, option: str) -> bool:
        """Return whether an option is on."""
        value = self.get(option, False)
        return value is True or str(value).lower() in ("true", "1", "yes", "enabled")

    def named(self, option: str) -> str:
        """Return the name of a switch, with a "no" before it where the script lacks it."""
        return option if option in self.options else f"no {option}"

    def number(self, option: str, default: int | None = None) -> int | None:
        """Return a whole number, or ``default``. Raises `InputError` where the option holds something else."""
        value = self.get(option, default)
        if value is None or (isinstance(value, str) and value.lower() == "auto"):
            return default
        try:
            number = float(str(value).replace("_", ""))
        except ValueError:
            number = 0.5
        if number != int(number):
            raise InputError("is no whole number", file=self.path, key=option, found=brief(value))
        return int(number)

    def put(self, key: str, value: Any, option: str) -> None:
        """Put a value that ``option`` says under the dotted ``key`` of the workload."""
        self._store(key, value)
        self.understood.append(UnderstoodOption(option, key, value))

    def take(self, option: str, key: str, default: int | None = None) -> int | None:
        """Put a whole number under ``key`` if the script says it; return it, or ``default``."""
        value = self.number(option)
        if value is None:
            return default
        self.put(key, value, option)
        return value

    def assume(self, key: str, value: Any, why: str) -> None:
        """Put a value that the script does not say under ``key``."""
        self._store(key, value)
        self.assumed.append(f"{key}: {value}, {why}")

    def sort_rest(self, neutral: frozenset[str], prefixes: tuple[str, ...] = ()) -> None:
        """Sort options that nothing has used into those that change nothing and those that are not simulated."""
        for option, value in self.options.items():
            if option in self.used:
                continue
            plain = option in neutral or option.startswith(prefixes)
            off = value is None or value is False or value in ("", "auto")
            (self.neutral if plain or off else self.ignored).append(option)

    @property
    def script(self) -> LaunchScript:
        """The script as far as it was read."""
        lists = (tuple(self.understood), tuple(self.assumed), tuple(self.neutral), tuple(self.ignored))
        return LaunchScript(self.format, self.workload, self.gpus, self.accumulation, *lists)

    def _store(self, key: str, value: Any) -> None:
        *sections, last = key.split(".")
        section = self.workload
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value


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
