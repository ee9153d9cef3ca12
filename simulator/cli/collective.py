"""``collective``: how long one collective takes on an idle cluster, as nccl-tests would print it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from simulator.cli.options import ClusterNodes, Json, Quiet, parse_ranks
from simulator.cli.outputs import STDOUT, check_outputs, write_json
from simulator.cli.terminal import show, table, warn
from simulator.errors import InputError
from simulator.output.envelope import envelope

if TYPE_CHECKING:
    from simulator.cluster import Cluster
    from simulator.costs import Costs

DEFAULT_SIZES = "8:128M"
#: Bytes of the largest message: what a 64-bit count holds.
LARGEST = 2**63 - 1
_SUFFIX = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

#: What else there is to say of an operation's algorithm.
_MEANING = {
    "send_recv": ": every rank sends to the next one of a ring",
    "send": ": the first of two ranks to the other",
}


class Command(TyperCommand):
    """Its help ends with the algorithms of every operation, in as many columns as there are."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # of click's classes, which typer keeps to itself
        from simulator.network.collectives import OPERATIONS

        lines = []
        for op, entry in OPERATIONS.items():
            not_nccl = [name for name in entry.algorithms if name not in entry.nccl]
            lines.append((op, " ".join([*entry.nccl, *(["|", *not_nccl] if not_nccl else [])]) + _MEANING.get(op, "")))
        with formatter.section("Algorithms: NCCL's, of which auto takes one, and after the bar others"):
            formatter.write_dl(lines)


ClusterName = Annotated[str, typer.Option("--cluster", metavar="C", help="A file, or a name in topologies/.")]
OperationName = Annotated[
    str, typer.Option("--op", metavar="OP", help="all_reduce, all_gather ...; see `list collectives`.")
]
MessageSizes = Annotated[
    str | None,
    typer.Option(
        "--sizes", metavar="SIZES", help=f"FIRST:LAST[:FACTOR], or sizes joined by commas [{DEFAULT_SIZES}]; G = 2^30."
    ),
]
AlgorithmName = Annotated[
    str,
    typer.Option("--algorithm", metavar="A", help="ring, tree ..., or auto: NCCL's fastest; see `list collectives`."),
]
RankList = Annotated[str, typer.Option("--ranks", metavar="RANKS", help="GPUs that take part, such as 0-7,16.")]
ProfileName = Annotated[
    str | None, typer.Option("--calibration", metavar="PROFILE", help="A profile [that of the cluster's GPU].")
]
StackName = Annotated[
    str | None,
    typer.Option(
        "--stack", metavar="STACK", help="What carries collectives, as `list stacks` [the profile's transports]."
    ),
]


