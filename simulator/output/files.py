"""Files that are there whole or not at all, and the same bytes for the same content."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from simulator.errors import InputError

#: Traces are long and repetitive: level 1 is four times as fast as the default and a fifth larger.
_GZIP_LEVEL = 1


@contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """Open ``path`` to be written whole: it appears, or is replaced, when the block ends without an exception.

    A name that ends in ``.gz`` is compressed, without a time stamp. Raises `InputError` where it cannot be written.
    """
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", file=target, fix="an existing folder") from None
    try:
        with os.fdopen(handle, "wb") as raw:
            if target.suffix == ".gz":
                with gzip.GzipFile("", "wb", _GZIP_LEVEL, raw, mtime=0) as packed:
                    yield cast(BinaryIO, packed)
            else:
                yield cast(BinaryIO, raw)
        os.chmod(temporary, 0o666 & ~_umask())
        try:
            os.replace(temporary, target)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", file=target) from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
