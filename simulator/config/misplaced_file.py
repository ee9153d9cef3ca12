"""Kinds of files that stand where another kind is asked for, and the command or key that takes each."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from simulator.config.packed import unpacked
from simulator.config.script_kinds import COMMANDS, SCRIPT_KINDS
from simulator.encodings import as_utf8
from simulator.errors import InputError
from simulator.input_files import read_yaml

#: Bytes that are looked at. The list of a trace comes after its devices.
_LOOKED_AT = 1 << 20
_PARQUET = b"PAR1"
#: The first bytes of a database, and where the mark of the program is that wrote it (sqlite.org/fileformat.html, 1.3).
_SQLITE, _SQLITE_MARK = b"SQLite format 3\0", slice(68, 72)
#: The mark of databases of finished points, as ``PRAGMA application_id`` tells it.
POINTS_MARK = int.from_bytes(b"llms", "big")
#: What a page begins with.
_PAGE_STARTS = ("<!doctype html", "<html")
#: The mark of a tar archive, and its place in the first header (POSIX.1-1988); endings of archives.
_TAR, _TAR_AT, _TAR_SUFFIXES = b"ustar", 257, (".tar", ".tar.gz", ".tgz")
#: Cells of a pipeline schedule as torch.distributed.pipelining writes it.
_ACTIONS = re.compile(rb"(?:\A|[,\n])\s*\d+[FBIW]\d+\s*(?:,|\r?\n)")
_KEYS = re.compile(r"^(\w+)\s*:", re.MULTILINE)
#: Sections of which a workload file has one at least.
_OF_WORKLOADS = frozenset(("model", "training"))
#: Sections that every stack has.
_OF_STACKS = frozenset(("gpu", "fabric", "parameters"))
#: Sections that profiles alone have, of which a short one has some.
_OF_PROFILES = frozenset(("gpu_spec", "kernels", "transports"))


class FileUse(NamedTuple):
    """The kind of a file, and what takes it, with ``FILE`` in place of its name."""

    kind: str
    use: str

    def error(self, path: Path, instead_of: str = "") -> InputError:
        """Return the error of a file of this kind in a place for another."""
        message = f"is {self.kind}, not {instead_of}" if instead_of else f"is {self.kind}"
        return InputError(message, file=path, fix=self.use.replace("FILE", str(path)))


TRACE = FileUse("a trace of PyTorch's profiler", "llmsim trace show FILE")
GRAPH = FileUse("an execution trace", "llmsim trace show FILE")
TOPOLOGY = FileUse("a topology", "cluster: FILE in a workload file, or llmsim import FILE --out cluster.yaml")
WORKLOAD = FileUse("a workload file", "llmsim run FILE")
CAPTURED = FileUse("a captured model", "model: {captured: FILE} in a workload file (docs/how-to/your-model.md)")
CONFIG = FileUse("a model of Hugging Face", "model: {hf_config: FILE} in a workload file")
CLUSTER = FileUse("a cluster file", "cluster: FILE in a workload file, or llmsim topology FILE")
PROFILE = FileUse("a profile of a GPU", "calibration: FILE in a workload file")
STACK = FileUse("a stack (figures of collectives)", "stack: FILE in a workload file")
SCHEDULE = FileUse("a pipeline schedule", "parallelism: {schedule: FILE} in a workload file")
_JOB_TRACE = FileUse("a Parquet table, as the traces of whole jobs are", "llmsim trace stragglers FILE")
_ARCHIVE = FileUse("an archive", "the files in it, unpacked")
_RESULT = FileUse("a result that --json wrote", "the workload file that it came from")
_SCRIPT = FileUse("a launch script", "llmsim import FILE --out job.yaml")
_PACKED_SCRIPT = FileUse("a gzipped launch script", "gunzip FILE, then llmsim import of what it holds")
_NOTEBOOK = FileUse("a notebook", "jupyter lab FILE")
_DATABASE = FileUse("a database of finished points", "llmsim sweep WORKLOAD --grid KEY=V1,V2 --out FILE")
_OTHER_DATABASE = FileUse("a database of another program", "a profiler's trace as JSON: llmsim trace show TRACE.json")
TABLE = FileUse("a table", "llmsim validate --rows FILE for measurements, llmsim sweep WORKLOAD --list FILE for points")
_REQUESTS = FileUse("a list of requests to a model that serves", "a training job: serving is not simulated")
_WEIGHTS = FileUse(
    "weights of a model", "the config.json beside it: model: {hf_config: config.json} in a workload file"
)
_WEB_PAGE = FileUse("a web page", "a browser, which opens it")
#: Words of a JSON file. The first one in it counts.
_JSON_WORDS = (
    (b'"traceEvents"', TRACE),
    (b'"nbformat"', _NOTEBOOK),
    (b'"widest_split"', CAPTURED),
    (b'"model_type"', CONFIG),
    (b'"workload_graph"', GRAPH),
    (b'"ctrl_deps"', GRAPH),
    (b'"rf_id"', GRAPH),
    (b'"schema_version"', _RESULT),
    *((name, _REQUESTS) for name in (b'"input_length"', b'"input_toks"', b'"num_prefill_tokens"')),
)
#: Columns of such lists as tables: of Azure's traces, and of Vidur's.
_REQUEST_COLUMNS = (b"ContextTokens", b"num_prefill_tokens")
#: What files of bytes begin with, from which byte on.
_BINARY = ((_PARQUET, 0, _JOB_TRACE), (_TAR, _TAR_AT, _ARCHIVE))
_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".gguf")


def use_of(path: Path) -> FileUse | None:
    """Return what the file ``path`` is and what takes it; None where it cannot be told.

    What is in it counts before its name. A pipe is left alone, as it can be read once.
    """
    if not path.is_file():
        return None
    head = _head(path)
    if binary := next((use for start, at, use in _BINARY if head.startswith(start, at)), None):
        return binary
    if head.startswith(_SQLITE):
        return _DATABASE if int.from_bytes(head[_SQLITE_MARK], "big") == POINTS_MARK else _OTHER_DATABASE
    text = head.decode("utf-8", "replace")
    is_json = text.lstrip()[:1] in ("{", "[")
    keys = _json_keys(text) if is_json else frozenset(_KEYS.findall(text))
    if _OF_WORKLOADS & keys and not is_json:
        return WORKLOAD
    in_json = next((use for word, use in _JSON_WORDS if word in head), None) if is_json else None
    return in_json or _by_keys(keys) or _by_text(text) or _by_name(path.name.lower(), head)


def _json_keys(text: str) -> frozenset[str]:
    """Return the keys of a JSON object; none of any other text, or of one that is cut off."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(data) if isinstance(data, dict) else frozenset()