def command(
    cluster: ClusterName,
    op: OperationName,
    nodes: ClusterNodes = None,
    sizes: MessageSizes = None,
    algorithm: AlgorithmName = "auto",
    ranks: RankList = "all",
    calibration: ProfileName = None,
    stack: StackName = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Print the table of nccl-tests for a collective on its own.

    The collective has the cluster to itself.

    Sizes, algbw and busbw mean what they mean there; times are on the GPU's stream, without the host's launch.

    The table names the algorithm and the protocol that were chosen. It counts the channels (rings, trees, heads of
    NVLink SHARP) whose routes differ. NCCL runs several channels on each route; behind an NVSwitch all rings are alike.

    A line below the table says where the constants of the links come from: measured on this GPU, published, or
    assumed.

    \b
    Examples:
      llmsim collective --cluster dgx_a100 --nodes 2 --op all_reduce
      llmsim collective --cluster dgx_h100 --op all_to_all --sizes 1M:1G
    """
    from simulator.cluster import build_cluster
    from simulator.config.cluster import load_cluster
    from simulator.errors import located
    from simulator.network.collectives import BARRIER_BYTES, algorithms

    algorithms(op)
    if op == "barrier" and sizes is not None:
        raise InputError("a barrier has no size", file="--sizes", found=sizes, fix="leave --sizes out")
    messages = [int(BARRIER_BYTES)] if op == "barrier" else parse_sizes(DEFAULT_SIZES if sizes is None else sizes)
    spec = load_cluster(cluster, nodes=nodes)
    with located(lambda key: (cluster, key)):
        built = build_cluster(spec)
    members = _members(ranks, len(built.gpus))
    check_outputs({"--json": json})
    costs, figures, like = _costs(built.gpu_types(members), calibration, stack)
    rows, kinds = _times(op, messages, members, built, costs, algorithm)
    links = _origins(costs, like, kinds)
    place = {"cluster": built.name, "nodes": built.n_nodes, "n_ranks": len(members)}
    write_json(json, envelope("collective", built.spec.warnings, op=op, **place, **figures, links=links, rows=rows))
    warn(built.spec.warnings)
    if quiet or json == STDOUT:
        return
    by = ", ".join(f"{kind} {name}" for kind, name in figures.items() if name)
    title = f"{op} of {len(members)} GPUs on {built.n_nodes} x {built.name}, {by}"
    show(table([_shown(row) for row in rows], title), *_trust(links))


def _members(ranks: str, n_ranks: int) -> list[int]:
    """Return the ranks that take part, of so many. Raises `InputError`."""
    members = parse_ranks(ranks, n_ranks, "--ranks")
    if len(members) < 2:
        raise InputError("needs at least two ranks", file="--ranks", found=ranks, allowed=f"of 0 to {n_ranks - 1}")
    return members


def _times(
    op: str, messages: Sequence[int], members: list[int], cluster: Cluster, costs: Costs, algorithm: str
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return a row for each size of a message, and the kinds of the links that the collective crosses."""
    from simulator.network.collectives import bus_factor, idle_seconds, plan

    rows: list[dict[str, Any]] = []
    kinds: set[str] = set()
    for nbytes in messages:
        chosen = plan(op, nbytes, members, cluster, costs, algorithm)
        seconds = idle_seconds(chosen, cluster, costs)
        kinds |= {cluster.links[link].kind for phase in chosen.phases for link, _ in phase.loads}
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


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as the terminal shows it."""
    return {
        "size (B)": row["size_bytes"],
        "time (us)": round(row["time_s"] * 1e6, 2),
        "algbw (GB/s)": round(row["algbw_Bps"] / 1e9, 2),
        "busbw (GB/s)": round(row["busbw_Bps"] / 1e9, 2),
        "algorithm": row["algorithm"],
        "protocol": row["protocol"],
        "channels (unlike)": row["channels"],
    }


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


def _trust(links: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per type of GPU: the origins of the constants that the times rest on."""
    for (gpu, like), rows in groupby(links, itemgetter("gpu", "like")):
        kinds = ", ".join(f"{row['link']} {row['kind']}" for row in rows)
        rest = f"; what its profile lacks is as on {like}" if like else ""
        yield f"Constants of links on {gpu}: {kinds}{rest}."


def _costs(
    types: Sequence[str], calibration: str | None, stack: str | None
) -> tuple[Costs, dict[str, str | None], dict[str, str | None]]:
    """Return costs of GPUs of these types, the calibrations' or the stack's names, and the profiles that complete them.

    Raises `InputError`.
    """
    from simulator.config.catalog import names
    from simulator.config.profile import check_gpu, check_one_vendor, load_profile
    from simulator.config.stack import check_stack, load_stack
    from simulator.costs import Costs

    if stack is not None:
        if calibration is not None:
            fix = "one of the two"
            raise InputError("carries collectives in place of a profile", file="--stack", found=stack, fix=fix)
        network = load_stack(stack, file="--stack")
        for gpu in types:
            check_stack(network, gpu, file="--stack")
        return Costs.from_stack(network), {"calibration": None, "stack": network.name}, {network.gpu: None}
    if calibration is not None and len(types) > 1:
        allowed = f"ranks on one of {', '.join(types)}; each has its shipped profile without the option"
        raise InputError("is of one type of GPU", file="--calibration", found=calibration, allowed=allowed)
    if calibration is None:
        for gpu in set(types) - set(names("profile")):
            allowed = f"{', '.join(names('profile'))}; or ranks on these; or --calibration PROFILE of your own"
            raise InputError("no calibration of this GPU is shipped", key="gpus.type", found=gpu, allowed=allowed)
    profiles = {gpu: load_profile(gpu if calibration is None else calibration, file="--calibration") for gpu in types}
    for gpu, profile in profiles.items():
        check_gpu(profile, gpu, file="--calibration", key="calibration")
    check_one_vendor(profiles, file="--cluster", key="groups")
    named = ", ".join(profile.name for profile in profiles.values())
    like = {gpu: profile.like for gpu, profile in profiles.items()}
    return Costs.from_profiles(profiles), {"calibration": named, "stack": None}, like


def parse_sizes(text: str) -> list[int]:
    """Bytes of ``FIRST:LAST``, ``FIRST:LAST:FACTOR`` (from first to last, each a multiple of the one before [2]) or a
    list joined by commas; K, M, G, T are powers of 1024. Raises `InputError`.

    >>> parse_sizes("8:64"), parse_sizes("1K:1M:32"), parse_sizes("8,16G")
    ([8, 16, 32, 64], [1024, 32768, 1048576], [8, 17179869184])
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
    match = re.fullmatch(r"\s*(\d{1,15})\s*([KMGT]?)\s*", part.upper())
    size = int(match[1]) * _SUFFIX[match[2]] if match else 0
    if not 1 <= size <= LARGEST:
        raise _no_sizes(text)
    return size


def _no_sizes(text: str) -> InputError:
    return InputError(
        "are no sizes",
        file="--sizes",
        found=text,
        allowed="FIRST:LAST, FIRST:LAST:FACTOR or a list, such as 8:16G or 1M,64M, each of 1 byte to 2^63",
    )
