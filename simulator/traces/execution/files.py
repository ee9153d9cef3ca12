"""Execution traces as users name them: files, one per rank, or the folder that holds them."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from simulator.errors import InputError
from simulator.input_files import as_path, files_read
from simulator.traces.execution.chakra import parsed_json, read_json, read_messages
from simulator.traces.execution.graph import JobGraph, RankGraph
from simulator.traces.execution.process_groups import GROUPS_FILE, read_groups
from simulator.traces.execution.pytorch import read_operations

#: Endings of the names of Chakra's protocol buffers.
MESSAGES = (".et", ".et.gz")
_JSON = (".json", ".json.gz")
_GZIP = b"\x1f\x8b"
#: Bytes at the beginning of a JSON file, in which its kind is looked for.
_BEGINNING = 1 << 16
#: Keys of PyTorch's and of Chakra's JSON; a profiler's file has ``schemaVersion`` instead.
_KEYS = re.compile(rb'"(schema|workload_graph)"\s*:')
#: Numbers of ranks in names: as a word, and in front of the ending as Chakra's files have it.
_RANK = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)
_RANK_OF_CHAKRA = re.compile(r"\.(\d{1,6})\.(?:et|json)(?:\.gz)?$", re.IGNORECASE)


def is_execution_trace(text: str) -> bool:
    """Tell whether a file, or the first trace of a folder, is an execution trace, and no profiler's."""
    path = Path(text)
    if path.is_dir():
        inside = sorted(one for one in path.iterdir() if one.name.endswith((*MESSAGES, *_JSON)))
        traces = [one for one in inside if one.name != GROUPS_FILE]
        return bool(traces) and is_execution_trace(str(traces[0]))
    if path.name.lower().endswith(MESSAGES):
        return True
    try:
        beginning = _content(path, _BEGINNING)
    except InputError:
        return False
    return beginning.lstrip()[:1] == b"{" and _KEYS.search(beginning) is not None


def open_graphs(texts: Sequence[str], groups: str | None = None) -> JobGraph:
    """Return the graphs in files, each of one rank; a folder stands for all traces in it.

    ``groups``: ASTRA-sim's file of communicator groups [``comm_group.json`` beside the first trace, if it is there].
    Raises `InputError`.
    """
    paths: list[Path] = []
    for text in texts:
        path = as_path(text)
        if path.is_dir():
            named = [one for one in sorted(path.iterdir()) if one.name.endswith((*MESSAGES, *_JSON))]
            paths += [one for one in named if one.name != GROUPS_FILE]
        else:
            paths.append(path)
    ranks = [_opened(path, number) for number, path in enumerate(paths)]
    by_rank: dict[int, RankGraph] = {}
    for rank in ranks:
        if rank.rank in by_rank:
            raise InputError(f"{by_rank[rank.rank].file} is of rank {rank.rank} too", file=rank.file)
        by_rank[rank.rank] = rank
    listed: dict[str, tuple[int, ...]] = {}
    for rank in ranks:
        listed |= rank.groups
    beside = paths[0].parent / GROUPS_FILE
    if groups is not None:
        listed |= read_groups(as_path(groups))
    elif beside.is_file():
        listed |= read_groups(beside)
    return JobGraph(tuple(by_rank[number] for number in sorted(by_rank)), listed)


def _opened(path: Path, place: int) -> RankGraph:
    content = _content(path)
    files_read.add(path.resolve())
    if not content.strip():
        raise InputError("is empty", file=path)
    named = _RANK.search(path.name)
    numbered = _RANK_OF_CHAKRA.search(path.name) or named
    rank = int(numbered[1]) if numbered else place
    if path.name.lower().endswith(MESSAGES):
        return read_messages(content, path, rank)
    parsed = parsed_json(content, path)
    if isinstance(parsed, dict) and "workload_graph" in parsed:
        return read_json(parsed, path, rank)
    if isinstance(parsed, dict) and "schema" in parsed:
        return read_operations(parsed, path, int(named[1]) if named else place)
    raise InputError("is no execution trace", file=path, allowed="Chakra's .et or JSON, PyTorch's JSON")


def _content(path: Path, most: int = -1) -> bytes:
    """Return the bytes of a file, unpacked; only so many as are asked for. Raises `InputError`."""
    try:
        with path.open("rb") as raw:
            if raw.peek(2)[:2] == _GZIP:
                with gzip.GzipFile(fileobj=raw) as packed:
                    return packed.read(most)
            return raw.read(most)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError("is cut off or damaged: it cannot be unpacked to its end", file=path) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=path) from None
