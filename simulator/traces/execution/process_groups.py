"""Groups of ranks as execution traces list them: in a node, or in ASTRA-sim's file of communicator groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.input_files import brief, files_read

#: Name of the node in which PyTorch lists its process groups.
GROUPS_NODE = "## process_group:init ##"
#: Name of ASTRA-sim's file of communicator groups, as it is written here.
GROUPS_FILE = "comm_group.json"
#: Ranks that a job may have: larger numbers are mistakes.
MOST_RANKS = 1 << 20


def listed_groups(text: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the groups that PyTorch lists as JSON inside ``text``: name -> ranks. Of a group of all it tells the size.

    ``path`` is the file that has it. Raises `InputError` where a group has a rank twice.

    >>> listed_groups('["[{\\\\"pg_name\\\\": \\\\"1\\\\", \\\\"ranks\\\\": [0, 4]}]"]', Path("t.json"))
    {'1': (0, 4)}
    """
    listed = text.replace('\\"', '"')
    first, last = listed.find("[{"), listed.rfind("}]")
    try:
        entries = json.loads(listed[first : last + 2]) if first >= 0 else []
    except (ValueError, RecursionError):
        return {}
    groups = {}
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        ranks, size = entry.get("ranks"), entry.get("group_size")
        if not ranks and type(size) is int and 0 < size <= MOST_RANKS:
            ranks = list(range(size))
        if isinstance(ranks, list) and ranks and all(_is_rank(rank) for rank in ranks):
            name = str(entry.get("pg_name", ""))
            groups[name] = _ranks(ranks, path, f"process group {name}")
    return groups


def read_groups(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the groups in ASTRA-sim's file: number of a group -> its ranks. Raises `InputError`."""
    try:
        files_read.add(path.resolve())
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=path) from None
    except (ValueError, RecursionError):
        raise InputError("is no JSON", file=path) from None
    if not isinstance(content, dict):
        raise InputError("is no file of communicator groups", file=path, allowed='{"1": [0, 1]}')
    return {str(name): _ranks(ranks, path, str(name)) for name, ranks in content.items()}


def _ranks(value: Any, path: Path, name: str) -> tuple[int, ...]:
    is_list = isinstance(value, list) and value and all(_is_rank(rank) for rank in value)
    if not is_list or len(set(value)) < len(value):
        raise InputError("is no list of ranks, each once", file=path, key=name, found=brief(value))
    return tuple(value)


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_RANKS
