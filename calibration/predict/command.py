"""Write predictions of runs to a file, to be committed before the runs are made.

Every workload has its step time, peak allocated memory of each rank, and seconds by class of kernel. It also has
exposed communication, bubble and breakdown of the step. The file names the profile's hash, the simulator's commit and
the date.
`compare --predictions FILE` then holds the measured runs against it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from calibration.compare.software import like
from calibration.predict.predictions import predictions, simulate_all
from simulator.cli.outputs import check_outputs, write_json
from simulator.config import parse_changes

EXAMPLE = """examples:
  python -m calibration predict calibration/runs/predicted/*.yaml \\
      --out calibration/results/predictions.json
  python -m calibration predict calibration/runs/predicted/*.yaml \\
      --like runs --out predictions.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workloads", type=Path, nargs="+", metavar="WORKLOAD", help="workload files")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write, JSON")
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="records of runs that were just made on the machine: hosts as fast as theirs in the median, and sends and "
        "receives as their PyTorch makes them",
    )
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    """The option that changes every workload."""
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of every workload, as in `simulator run`: cluster=hgx_h200_8gpu for runs on H200s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0, or 1 where a workload could not be simulated. Raises `InputError`."""
    check_outputs({"--out": arguments.out}, {"--out": (".json",)}, inputs=arguments.workloads)
    changes = parse_changes(arguments.changes)
    if arguments.like is not None:
        changes = {**like(arguments.like, arguments.workloads[0], changes), **changes}
    content = predictions(simulate_all((path, changes) for path in arguments.workloads), changes)
    write_json(arguments.out, content)
    failed = [row for row in content["predictions"] if row["reason"]]
    for row in failed:
        print(f"not simulated: {row['name']}: {row['reason']}", file=sys.stderr)
    state = "not in a git checkout" if not content["commit"] else f"simulator at {content['commit'][:12]}"
    if content["uncommitted_changes"]:
        state += " with uncommitted changes"
    print(f"{len(content['predictions']) - len(failed)} predictions, {state}: {arguments.out}", file=sys.stderr)
    return 1 if failed else 0
