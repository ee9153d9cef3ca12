"""Python entry point of one collective on an idle cluster: `collective`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from simulator.cluster import Cluster, build_cluster
from simulator.config.catalog import names
from simulator.config.cluster import load_cluster
from simulator.config.profile import check_gpu, check_one_vendor, load_profile
from simulator.config.section import is_whole
from simulator.config.stack import check_stack, load_stack
from simulator.costs import Costs
from simulator.errors import InputError, located
from simulator.input_files import brief
from simulator.network.collectives import BARRIER_BYTES, algorithms, bus_factor, idle_seconds, plan
from simulator.network.moves import KINDS
from simulator.quantities import BYTES, number_of
from simulator.results import Result

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_SIZES = "8:128M"
#: Bytes of the largest message: what a 64-bit count holds.
LARGEST = 2**63 - 1
_SUFFIX = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, repr=False)
class CollectiveResult(Result):
    """Result of one collective, by size of its message.

    ``members``: ranks that take part. ``priced_by``: names of the ``calibration`` or of the ``stack``. ``links``: where
    the constants of the links come from. ``rows``: one per size, under the names of the JSON output.
    """

    command: ClassVar[str] = "collective"

    op: str
    cluster: Cluster
    members: tuple[int, ...]
    priced_by: Mapping[str, str | None]
    links: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]

    @property
    def warnings(self) -> list[str]:
        """Notes on the cluster."""
        return list(self.cluster.spec.warnings)

    def content(self) -> dict[str, Any]:
        """Return the figures under the names of the JSON output, SI units."""
        place = {"cluster": self.cluster.name, "nodes": self.cluster.n_nodes, "n_ranks": len(self.members)}
        rows, links = [dict(row) for row in self.rows], [dict(link) for link in self.links]
        return {"op": self.op, **place, **self.priced_by, "links": links, "rows": rows}

    @property
    def title(self) -> str:
        """Line on what takes part where, and whose figures the times rest on."""
        by = ", ".join(f"{kind} {name}" for kind, name in self.priced_by.items() if name)
        place = f"{self.cluster.n_nodes} x {self.cluster.name}"
        return f"{self.op} of {len(self.members)} GPUs on {place}, {by}"

    def table(self) -> pd.DataFrame:
        """Return a row per size: bytes, algorithm, protocol, channels, seconds, algbw and busbw (bytes/s)."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def __repr__(self) -> str:
        """Return the title and the table."""
        return f"{self.title}\n{self.table().to_string(index=False)}"


def collective(
    cluster: str | Path | Mapping[str, Any],
    op: str,
    *,
    nodes: int | None = None,
    sizes: str | Sequence[int] | None = None,
    algorithm: str = "auto",
    ranks: Sequence[int] | None = None,
    calibration: str | None = None,
    stack: str | None = None,
) -> CollectiveResult:
    """Time collective ``op`` on an idle ``cluster``: a file, a shipped name or a mapping.

    ``nodes``: of the cluster [as its file]. ``sizes``: bytes, or a text such as ``8:128M`` or ``1M,64M``. ``ranks``:
    GPUs that take part [all]. ``calibration``: a profile [that of each GPU]. ``stack``: what carries collectives [the
    profile's transports]. Raises `InputError` on what cannot be used.
    """
    algorithms(op)
    if op == "barrier" and sizes is not None:
        raise InputError("a barrier has no size", file="sizes", found=str(sizes), fix="leave them out")
    messages = [int(BARRIER_BYTES)] if op == "barrier" else _messages(DEFAULT_SIZES if sizes is None else sizes)
    spec = load_cluster(cluster, nodes=nodes)
    with located(lambda key: (cluster if isinstance(cluster, str | Path) else "cluster", key)):
        built = build_cluster(spec)
    members = _members(ranks, len(built.gpus))
    costs, figures, like = _costs(built.gpu_types(members), calibration, stack)
    rows, kinds = _times(op, messages, members, built, costs, algorithm)
    return CollectiveResult(op, built, tuple(members), figures, _origins(costs, like, kinds), rows)


def _messages(sizes: str | Sequence[int]) -> list[int]:
    """Return the bytes of each message. Raises `InputError`."""
    if isinstance(sizes, str):
        return parse_sizes(sizes)
    if not isinstance(sizes, Iterable):
        raise InputError("must be a text or a list", file="sizes", found=brief(sizes), allowed="'8:128M', or [8, 1024]")
    return [_size(str(size), str(sizes)) for size in sizes]


def _members(ranks: Sequence[int] | None, n_ranks: int) -> list[int]:
    """Return the ranks that take part, of so many. Raises `InputError`."""
    asked = range(n_ranks) if ranks is None else ranks
    if not isinstance(asked, Iterable) or not all(map(is_whole, asked)):
        raise InputError("must be a list of whole numbers", file="ranks", found=brief(ranks), allowed="such as [0, 8]")
    members = sorted(map(int, set(asked)))
    if members and not 0 <= members[0] <= members[-1] < n_ranks:
        allowed = f"0 to {n_ranks - 1}"
        raise InputError("names a rank that does not exist", file="ranks", found=str(members), allowed=allowed)
    if len(members) < 2:
        listed = ", ".join(map(str, members))
        raise InputError("needs at least two ranks", file="ranks", found=listed, allowed=f"of 0 to {n_ranks - 1}")
    return members


