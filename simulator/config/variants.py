"""Variants of a loaded workload: other layouts of the same job, by the rules of a file, hundreds of times faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from simulator.config.loading import SHORTHANDS, complete
from simulator.config.parallelism import Parallelism
from simulator.config.section import Section, ShortSection
from simulator.config.training import Training
from simulator.config.validation import validated
from simulator.config.workload import Workload
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.input_files import with_changes

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Variants:
    """Variants of ``workload`` on ``cluster``: other values of keys of its training and parallelism.

    Model, cluster and profiles are read and checked once. A variant has every default that a file with these keys
    would have, and passes the very rules that such a file passes.
    """

    workload: Workload
    cluster: ClusterSpec
    _sections: dict[tuple[str, str], Section] = field(default_factory=dict, init=False, repr=False, compare=False)

    def variant(self, changes: Mapping[str, Any]) -> Workload:
        """Return the workload with dotted keys of the two sections changed, ``parallelism.dp`` among them.

        An uneven split of the layers stays where the number of stages does. Raises `InputError` where it is not legal.
        """
        inside: dict[str, dict[str, Any]] = {"training": {}, "parallelism": {}}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            inside[section][name] = value
        training = self._section("training", Training, inside["training"])
        parallelism = self._section("parallelism", Parallelism, inside["parallelism"])
        update = {"training": training, "parallelism": parallelism, "cluster": self.cluster}
        return complete(self.workload.model_copy(update=update))

    def value(self, key: str, value: Any) -> Any:
        """Return ``value`` as the section of a dotted key reads it: of null the default, of ``1e3`` a whole number.

        A list or a mapping stays as it is. Raises `InputError` where the key cannot have the value.
        """
        section, _, name = key.partition(".")
        form: type[Section] = Training if section == "training" else Parallelism
        read: Any = self._section(section, form, {name: value})
        for part in name.split("."):
            read = getattr(read, part)
        if value is None and isinstance(read, ShortSection):
            return getattr(read, read.text_means)
        return read if read is None or isinstance(read, bool | int | float | str) else value

    def _section(self, name: str, form: type[S], changes: Mapping[str, Any]) -> S:
        key = name, repr(changes)
        if key not in self._sections:
            data = getattr(self.workload, name).model_dump(exclude_unset=True)
            shorthands = {path.removeprefix(f"{name}."): text for path, text in SHORTHANDS.items()}
            data = with_changes(data, changes, shorthands)
            value = validated(form, data, place=lambda path: (None, f"{name}.{path}"))
            stages = len(self.workload.parallelism.layers_per_stage)
            if stages and isinstance(value, Parallelism) and value.pp * value.vpp != stages:
                data.pop("layers_per_stage", None)
                value = validated(form, data)
            if name == "parallelism":  # there are as many of them as variants
                return value
            self._sections[key] = value
        return self._sections[key]  # type: ignore[return-value]
