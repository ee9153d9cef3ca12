"""Files of a trace as users name them: one by one, or the folder that holds them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from simulator.errors import InputError
from simulator.input_files import as_path
from simulator.traces.execution.process_groups import GROUPS_FILE
from simulator.traces.kineto import read_trace
from simulator.traces.trace import RunTrace

#: Endings of the names of traces in a folder.
SUFFIXES = (".json", ".json.gz")
#: The same of Chakra's protocol buffers.
MESSAGES = (".et", ".et.gz")
#: Beginning of what this project's commands write for ``--json``.
_RESULT = re.compile(rb'\{\s*"schema_version"\s*:')


def files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files of a folder with such names, ordered by these; numbers in names count as numbers.

    Results of this project's commands are left out, and files of communicator groups.
    """
    named = [one for one in folder.iterdir() if one.name.lower().endswith(suffixes) and one.name != GROUPS_FILE]
    inside = [one for one in named if one.is_file()]
    return sorted((one for one in inside if not _is_result(one)), key=lambda one: _natural(one.name))


def _is_result(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return _RESULT.match(file.read(100)) is not None
    except OSError:
        return False


def _natural(name: str) -> list[tuple[str, int]]:
    """Return what names are ordered by.

    >>> sorted(["et_10", "et_9"], key=_natural)
    ['et_9', 'et_10']
    """
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def open_trace(texts: Sequence[str]) -> RunTrace:
    """Return the trace in files, each of one rank; a folder stands for all traces in it. Raises `InputError`."""
    paths: list[Path] = []
    for text in texts:
        path = as_path(text)
        if path.is_dir():
            inside = files_in(path, SUFFIXES)
            if not inside:
                *most, last = (*SUFFIXES, *MESSAGES)
                endings = f"{', '.join(most)} or {last}"
                raise InputError("holds no traces", file=path, allowed=f"files that end in {endings}")
            paths += inside
        else:
            paths.append(path)
    return read_trace(paths)
