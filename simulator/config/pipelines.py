"""Pipeline schedules by name, or read from a CSV file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from simulator.encodings import decoded
from simulator.errors import InputError
from simulator.input_files import as_path, files_read, read_content
from simulator.schedules import SCHEDULES, Schedule, from_csv


def is_file(reference: str) -> bool:
    """Return whether a text names a file of a schedule, not a schedule."""
    return reference.endswith(".csv")


def find_schedule(reference: str, *, file: object = None, key: str | None = None) -> Schedule:
    """The schedule of a name, or of a CSV file in torch's text form. Raises `InputError`, of which ``file`` and ``key``
    are where the reference stands."""
    if not is_file(reference):
        return SCHEDULES[reference]
    path = as_path(reference, file=file, key=key)
    try:
        schedule = _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise InputError(f"cannot read the schedule: {error.strerror}", file=file, key=key, found=reference) from None
    except ValueError as error:
        raise InputError(str(error), file=path) from None
    files_read.add(path.resolve())
    return schedule


@lru_cache(maxsize=16)
def _read(path: Path, changed: int) -> Schedule:
    return from_csv(decoded(read_content(path), path), path.name)
