"""Kinds of files that stand where another kind is asked for, and the command or key that takes each."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from simulator.config.packed import unpacked
from simulator.config.script_kinds import COMMANDS, SCRIPT_KINDS
from simulator.errors import InputError
from simulator.importers import is_topology
from simulator.input_files import read_yaml

#: Bytes that are looked at. The list of a trace comes after its devices.
_LOOKED_AT = 1 << 20
_PARQUET = b"PAR1"
#: The mark of a tar archive, and its place in the first header (POSIX.1-1988); endings of archives.
_TAR, _TAR_AT, _TAR_SUFFIXES = b"ustar", 257, (".tar", ".tar.gz", ".tgz")
#: Cells of a pipeline schedule as torch.distributed.pipelining writes it.
_ACTIONS = re.compile(rb"(?:\A|[,\n])\s*\d*[FBIW]\d+\s*(?:,|\r?\n)")
_KEYS = re.compile(r"^(\w+)\s*:", re.MULTILINE)
#: Sections of which a workload file has one at least.
_OF_WORKLOADS = frozenset(("model", "training"))


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
_JOB_TRACE = FileUse("a Parquet table, as the traces of whole jobs are", "llmsim trace stragglers FILE")
_ARCHIVE = FileUse("an archive", "the files in it, unpacked")
_CAPTURED = FileUse("a captured model", "model: {captured: FILE} in a workload file (docs/how-to/your-model.md)")
_CONFIG = FileUse("a model of Hugging Face", "model: {hf_config: FILE} in a workload file")
_RESULT = FileUse("a result that --json wrote", "the workload file that it came from")
_SCRIPT = FileUse("a launch script", "llmsim import FILE --out job.yaml")
_CLUSTER = FileUse("a cluster file", "cluster: FILE in a workload file, or llmsim topology FILE")
_PROFILE = FileUse("a profile of a GPU", "calibration: FILE in a workload file")
_SCHEDULE = FileUse("a pipeline schedule", "parallelism: {schedule: FILE} in a workload file")
#: Words of a JSON file. The first one in it counts.
_JSON_WORDS = (
    (b'"traceEvents"', TRACE),
    (b'"widest_split"', _CAPTURED),
    (b'"model_type"', _CONFIG),
    (b'"ctrl_deps"', GRAPH),
    (b'"rf_id"', GRAPH),
    (b'"schema_version"', _RESULT),
)


def use_of(path: Path) -> FileUse | None:
    """Return what the file ``path`` is and what takes it; None where it may be a workload, or cannot be told.

    What is in it counts before its name. A pipe is left alone, as it can be read once.
    """
    if not path.is_file():
        return None
    head = _head(path)
    if head.startswith(_PARQUET):
        return _JOB_TRACE
    if head.startswith(_TAR, _TAR_AT):
        return _ARCHIVE
    text = head.decode("utf-8", "replace")
    is_json = text.lstrip()[:1] in ("{", "[")
    keys = _json_keys(text) if is_json else frozenset(_KEYS.findall(text))
    if _OF_WORKLOADS & keys and not is_json:
        return None
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
    if {"node", "groups", "fabric", "like"} & set(keys):
        return _CLUSTER
    return _PROFILE if "gpu_spec" in keys else None


def _by_text(text: str) -> FileUse | None:
    return TOPOLOGY if is_topology(text) else None


def _by_name(name: str, head: bytes) -> FileUse | None:
    """Return what the last ending of a name tells."""
    if name.endswith(_TAR_SUFFIXES):
        return _ARCHIVE
    suffix = Path(name.removesuffix(".gz")).suffix
    if suffix == ".csv":
        return _SCHEDULE if _ACTIONS.search(head) else None
    return _SCRIPT if suffix in COMMANDS else GRAPH if suffix == ".et" else None


def refuse_misplaced(path: Path, wanted: str, accepted: FileUse | None = None) -> None:
    """Raise `InputError` where a file is of a kind that something else than ``wanted`` takes.

    ``accepted``: a kind that is right here.
    """
    if (use := use_of(path)) is not None and use != accepted:
        raise use.error(path, wanted)


def read_workload(path: Path) -> dict[str, Any]:
    """Return the mapping of a workload file, which is read once. Raises `InputError`, of files of other kinds too."""
    wanted = "a workload file"
    try:
        data = read_yaml(path)
    except InputError:
        refuse_misplaced(path, wanted)
        raise
    if not _OF_WORKLOADS & data.keys():
        refuse_misplaced(path, wanted)
    return data


def _head(path: Path) -> bytes:
    """Return the first bytes of a file, unpacked where it is gzipped; none where it cannot be read."""
    try:
        with unpacked(path) as content:
            return content.read(_LOOKED_AT)
    except InputError:
        return b""
