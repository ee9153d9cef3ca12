"""Files that a command writes, refused before the work begins where they cannot be written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.cli.terminal import show, warn
from simulator.errors import InputError
from simulator.input_files import as_path, files_read, real_path
from simulator.output.files import PICTURES, why_no_file_in, writing

if TYPE_CHECKING:
    from rich.console import RenderableType

STDOUT = Path("-")
#: Option -> endings of its files, of which their names need one.
_NEEDED_ENDINGS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("--gantt", "--memory", "--plot"), PICTURES),
    "--report": (".html", ".htm"),
    "--timeline": (".parquet",),
}
#: Option -> usual endings of its files; other endings are allowed, but for those of other kinds of files.
_USUAL_ENDINGS: Mapping[str, Sequence[str]] = {
    "--json": (".json",),
    "--csv": (".csv",),
    "--parquet": (".parquet",),
    "--trace": (".json", ".pftrace"),
    "--out": (".db",),
}
_ENDINGS_OF_KINDS = frozenset(chain(*_NEEDED_ENDINGS.values(), *_USUAL_ENDINGS.values(), (".yaml", ".yml")))


def check_outputs(
    outputs: Mapping[str, Path | None],
    needed: Mapping[str, Sequence[str]] | None = None,
    inputs: Iterable[Path | None] = (),
) -> None:
    """Raise `InputError` where an output cannot be written: option -> path.

    Nor may it be one of ``inputs``, or any file that has been read. Only --json may be standard output. ``needed``:
    option -> endings of its name, where those of the command are its own.
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
        as_path(path.absolute(), file=option)
        target = real_path(path, file=option)
        if target in read:
            raise InputError("is a file that this command reads", file=option, found=str(path), fix="another name")
        _check_ending(option, path, {**_NEEDED_ENDINGS, **(needed or {})}.get(option))
        if path.is_dir():
            raise InputError("is a directory, not a file", file=option, found=str(path))
        _check_file(option, path)
        if target in option_of_file:
            raise InputError(f"is the file of {option_of_file[target]} too", file=option, found=str(path))
        option_of_file[target] = option


def _check_ending(option: str, path: Path, needed: Sequence[str] | None) -> None:
    """Raise `InputError` where a name lacks an ending that is ``needed``, or has that of another kind of file."""
    ending, usual = path.suffix.lower(), _USUAL_ENDINGS.get(option, ())
    if needed and ending not in needed:
        kinds = ", ".join(f"a name that ends in {suffix}" for suffix in needed)
        raise InputError("no file of this kind", file=option, found=str(path), allowed=kinds)
    if not needed and ending in _ENDINGS_OF_KINDS.difference(usual):
        kinds = " or ".join(usual)
        what = "has the ending of another kind of file"
        raise InputError(what, file=option, found=str(path), allowed=f"{kinds}, or an ending of your own")


def check_folder(option: str, folder: Path) -> None:
    """Raise `InputError` where no files can be made in the ``folder`` of an option.

    A folder that is not there is made later, where the one above it is.
    """
    there = folder.parent if not folder.exists() and folder.parent.is_dir() else folder
    _check_is_folder(option, there, folder)
    _refuse(option, folder, why_no_file_in(there))


def _check_file(option: str, path: Path) -> None:
    """Raise `InputError` where a file cannot be made, or replaced. Devices and pipes are left alone."""
    _check_is_folder(option, path.parent, path)
    target = real_path(path, file=option)
    if target.exists() and not os.access(target, os.W_OK):
        _refuse(option, path, "permission denied")
    elif target.is_file() or not target.exists():
        _refuse(option, path, why_no_file_in(target.parent))


def _check_is_folder(option: str, folder: Path, path: Path) -> None:
    """Raise `InputError` where ``folder``, which an option needs for its ``path``, is no directory."""
    if folder.is_dir():
        return
    above = next(one for one in (folder, *folder.parents) if one.exists())
    if not above.is_dir():
        message = f"{above} is a file, and no directory"
        raise InputError(message, file=option, found=str(path), fix="another name")
    raise InputError("its directory does not exist", file=option, found=str(path), fix=f"mkdir -p {folder}")


def _refuse(option: str, path: Path, reason: str | None) -> None:
    """Raise `InputError` where there is a ``reason`` why the ``path`` of an option cannot be written."""
    if reason:
        raise InputError(f"cannot be written: {reason}", file=option, found=str(path))


@contextmanager
def reading_inputs(outputs: Mapping[str, Path | None]) -> Iterator[None]:
    """Check outputs before a block that reads large files, and behind it against these files."""
    check_outputs(outputs)
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
