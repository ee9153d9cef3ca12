"""Measure kernels, copies, host launch costs, collectives and their interference on this machine's GPUs.

Results are lines of JSON in DIR/measurements.jsonl, appended as they come; a run that was interrupted goes on where it
stopped.
Under torchrun the ranks that it gives are used, on one node or several; otherwise --gpus processes are started here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

from calibration.folders import folder
from calibration.measure import ranks
from calibration.measure.case import KINDS
from calibration.measure.store import ResultRows
from simulator.errors import InputError

SHOWN = 20  # reasons of failures that are printed; all are in the file
EXAMPLE = """examples:
  python -m calibration measure --gpus 4 --out h100 --full
  python -m calibration measure --gpus 8 --out h100 --full \\
      --only collective,interference --groups 4,8
  torchrun --nnodes 2 --nproc-per-node 8 \\
      --rdzv-endpoint HOST:29500 --rdzv-backend c10d \\
      -m calibration measure --out h100 --only collective,interference"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ranks.add_arguments(parser, out="where the results go")
    parser.add_argument("--full", dest="level", action="store_const", const="full", default="quick", help="all sizes")
    parser.add_argument(
        "--smoke", dest="level", action="store_const", const="smoke", help="one small case per kind of op"
    )
    parser.add_argument("--only", metavar="KIND,..", help=f"of {', '.join(KINDS)} [all]")
    parser.add_argument(
        "--groups",
        metavar="N,..",
        help="numbers of GPUs of collectives and interference [with --full 2, 3, .. all; else 2, a node and all]",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 when all cases have a row, failed ones with their reason; 1 when workers could not be started."""
    from calibration.measure import collectives
    from calibration.measure.plan import plan

    kinds, asked = _kinds(arguments.only), _asked(arguments.groups)
    folder("--out", arguments.out)
    rows = ResultRows(arguments.out) if os.environ.get("RANK", "0") == "0" else None  # may be mended: by one rank alone
    with ranks.ranks(arguments, _again(arguments)) as started:
        world = started.world
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        there = {len(group) for group in collectives.groups("full", world, local)}
        if unknown := [size for size in asked if size not in there]:
            allowed = ", ".join(map(str, sorted(there))) or "none with one GPU"
            raise InputError("no groups of so many GPUs", key="--groups", found=unknown[0], allowed=allowed)
        cases = plan(arguments.level, kinds, world, local, asked)
        orders = {"level": arguments.level, "kinds": kinds, "groups": asked}
        job = ranks.job(arguments, started, "calibration.measure.worker", cases, orders, _spoken(arguments, world))
        if rows is None:
            return ranks.follow(job)
        reason = ranks.lead(job, rows, rows.done(failed_too=not arguments.retry))
    failures = rows.failures()
    for reason_of_many, count in Counter(f"{row['kind']}/{row['op']}: {row['error']}" for row in failures).most_common(
        SHOWN
    ):
        print(f"failed {count} x {reason_of_many}", file=sys.stderr)
    missing = len({case.key for case in cases} - rows.done(failed_too=True))
    left = f", {missing} not reached" if missing else ""
    print(f"{len(rows) - len(failures)} measured, {len(failures)} failed{left}: {rows.path}", file=sys.stderr)
    return 1 if reason else 0


def _kinds(only: str | None) -> tuple[str, ...]:
    chosen = KINDS if only is None else tuple(only.split(","))
    for kind in chosen:
        if kind not in KINDS:
            raise InputError("no such kind", key="--only", found=kind, allowed=", ".join(KINDS))
    return chosen


def _asked(groups: str | None) -> tuple[int, ...]:
    """The numbers of --groups. Raises `InputError`."""
    try:
        return tuple(int(size) for size in groups.split(",")) if groups else ()
    except ValueError:
        raise InputError("no list of numbers", key="--groups", found=groups, allowed="such as 2,4,8") from None


def _again(arguments: argparse.Namespace) -> list[str]:
    """The command line of another rank."""
    flags = {"full": ["--full"], "smoke": ["--smoke"]}.get(arguments.level, [])
    flags += ["--only", arguments.only] if arguments.only else []
    flags += ["--groups", arguments.groups] if arguments.groups else []
    return ["measure", "--device", arguments.device, *flags]


def _spoken(arguments: argparse.Namespace, world: int) -> str:
    """The command as provenance gives it, without paths of this machine."""
    return " ".join(["python -m calibration", *_again(arguments), "--gpus", str(world)])
