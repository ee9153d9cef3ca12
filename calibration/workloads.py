"""Workload files by the name that their runs go by, and whether a run is of what such a file says now."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from calibration.commits import sha256
from simulator.config import Workload, load_workload
from simulator.errors import InputError
from simulator.input_files import brief, read_text

#: What a run trains, of a `Workload`: the cluster and its calibration are not the trainer's.
TRAINED = ("model", "training", "framework", "parallelism")
#: Shipped files whose keys have been renamed since they were run: the hash of their text, and what it was before.
RENAMED = Path(__file__).resolve().parent / "runs" / "renamed.csv"
#: The longest of the endings that a run's files have behind its name, and how long file systems let a name be, bytes.
TIMELINE, LONGEST = ".timeline.csv.gz", 255


def by_name(paths: Iterable[Path]) -> dict[str, tuple[Path, Workload | InputError]]:
    """Return files and their workloads, or the problem with a file, by the workload's name.

    A file that is no workload goes by its own name. Raises `InputError` where there is no such file, where two have one
    name, and where no result could have that name.
    """
    files: dict[str, tuple[Path, Workload | InputError]] = {}
    for path in paths:
        if not path.is_file():
            raise InputError("there is no such file", key="WORKLOAD", found=str(path))
        loaded: Workload | InputError
        try:
            loaded = load_workload(path)
            check_name(loaded.name, path)
        except InputError as problem:
            loaded = problem
        name = path.stem if isinstance(loaded, InputError) else loaded.name
        check_name(name, path)
        if name in files:
            raise name_clash(name, files[name][0], path)
        files[name] = path, loaded
    return files


def name_clash(name: str, *paths: Path) -> InputError:
    """Return the problem of two files with one name, by which runs are found."""
    both, fix = ", ".join(map(str, paths)), "name: ANOTHER in one of them"
    return InputError(f"two workloads of one name, {name}", key="WORKLOAD", found=both, fix=fix)


def check_name(name: str, path: Path) -> None:
    """Raise `InputError` where the ``name`` of the workload in ``path`` is not one that files can have, as those of its
    run."""
    most = LONGEST - len(TIMELINE)
    if Path(name).name != name or len(os.fsencode(name)) > most:
        allowed = f"a file's name of at most {most} bytes"
        raise InputError("a run's files cannot be called so", file=path, key="name", found=brief(name), allowed=allowed)


def is_of(recorded: Mapping[str, Any], path: Path, now: Workload | None) -> bool:
    """Return True where a run is of the file ``path`` as it is now.

    ``recorded``: the record's ``workload`` (``sha256``, ``resolved``). The run is of the text of the file. Where its
    workload ``now`` is known, it is also of the same model, training and layout, which may come from other files that
    it names. A key that came into being after the run says nothing. Nor does one that its framework has a default for,
    which the run had by itself.
    """
    if recorded.get("sha256") not in texts_of(sha256(read_text(path))):
        return False
    if now is None:
        return True
    then = deepcopy(recorded.get("resolved") or {})
    for key in now.software.defaults(now.traits):
        _drop_where_open(then, now, key)
    return _alike(then, now.model_dump(mode="json", include={*TRAINED}))


def _drop_where_open(then: dict[str, Any], section: Any, key: str) -> None:
    """Drop a dotted ``key`` from recorded values where the ``section`` of a file leaves it open."""
    name, _, rest = key.partition(".")
    inner = then.get(name)
    if rest and isinstance(inner, dict):
        _drop_where_open(inner, getattr(section, name), rest)
    elif not rest and name not in section.model_fields_set:
        then.pop(name, None)


def texts_of(sha256: str) -> tuple[str, ...]:
    """Hashes of the texts that a workload file has had: its own, and those of the same content before keys were
    renamed (`RENAMED`)."""
    return (sha256, *_before().get(sha256, ()))


@lru_cache
def _before() -> Mapping[str, tuple[str, ...]]:
    """Return the hash of a file now -> those of its texts before."""
    with RENAMED.open(encoding="utf-8", newline="") as file:
        return {row["sha256"]: tuple(row["sha256_before"].split()) for row in csv.DictReader(file)}


def _alike(then: object, now: object) -> bool:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        return all(_alike(then[key], now[key]) for key in then.keys() & now.keys())
    return then == now
