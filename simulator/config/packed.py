"""Files that may be gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

from simulator.errors import InputError

_GZIP = b"\x1f\x8b"


@contextmanager
def unpacked(path: Path) -> Iterator[BufferedIOBase]:
    """Open a file for the block, which reads it unpacked. Raises `InputError` where it is cut off or cannot be read."""
    try:
        with path.open("rb") as raw:
            yield gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP else raw
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError("is cut off or damaged: it cannot be unpacked to its end", file=path) from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=path) from None
