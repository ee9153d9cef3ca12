"""The suite of published collectives: rows of nccl-tests and the like as operations on a cluster with a stack.

Columns are those of ``data/collectives.csv``, and a user's table has the same. Where the table of aliases
(``data/collectives-hardware.yaml``) lacks the text of ``hardware``, a row may name ``cluster`` and ``stack``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from simulator.bounds import MAX_GPUS
from simulator.config.cluster import load_cluster
from simulator.config.section import Section
from simulator.config.stack import load_stack
from simulator.config.validation import validated
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.hardware.stack import Stack
from simulator.input_files import read_yaml
from simulator.units import GiB
from simulator.validation.rows import Row, UnsupportedError, number
from simulator.validation.suites import DATA
from simulator.validation.tables import read_table, unknown

NAME = "collectives"
ABOUT = "Published curves of nccl-tests, rccl-tests and DeepEP: V100 to GB300 and MI355X, 2 to 1440 GPUs"
TABLE = DATA / "collectives.csv"
HARDWARE = DATA / "collectives-hardware.yaml"
#: What is scored apart, in the order of the tables; the score of the suite is that of the first.
PARTS = ("collectives", "expert exchange", "point to point", "copies")
_NEEDED = ("id", "op", "size", "n_gpus", "nodes", "algbw", "busbw", "latency_us", "hardware")
_KNOWN = (*_NEEDED, "algo", "notes", "cluster", "stack")
#: Operation as measured -> as the simulator calls it, and the part that it belongs to.
OPS = {
    "all_reduce": ("all_reduce", PARTS[0]),
    "all_gather": ("all_gather", PARTS[0]),
    "reduce_scatter": ("reduce_scatter", PARTS[0]),
    "alltoall": ("all_to_all", PARTS[0]),
    "all_to_all": ("all_to_all", PARTS[0]),
    "broadcast": ("broadcast", PARTS[0]),
    "reduce": ("reduce", PARTS[0]),
    "gather": ("gather", PARTS[0]),
    "scatter": ("scatter", PARTS[0]),
    "ep_dispatch": ("all_to_all", PARTS[1]),
    "ep_combine": ("all_to_all", PARTS[1]),
    "p2p": ("send", PARTS[2]),
    "sendrecv": ("send_recv", PARTS[2]),
    "p2p_latency": ("send", PARTS[2]),
    "hd_copy": ("to_host", PARTS[3]),
}
#: Algorithm as a row forces it, in lower case, -> as the simulator calls it.
ALGORITHMS = {
    "": "auto",
    "auto": "auto",
    "ring": "ring",
    "tree": "tree",
    "nvls": "nvls",
    "nvlstree": "nvls_tree",
    "nvls disabled": "ring",
    "sharp": "collnet",
    "sharp/collnet per manifest": "collnet",
    "low-latency kernels": "auto",
    "normal kernels": "auto",
}
#: What a test of bandwidth that names no size is taken to send.
UNTOLD_SIZE_BYTES = 1 * GiB
#: Messages are smaller: what a 64-bit count holds.
LARGEST_BYTES = 2**63
#: Bytes of an element, and of an FP8 token's scales: one float32 per 128 elements (DeepEP).
_EXPERT_BYTES = {"FP8": 1 + 4 / 128, "BF16": 2.0}
_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


class Alias(Section):
    """Cluster and stack of one kind of hardware. The first alias whose patterns match a row's text is taken."""

    hardware: str
    """regular expression, without regard to case"""
    notes: str = ""
    """another one, of the notes: what tells software on equal hardware apart"""
    cluster: str = ""
    """a key of the table's ``clusters``, or a name in topologies/"""
    lacks: str = ""
    """why there is none"""
    stack: str | None = None
    """a name in calibration/stacks/ [the profile of the cluster's GPU]"""
    op: str | None = None
    """what the row does, where its column does not tell the direction"""
    domain: bool = False
    """whether a node of the cluster is a whole NVLink domain, of which the row counts the trays"""


class Aliases(Section):
    """The table of aliases. ``clusters`` are mappings as in a cluster file, for machines that are not shipped."""

    clusters: dict[str, dict[str, Any]]
    aliases: list[Alias]


@dataclass(frozen=True)
class CollectiveCase:
    """A row as an operation: ``ranks`` of ``cluster`` on ``nbytes``, nccl-tests' size, with ``algorithm``, forced or
    ``auto``; ``stack`` is None where the profile of the cluster's GPU counts. ``hardware``: the cluster as the table of
    aliases calls it. ``part`` is one of `PARTS`. Of copies the one rank is the GPU."""

    op: str
    nbytes: float
    ranks: tuple[int, ...]
    algorithm: str
    cluster: ClusterSpec
    hardware: str
    stack: Stack | None
    part: str

    @property
    def fitted_on(self) -> bool:
        """True where the stack was fitted on rows of so many GPUs."""
        fitted = self.stack.fitted if self.stack else None
        return fitted is not None and fitted.n_gpus == len(self.ranks)


