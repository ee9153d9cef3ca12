"""Text of files that may be compressed."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from simulator.errors import InputError


def read_packed(path: Path) -> str:
    """The text (UTF-8) of a file, unpacked where its name ends in ``.gz``. Raises `InputError` where it cannot be read,
    is cut off or damaged, or is no text."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("is not text (UTF-8)", file=path) from None
    except (OSError, EOFError, zlib.error) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise InputError(f"cannot be read: {reason}", file=path, fix="a whole copy of the file") from None
