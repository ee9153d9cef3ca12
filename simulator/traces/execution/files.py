"""Execution traces as users name them: files, one per rank, or the folder that holds them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from simulator.config.packed import unpacked
from simulator.encodings import as_utf8
from simulator.errors import InputError
from simulator.input_files import as_path, files_read
from simulator.traces.execution.chakra import parsed_json, read_json, read_messages
from simulator.traces.execution.graph import JobGraph, RankGraph
from simulator.traces.execution.process_groups import GROUPS_FILE, read_groups
from simulator.traces.execution.pytorch import read_operations
from simulator.traces.files import MESSAGES, SUFFIXES, files_in

#: Bytes at the beginning of a JSON file, in which its kind is looked for.
_BEGINNING = 1 << 16
#: Files that a sentence names.
_NAMED = 3
#: Keys of PyTorch's and of Chakra's JSON; a profiler's file has ``schemaVersion`` instead.
_KEYS = re.compile(rb'"(schema|workload_graph)"\s*:')
#: Numbers of ranks in names: as a word, and in front of the ending as Chakra's files have it.
_RANK = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)
_RANK_OF_CHAKRA = re.compile(r"\.(\d{1,6})\.(?:et|json)(?:\.gz)?$", re.IGNORECASE)


def is_execution_trace(text: str) -> bool:
    """Tell whether a file, or any file of a folder, is an execution trace, and no profiler's.

    Raises `InputError` where there is no such file.
    """
    path = as_path(text)
    if not path.exists():
        raise InputError("cannot be read: No such file or directory", file=path)
    if path.is_dir():
        return any(is_execution_trace(str(one)) for one in _candidates(path))
    if path.name.lower().endswith(MESSAGES):
        return True
    try:
        beginning = as_utf8(_content(path, _BEGINNING))
    except InputError:
        return False
    return beginning.lstrip()[:1] == b"{" and _KEYS.search(beginning) is not None


def refuse_execution_trace(path: Path) -> None:
    """Raise `InputError` where a file or folder is an execution trace, which has no times of a profiler."""
    if is_execution_trace(str(path)):
        raise InputError(
            "execution traces are shown and played, and not compared", file=path, fix="the profiler's trace of the run"
        )


def _candidates(folder: Path) -> list[Path]:
    """Return the files of a folder that may be execution traces."""
    return files_in(folder, (*MESSAGES, *SUFFIXES))


def open_graphs(texts: Sequence[str], groups: str | None = None) -> JobGraph:
    """Return the graphs in files, each of one rank; a folder stands for all execution traces in it.

    A file whose name tells no rank is of the rank of its place among the files.
    ``groups``: ASTRA-sim's file of communicator groups [``comm_group.json`` beside the first trace, if it is there].
    Raises `InputError`.
    """
    paths: list[Path] = []
    missing: list[str] = []
    for text in texts:
        path = as_path(text)
        if not path.is_dir():
            paths.append(path)
            continue
        inside = _candidates(path)
        traces = [one for one in inside if is_execution_trace(str(one))]
        if not traces:
            raise InputError("holds no execution traces", file=path, allowed="Chakra's .et or JSON, PyTorch's JSON")
        left_out = [one.name for one in inside if one not in traces]
        if left_out:
            missing.append(f"{_listed(left_out)} in {path} are left out, for they are no execution traces")
        paths += traces
    opened = [_opened(path, number) for number, path in enumerate(paths)]
    ranks = [rank for rank, _ in opened]
    unnamed = [rank for rank, is_named in opened if not is_named]
    if len(unnamed) > 1:
        first, last = ((Path(rank.file).name, rank.rank) for rank in (unnamed[0], unnamed[-1]))
        missing.append(
            f"names of files tell no rank (rank3, .3.et): in their order {first[0]} is taken as rank {first[1]}, "
            f"{last[0]} as rank {last[1]}"
        )
    by_rank: dict[int, RankGraph] = {}
    for rank in ranks:
        if rank.rank in by_rank:
            raise InputError(f"{by_rank[rank.rank].file} is of rank {rank.rank} too", file=rank.file)
        by_rank[rank.rank] = rank
    ordered = tuple(by_rank[number] for number in sorted(by_rank))
    return JobGraph(ordered, _groups(ranks, paths[0].parent / GROUPS_FILE, groups), tuple(missing))


def _groups(ranks: Sequence[RankGraph], beside: Path, named: str | None) -> dict[str, tuple[int, ...]]:
    """Return the groups that traces list, and over these those of a file: that which is ``named``, or ``beside``."""
    listed: dict[str, tuple[int, ...]] = {}
    for rank in ranks:
        listed |= rank.groups
    if named is not None:
        listed |= read_groups(as_path(named))
    elif beside.is_file():
        listed |= read_groups(beside)
    return listed


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _opened(path: Path, place: int) -> tuple[RankGraph, bool]:
    """Return a file's graph, and whether the file's name tells its rank; else it is of the rank ``place``."""
    content = _content(path)
    files_read.add(path.resolve())
    if not content.strip():
        raise InputError("is empty", file=path)
    named = _RANK.search(path.name)
    numbered = _RANK_OF_CHAKRA.search(path.name) or named
    rank = int(numbered[1]) if numbered else place
    if path.name.lower().endswith(MESSAGES):
        return read_messages(content, path, rank), numbered is not None
    parsed = parsed_json(content, path)
    if isinstance(parsed, dict) and "workload_graph" in parsed:
        return read_json(parsed, path, rank), numbered is not None
    if isinstance(parsed, dict) and "schema" in parsed:
        return read_operations(parsed, path, int(named[1]) if named else place), named is not None
    raise InputError("is no execution trace", file=path, allowed="Chakra's .et or JSON, PyTorch's JSON")


def _content(path: Path, most: int = -1) -> bytes:
    """Return the bytes of a file, unpacked; only so many as are asked for. Raises `InputError`."""
    with unpacked(path) as stream:
        return stream.read(most)
