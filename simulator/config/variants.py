"""Variants of a loaded workload: other layouts of the same job, by the rules of a file, which is read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simulator.config.loading import SHORTHANDS, complete
from simulator.config.parallelism import Parallelism, with_split
from simulator.config.section import ShortSection
from simulator.config.training import Training
from simulator.config.validation import validated
from simulator.config.workload import Workload
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.input_files import with_changes


@dataclass(frozen=True)
class Variants:
    """Variants of ``workload`` on ``cluster``: other values of keys of its training and parallelism.

    Model, cluster and profiles are read and checked once. A variant has every default that a file with these keys
    would have, and passes the very rules that such a file passes.
    """

    workload: Workload
    cluster: ClusterSpec
    _trainings: dict[str, Training] = field(default_factory=dict, init=False, repr=False, compare=False)

    def variant(self, changes: Mapping[str, Any]) -> Workload:
        """Return the workload with dotted keys of the two sections changed, ``parallelism.dp`` among them.

        An uneven split of the layers stays where the number of stages does. Raises `InputError` where it is not legal.
        """
        inside: dict[str, dict[str, Any]] = {"training": {}, "parallelism": {}}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            inside[section][name] = value
        training, parallelism = self._training(inside["training"]), self._parallelism(inside["parallelism"])
        update = {"training": training, "parallelism": parallelism, "cluster": self.cluster}
        return complete(self.workload.model_copy(update=update))

    def value(self, key: str, value: Any) -> Any:
        """Return ``value`` as the section of a dotted key reads it: of null the default, of ``1e3`` a whole number.

        A list or a mapping stays as it is. Raises `InputError` where the key cannot have the value.
        """
        section, _, name = key.partition(".")
        read: Any = (self._training if section == "training" else self._parallelism)({name: value})
        for part in name.split("."):
            read = getattr(read, part)
        if value is None and isinstance(read, ShortSection):
            return getattr(read, read.text_means)
        return read if read is None or isinstance(read, bool | int | float | str) else value

    def _training(self, changes: Mapping[str, Any]) -> Training:
        key = repr(changes)  # fewer than variants, most of which differ in the layout alone
        if key not in self._trainings:
            data = self._changed("training", changes)
            self._trainings[key] = validated(Training, data, place=lambda path: (None, f"training.{path}"))
        return self._trainings[key]

    def _parallelism(self, changes: Mapping[str, Any]) -> Parallelism:
        return with_split(self._changed("parallelism", changes), self.workload.parallelism)

    def _changed(self, section: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        shorthands = {key.removeprefix(f"{section}."): text for key, text in SHORTHANDS.items()}
        return with_changes(getattr(self.workload, section).model_dump(exclude_unset=True), changes, shorthands)