def measurements(path: Path = TABLE) -> list[dict[str, str]]:
    """The rows of a table of collectives. Raises `InputError`."""
    return read_table(path, _NEEDED, _KNOWN, reference=str(TABLE))


def labels(rows: Sequence[Row]) -> list[str]:
    """Columns of a table of collectives that nothing reads, beside the labels of the shipped tables."""
    return unknown(rows[0], _KNOWN)


def measured_s(row: Row) -> float:
    """The printed time, or size / algbw. Raises `UnsupportedError` where the row has neither."""
    if row.get("latency_us"):
        return number(row, "latency_us") * 1e-6
    if row.get("algbw"):
        return size_bytes(row) / (number(row, "algbw") * 1e9)
    raise UnsupportedError("has neither a latency nor an algbw")


def printed_busbw_Bps(row: Row) -> float | None:
    """Return the bus bandwidth that the row prints; None for a small message's rounded 0.00.

    Raises `UnsupportedError` where the text is no number.
    """
    text = row.get("busbw", "").strip()
    return number(row, "busbw") * 1e9 if text.strip("0.") else None


def size_bytes(row: Row) -> float:
    """Bytes of the message; of an exchange of experts, what one rank sends or gets in all.

    Raises `UnsupportedError`.
    """
    text = row.get("size", "")
    if not text and row["op"] in ("p2p", "hd_copy"):
        return UNTOLD_SIZE_BYTES
    tokens = re.match(r"(\d+) tokens x (\d+) hidden.*, top-(\d+).*, (FP8|BF16)$", text)
    if tokens:
        return int(tokens[1]) * int(tokens[2]) * int(tokens[3]) * _EXPERT_BYTES[tokens[4]]
    plain = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*(?:([KMG]?)B)?", text, flags=re.IGNORECASE)
    nbytes = float(plain[1]) * _SUFFIXES[(plain[2] or "").upper()] if plain else 0.0
    if 0 < nbytes < LARGEST_BYTES:
        return nbytes
    raise UnsupportedError(f"size {text!r} is no number of bytes above 0 and below 2^63")


def case_of(row: Row) -> CollectiveCase:
    """The operation of a row. Raises `UnsupportedError` or `InputError` with the reason why it cannot be simulated."""
    op, part = _looked_up(row, "op", OPS)
    if "bidirectional" in row.get("notes", ""):
        raise UnsupportedError("adds up both directions")
    alias = alias_of(row)
    algorithm = _looked_up(row, "algo", ALGORITHMS)
    n_gpus = _whole(row, "n_gpus")
    spec = cluster_of(alias.cluster)
    in_a_node = spec.gpus_per_node
    stated_nodes = "" if alias.domain else row["nodes"]
    nodes = _whole(row, "nodes") if stated_nodes else -(-n_gpus // in_a_node)
    if n_gpus < 2 and op != "to_host":
        raise UnsupportedError("one GPU has nobody to send to")
    each, rest = divmod(n_gpus, nodes)
    if rest or each > in_a_node:
        raise UnsupportedError(f"{n_gpus} GPUs are not spread evenly over {nodes} nodes of {in_a_node}")
    return CollectiveCase(
        op=alias.op or op,
        nbytes=size_bytes(row),
        ranks=tuple([node * in_a_node + gpu for node in range(nodes) for gpu in range(each)]),
        algorithm=algorithm,
        cluster=replace(spec, nodes=nodes),
        hardware=alias.cluster,
        stack=load_stack(alias.stack) if alias.stack else None,
        part=part,
    )


def alias_of(row: Row) -> Alias:
    """Return the alias of the row's hardware.

    Raises `UnsupportedError` where there is none, or the hardware cannot be simulated.
    """
    if row.get("cluster"):
        return Alias(hardware="", cluster=row["cluster"], stack=row.get("stack") or None)
    for alias in aliases().aliases:
        if re.search(alias.hardware, row["hardware"], re.IGNORECASE) and re.search(alias.notes, row.get("notes", "")):
            if alias.lacks:
                raise UnsupportedError(f"hardware {row['hardware']!r}: {alias.lacks}")
            return alias
    raise UnsupportedError(f"hardware {row['hardware']!r} is not in the table of aliases")


@lru_cache(maxsize=1)
def aliases() -> Aliases:
    """The checked-in table."""
    return validated(Aliases, read_yaml(HARDWARE), HARDWARE)


@lru_cache(maxsize=64)
def cluster_of(name: str) -> ClusterSpec:
    """Return the cluster that the table of aliases calls ``name``, else the cluster file of that name or path.

    Raises `InputError`.
    """
    return load_cluster(aliases().clusters.get(name, name))


def _looked_up(row: Row, column: str, entries: Mapping[str, Any]) -> Any:
    text = row.get(column, "").lower()
    if text not in entries:
        raise UnsupportedError(f"{column} {row.get(column)!r} is not simulated yet")
    return entries[text]


def _whole(row: Row, column: str) -> int:
    value = number(row, column)
    if value != int(value) or value > MAX_GPUS:
        raise UnsupportedError(f"{column} {row[column]!r} is not a whole number up to {MAX_GPUS:,}")
    return int(value)