def _by_keys(keys: Collection[str]) -> FileUse | None:
    """Return what a YAML or JSON file with these ``keys`` is, where it is no workload."""
    if any(kind.matches(keys) for kind in SCRIPT_KINDS):
        return _SCRIPT
    if _OF_STACKS.issubset(keys):
        return STACK
    if _OF_PROFILES.intersection(keys):
        return PROFILE
    return CLUSTER if {"node", "groups", "fabric", "like"}.intersection(keys) else None


def _by_text(text: str) -> FileUse | None:
    if text.lstrip().lower().startswith(_PAGE_STARTS):
        return _WEB_PAGE
    from simulator.importers.reading import is_topology

    return TOPOLOGY if is_topology(text) else None


def _by_name(name: str, head: bytes) -> FileUse | None:
    """Return what the last ending of a name tells."""
    if name.endswith(_TAR_SUFFIXES):
        return _ARCHIVE
    suffix = Path(name.removesuffix(".gz")).suffix
    if suffix in (".csv", ".tsv"):
        if any(column in head.partition(b"\n")[0] for column in _REQUEST_COLUMNS):
            return _REQUESTS
        return SCHEDULE if _ACTIONS.search(head) else TABLE
    if suffix in _WEIGHT_SUFFIXES:
        return _WEIGHTS
    if suffix in COMMANDS:
        return _PACKED_SCRIPT if name.endswith(".gz") else _SCRIPT
    return GRAPH if suffix == ".et" else None


def refuse_misplaced(path: Path, wanted: str, accepted: FileUse | None = None) -> None:
    """Raise `InputError` where a file is of a kind that something else than ``wanted`` takes.

    ``accepted``: a kind that is right here.
    """
    if (use := use_of(path)) is not None and use != accepted:
        raise use.error(path, wanted) from None


@contextmanager
def expecting(wanted: FileUse, path: Path) -> Iterator[None]:
    """Say what ``path`` is, and what takes it, where reading it as ``wanted`` fails and it is of another kind."""
    try:
        yield
    except InputError:
        refuse_misplaced(path, wanted.kind, accepted=wanted)
        raise


def read_workload(path: Path) -> dict[str, Any]:
    """Return the mapping of a workload file, which is read once. Raises `InputError`, of files of other kinds too."""
    with expecting(WORKLOAD, path):
        data = read_yaml(path)
    if not _OF_WORKLOADS & data.keys():
        refuse_misplaced(path, WORKLOAD.kind)
    return data


def _head(path: Path) -> bytes:
    """Return the first bytes of a file, unpacked where it is gzipped; none where it cannot be read."""
    try:
        with unpacked(path) as content:
            return as_utf8(content.read(_LOOKED_AT))
    except InputError:
        return b""
