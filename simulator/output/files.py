"""Output files: written whole or not at all, equal bytes for equal content."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from simulator.errors import InputError
from simulator.input_files import as_path, real_path

#: Suffixes of pictures; they stand here, so that another is refused before matplotlib is imported.
PICTURES = (".png", ".svg", ".pdf")
#: Suffixes of traces in Perfetto's own format.
PERFETTO_SUFFIXES = (".pftrace", ".pftrace.gz")
#: Suffixes of traces as PyTorch's profiler names them (`torch.profiler.tensorboard_trace_handler`).
PROFILER_SUFFIXES = (".pt.trace.json.gz", ".pt.trace.json")
#: Traces are long and repetitive: level 1 is four times as fast as the default and a fifth larger.
_GZIP_LEVEL = 1


@contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """Open ``path`` for writing: the file appears, or is replaced, when the block ends without an exception.

    A name that ends in ``.gz`` is compressed, without a time stamp. Devices and pipes are written as they are.
    Raises `InputError` where it cannot be written.
    """
    target = real_path(as_path(path))  # what a link points to is replaced, not the link
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as device, _packed(target, device) as content:
                yield content
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:32]}.")
        try:
            with os.fdopen(handle, "wb") as raw, _packed(target, raw) as content:
                yield content
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        fix = None if target.parent.is_dir() else "an existing folder"
        raise InputError(f"cannot be written: {error.strerror or error}", file=path, fix=fix) from None


def make_folder(folder: str | Path) -> None:
    """Make a folder whose parent is there. Raises `InputError` where it cannot be made."""
    try:
        as_path(folder).mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror or error}", file=folder) from None


def refuse_others(folder: Path, suffixes: tuple[str, ...], files: Collection[Path]) -> None:
    """Raise `InputError` where a folder has traces beside ``files``, which a reader would take for ones of this job.

    ``suffixes``: endings of the names of traces, in small letters.
    """
    there = sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
    ours = {file.name for file in files}
    if strangers := [name for name in there if name.lower().endswith(suffixes) and name not in ours]:
        raise InputError("holds traces of other ranks or steps", file=folder, found=strangers[0], fix="an empty folder")


def profiler_files(folder: Path, ranks: Iterable[int]) -> list[Path]:
    """Return the files that traces of ``ranks`` are written into, with names as of PyTorch's profiler.

    Raises `InputError` where the folder has others with such names.
    """
    files = [folder / f"rank{rank}{PROFILER_SUFFIXES[0]}" for rank in ranks]
    refuse_others(folder, PROFILER_SUFFIXES, files)
    return files


def why_no_file_in(folder: Path) -> str | None:
    """Return why no file can be made in a folder, None where one can: one without a name is made, and is gone.

    Permissions do not tell all: a disk may be read-only or full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


@contextmanager
def _packed(target: Path, raw: BinaryIO) -> Iterator[BinaryIO]:
    if target.suffix == ".gz":
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, raw, mtime=0) as packed:
            yield cast(BinaryIO, packed)
    else:
        yield raw


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
