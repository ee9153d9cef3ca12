"""Folders for the results of commands."""

from __future__ import annotations

import tempfile
from pathlib import Path

from simulator.errors import InputError
from simulator.input_files import as_path


def folder(option: str, path: Path) -> Path:
    """``path``, which is a folder now if it was none before. Raises `InputError` where it, or what it lies in, is a
    file or cannot be written to."""
    there = as_path(path.absolute(), file=option)
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        what = "is a file, not a folder" if there == path.absolute() else f"lies in {there.name}, which is a file"
        raise InputError(what, file=option, found=str(path), fix="another folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(
            f"cannot be written to: {error.strerror or error}", file=option, found=str(path), fix="another folder"
        ) from None
    return path
