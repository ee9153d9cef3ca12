"""``collective``: how long one collective takes on an idle cluster, as nccl-tests would print it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any

import typer

from simulator.cli.options import ClusterNodes, Command, Json, Quiet, options_named, parse_ranks
from simulator.cli.outputs import check_outputs, tell
from simulator.cli.terminal import table

#: What else there is to say of an operation's algorithm.
_MEANING = {
    "send_recv": ": every rank sends to the next one of a ring",
    "send": ": the first of two ranks to the other",
}


class CommandWithAlgorithms(Command):
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
    typer.Option("--sizes", metavar="SIZES", help="FIRST:LAST[:FACTOR], or sizes joined by commas [8:128M]; G = 2^30."),
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
    from simulator.commands.collective import collective
    from simulator.config.cluster import load_cluster

    check_outputs({"--json": json})
    members = None if ranks == "all" else parse_ranks(ranks, load_cluster(cluster, nodes=nodes).n_gpus, "--ranks")
    with options_named("cluster", "sizes", "ranks", "calibration", "stack"):
        result = collective(
            cluster,
            op,
            nodes=nodes,
            sizes=sizes,
            algorithm=algorithm,
            ranks=members,
            calibration=calibration,
            stack=stack,
        )
    tell(
        result.report,
        lambda _: (table([_shown(row) for row in result.rows], result.title), *_trust(result.links)),
        json,
        quiet,
    )


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


def _trust(links: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per type of GPU: the origins of the constants that the times rest on."""
    for (gpu, like), rows in groupby(links, itemgetter("gpu", "like")):
        kinds = ", ".join(f"{row['link']} {row['kind']}" for row in rows)
        rest = f"; what its profile lacks is as on {like}" if like else ""
        yield f"Constants of links on {gpu}: {kinds}{rest}."