def _times(
    op: str, messages: Sequence[int], members: list[int], cluster: Cluster, costs: Costs, algorithm: str
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return a row for each size of a message, and the kinds of the links that the collective crosses."""
    rows: list[dict[str, Any]] = []
    kinds: set[str] = set()
    for nbytes in messages:
        chosen = plan(op, nbytes, members, cluster, costs, algorithm)
        seconds = idle_seconds(chosen, cluster, costs)
        for phase in chosen.phases:
            kinds |= {KINDS[kind] for kind in np.unique(cluster.kinds[phase.columns[0]]).tolist()}
        rows.append(
            {
                "size_bytes": nbytes,
                "algorithm": chosen.algorithm,
                "protocol": chosen.protocol,
                "channels": chosen.channels,
                "time_s": seconds,
                "algbw_Bps": nbytes / seconds,
                "busbw_Bps": nbytes / seconds * bus_factor(op, len(members)),
            }
        )
    return rows, kinds


def _origins(costs: Costs, like: Mapping[str, str | None], kinds: Set[str]) -> list[dict[str, Any]]:
    """Return the origin of the constants of these kinds of link, by type of GPU."""
    rows = []
    for gpu, type_costs in (costs.by_type or {costs.gpu: costs}).items():
        for kind in sorted(kinds, key=list(type_costs.transports).index):
            transport = type_costs.transport(kind)
            origin = {
                "kind": transport.kind,
                "source": type_costs.sources.get(transport.source, transport.source),
                "note": transport.note,
            }
            rows.append({"gpu": gpu, "like": like[gpu], "link": kind, **origin})
    return rows


def _costs(
    types: Sequence[str], calibration: str | None, stack: str | None
) -> tuple[Costs, dict[str, str | None], dict[str, str | None]]:
    """Return costs of GPUs of these types, the calibrations' or the stack's names, and the profiles that complete them.

    Raises `InputError`.
    """
    if stack is not None:
        if calibration is not None:
            fix = "one of the two"
            raise InputError("carries collectives in place of a profile", file="stack", found=stack, fix=fix)
        network = load_stack(stack, file="stack")
        for gpu in types:
            check_stack(network, gpu, file="stack")
        return Costs.from_stack(network), {"calibration": None, "stack": network.name}, {network.gpu: None}
    if calibration is not None and len(types) > 1:
        allowed = f"ranks on one of {', '.join(types)}; each has its shipped profile without this"
        raise InputError("is of one type of GPU", file="calibration", found=calibration, allowed=allowed)
    if calibration is None:
        for gpu in set(types) - set(names("profile")):
            allowed = f"{', '.join(names('profile'))}; or ranks on these; or a calibration of your own"
            raise InputError("no calibration of this GPU is shipped", key="gpus.type", found=gpu, allowed=allowed)
    profiles = {gpu: load_profile(gpu if calibration is None else calibration, file="calibration") for gpu in types}
    for gpu, profile in profiles.items():
        check_gpu(profile, gpu, file="calibration")
    check_one_vendor(profiles, file="cluster", key="groups")
    named = ", ".join(profile.name for profile in profiles.values())
    like = {gpu: profile.like for gpu, profile in profiles.items()}
    return Costs.from_profiles(profiles), {"calibration": named, "stack": None}, like


def parse_sizes(text: str) -> list[int]:
    """Bytes of ``FIRST:LAST``, ``FIRST:LAST:FACTOR`` (from first to last, each a multiple of the one before [2]) or a
    list joined by commas; K, M, G, T are powers of 1024, and KB, MiB as in files. Raises `InputError`.

    >>> parse_sizes("8:64"), parse_sizes("1K:1M:32"), parse_sizes("8,16G"), parse_sizes("25MiB,25MB")
    ([8, 16, 32, 64], [1024, 32768, 1048576], [8, 17179869184], [26214400, 25000000])
    """
    if ":" not in text:
        return [_size(part, text) for part in text.split(",")]
    parts = text.split(":")
    if len(parts) > 3:
        raise _no_sizes(text)
    first, last = _size(parts[0], text), _size(parts[1], text)
    factor = _size(parts[2], text) if len(parts) == 3 else 2
    if first > last or factor < 2:
        raise _no_sizes(text)
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return sizes


def _size(part: str, text: str) -> int:
    match = re.fullmatch(r"\s*([0-9]{1,15})\s*([KMGT]?)\s*", part.upper())
    size = int(match[1]) * _SUFFIX[match[2]] if match else number_of(part, BYTES)
    if not isinstance(size, int) or not 1 <= size <= LARGEST or (match and match[1].startswith("0")):
        raise _no_sizes(text)
    return size


def _no_sizes(text: str) -> InputError:
    plain = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)  # without commas between thousands
    return InputError(
        "are no sizes",
        file="sizes",
        found=text,
        allowed="FIRST:LAST, FIRST:LAST:FACTOR or a list, such as 8:16G, 1M,64M or 25MiB,25MB, "
        "each of 1 byte to 2^63 - 1",
        fix=plain if plain != text else None,
    )
