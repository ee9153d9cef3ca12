"""Files of a trace as users name them: one by one, or the folder that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simulator.errors import InputError
from simulator.input_files import as_path
from simulator.traces.kineto import read_trace
from simulator.traces.trace import RunTrace

#: Endings of the names of traces in a folder.
SUFFIXES = (".json", ".json.gz")


def open_trace(texts: Sequence[str]) -> RunTrace:
    """Return the trace in files, each of one rank; a folder stands for all traces in it. Raises `InputError`."""
    paths: list[Path] = []
    for text in texts:
        path = as_path(text)
        if path.is_dir():
            inside = sorted(one for one in path.iterdir() if one.name.endswith(SUFFIXES))
            if not inside:
                raise InputError("holds no traces", file=path, allowed=f"files that end in {' or '.join(SUFFIXES)}")
            paths += inside
        else:
            paths.append(path)
    return read_trace(paths)
