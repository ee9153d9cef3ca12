"""Where commands put their results."""

from __future__ import annotations

import os
from pathlib import Path

from simulator.config.files import as_path
from simulator.errors import InputError


def folder(option: str, path: Path) -> Path:
    """``path``, which is a folder or can be made one. Raises `InputError` where it, or what it lies in, is a file or
    may not be written to."""
    there = as_path(path.absolute(), file=option)
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        what = "is a file, not a folder" if there == path.absolute() else f"lies in {there.name}, which is a file"
        raise InputError(what, file=option, found=str(path), fix="another folder")
    if not os.access(there, os.W_OK):
        raise InputError("cannot be written to: permission denied", file=option, found=str(path))
    return path
