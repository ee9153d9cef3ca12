"""Kinds of files that stand where another kind is asked for, and the command or key that takes each."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from simulator.errors import InputError

#: Bytes that are looked at. The list of a trace comes after its devices.
_LOOKED_AT = 1 << 20
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
#: Cells of a pipeline schedule as torch.distributed.pipelining writes it.
_ACTIONS = re.compile(rb"(?:\A|[,\n])\s*\d*[FBIW]\d+\s*(?:,|\r?\n)")
_KEYS = re.compile(r"^(\w+)\s*:", re.MULTILINE)


class FileUse(NamedTuple):
    """The kind of a file, and what takes it, with ``FILE`` in place of its name."""

    kind: str
    use: str


_TRACE = FileUse("a trace of PyTorch's profiler", "llmsim trace show FILE")
_GRAPH = FileUse("an execution trace", "llmsim trace show FILE")
_JOB_TRACE = FileUse("a Parquet table, as the traces of whole jobs are", "llmsim trace stragglers FILE")
_ARCHIVE = FileUse("an archive", "the files in it, unpacked")
_CAPTURED = FileUse("a captured model", "model: {captured: FILE} in a workload file (docs/how-to/your-model.md)")
_CONFIG = FileUse("a model of Hugging Face", "model: {hf_config: FILE} in a workload file")
_RESULT = FileUse("a result that --json wrote", "the workload file that it came from")
_SCRIPT = FileUse("a launch script", "llmsim import FILE --out job.yaml")
_TOPOLOGY = FileUse("a topology", "cluster: FILE in a workload file, or llmsim import FILE --out cluster.yaml")
_CLUSTER = FileUse("a cluster file", "cluster: FILE in a workload file, or llmsim topology FILE")
_PROFILE = FileUse("a profile of a GPU", "calibration: FILE in a workload file")
_SCHEDULE = FileUse("a pipeline schedule", "parallelism: {schedule: FILE} in a workload file")
_BY_SUFFIX = {
    ".sh": _SCRIPT, ".toml": _SCRIPT, ".py": _SCRIPT, ".xml": _TOPOLOGY, ".conf": _TOPOLOGY, ".et": _GRAPH,
}  # fmt: skip
#: Words of a JSON file. The first one in it counts.
_JSON_WORDS = (
    (b'"traceEvents"', _TRACE),
    (b'"widest_split"', _CAPTURED),
    (b'"model_type"', _CONFIG),
    (b'"ctrl_deps"', _GRAPH),
    (b'"rf_id"', _GRAPH),
    (b'"schema_version"', _RESULT),
)
#: Keys of a YAML file that is no workload.
_YAML_KEYS = (
    ({"node", "groups", "fabric", "like"}, _CLUSTER),
    ({"gpu_spec"}, _PROFILE),
    ({"base_model", "model_name_or_path", "compute_environment"}, _SCRIPT),
)


def use_of(path: Path) -> FileUse | None:
    """Return what the file ``path`` is and what takes it; None where it may be a workload, or cannot be told."""
    head = _head(path)
    if head.startswith(_PARQUET):
        return _JOB_TRACE
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".tgz"] or ".tar" in suffixes or head[257:262] == b"ustar":
        return _ARCHIVE
    use = next((_BY_SUFFIX[suffix] for suffix in reversed(suffixes) if suffix in _BY_SUFFIX), None)
    if use is None and head.lstrip()[:1] in (b"{", b"["):
        return next((use for word, use in _JSON_WORDS if word in head), None)
    if use is None and suffixes[-1:] == [".csv"]:
        return _SCHEDULE if _ACTIONS.search(head) else None
    if use is None:
        keys = set(_KEYS.findall(head.decode("utf-8", "replace")))
        return None if {"model", "training"} & keys else next((use for names, use in _YAML_KEYS if names & keys), None)
    return use


def refuse_misplaced(path: Path, wanted: str) -> None:
    """Raise `InputError` where a file is of a kind that something else than ``wanted`` takes."""
    if (use := use_of(path)) is not None:
        raise InputError(f"is {use.kind}, not {wanted}", file=path, fix=use.use.replace("FILE", str(path)))


def _head(path: Path) -> bytes:
    """Return the first bytes of a file, unpacked where it is gzipped; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
        with gzip.open(path) if packed else path.open("rb") as content:
            return content.read(_LOOKED_AT)
    except (OSError, EOFError, zlib.error):
        return b""
