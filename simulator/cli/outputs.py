"""Files that a command writes, refused before the work begins where they cannot be written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.cli.terminal import show, warn
from simulator.errors import InputError
from simulator.input_files import as_path, files_read, real_path
from simulator.output.files import PICTURES, why_not_writable, writing

if TYPE_CHECKING:
    from rich.console import RenderableType

STDOUT = Path("-")
#: Option of several commands -> usual endings of its files; others are allowed, but for those of other kinds of files.
_ENDINGS = {
    "--json": (".json",),
    "--csv": (".csv",),
    "--parquet": (".parquet",),
    "--trace": (".json", ".pftrace"),
}
_ENDINGS_OF_KINDS = frozenset(
    (
        *(ending for endings in _ENDINGS.values() for ending in endings),
        *PICTURES,
        ".html",
        ".htm",
        ".db",
        ".yaml",
        ".yml",
    )
)


def check_outputs(
    outputs: Mapping[str, Path | None],
    suffixes: Mapping[str, Sequence[str]] | None = None,
    inputs: Iterable[Path | None] = (),
) -> None:
    """Raise `InputError` where an output cannot be written: option -> path, option -> allowed endings of its name.

    Nor may it be one of ``inputs``, or any file that has been read. Only --json may be standard output.
    """
    read = files_read | {real_path(path) for path in inputs if path is not None}
    option_of_file: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None or (path == STDOUT and option == "--json"):
            continue
        if path == STDOUT:
            raise InputError("needs a file", file=option, found="-")
        if path == Path():
            raise InputError("needs the name of a file", file=option)
        allowed = (suffixes or {}).get(option)
        if allowed and path.suffix.lower() not in allowed:
            kinds = ", ".join(f"a name that ends in {suffix}" for suffix in allowed)
            raise InputError("no file of this kind", file=option, found=str(path), allowed=kinds)
        as_path(path.absolute(), file=option)
        folder, target = path.parent, real_path(path, file=option)
        if target in read:
            raise InputError("is a file that this command reads", file=option, found=str(path), fix="another name")
        if path.suffix.lower() in _ENDINGS_OF_KINDS.difference(_ENDINGS.get(option, _ENDINGS_OF_KINDS)):
            kinds = " or ".join(_ENDINGS[option])
            what = "has the ending of another kind of file"
            raise InputError(what, file=option, found=str(path), allowed=f"{kinds}, or an ending of your own")
        if path.is_dir():
            raise InputError("is a directory, not a file", file=option, found=str(path))
        check_folder(option, folder, path)
        if target in option_of_file:
            raise InputError(f"is the file of {option_of_file[target]} too", file=option, found=str(path))
        option_of_file[target] = option


def check_folder(option: str, folder: Path, written: Path) -> None:
    """Raise `InputError` where ``written``, a file in ``folder`` or this itself, cannot be written for ``option``.

    A folder that is written itself is made later, where the one above it is there.
    """
    if written == folder and not folder.exists() and folder.parent.is_dir():
        folder = folder.parent
    if not folder.is_dir():
        above = next(one for one in (folder, *folder.parents) if one.exists())
        if not above.is_dir():
            message = f"{above} is a file, and no directory"
            raise InputError(message, file=option, found=str(written), fix="another name")
        raise InputError("its directory does not exist", file=option, found=str(written), fix=f"mkdir -p {folder}")
    reason = why_not_writable(folder) if written == folder else _why_not_writable(real_path(written, file=option))
    if reason:
        raise InputError(f"cannot be written: {reason}", file=option, found=str(written))


def _why_not_writable(path: Path) -> str | None:
    """Return why a file cannot be written, or replaced; None where it can. Devices and pipes are left alone."""
    if path.exists() and not os.access(path, os.W_OK):
        return "permission denied"
    return None if path.exists() and not path.is_file() else why_not_writable(path.parent)


@contextmanager
def reading_inputs(
    outputs: Mapping[str, Path | None], suffixes: Mapping[str, Sequence[str]] | None = None
) -> Iterator[None]:
    """Check outputs before a block that reads large files, and behind it against these files."""
    check_outputs(outputs, suffixes)
    yield
    check_outputs(outputs)


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write ``result`` to ``path``, to standard output where that is ``-``, nowhere where it is None."""
    if path is None:
        return
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        return
    with writing(path) as file:
        file.write(text.encode())


def shows_summary(json: Path | None, quiet: bool) -> bool:
    """Tell whether a command prints for a person to read: neither ``--quiet``, nor JSON on standard output."""
    return not quiet and json != STDOUT


def tell(
    result: Mapping[str, Any],
    tables: Callable[[Mapping[str, Any]], Iterable[RenderableType]],
    json: Path | None,
    quiet: bool,
) -> None:
    """Write a ``result`` as JSON, say its warnings, and print its ``tables`` where a summary is shown."""
    write_json(json, result)
    warn(result["warnings"])
    if shows_summary(json, quiet):
        show(*tables(result))
