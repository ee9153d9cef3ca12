"""Really train workload files with PyTorch on this machine's GPUs, a few steps each, and record how long they took.

Every workload leaves DIR/NAME.json, a failed or skipped one with its reason, and DIR/NAME.timeline.csv.gz, a step of
every rank. An interrupted run goes on where it stopped.
Under torchrun the ranks that it gives are used; otherwise --gpus processes are started here. A workload on fewer GPUs
uses the first of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from calibration.folders import folder
from calibration.measure import ranks
from calibration.measure.case import Case
from calibration.train.frameworks import is_stack
from calibration.train.length import Length
from calibration.train.limits import refusal
from calibration.train.record import RunResults
from calibration.workloads import by_name
from simulator.config.workload import Workload
from simulator.errors import InputError

WORKER = "calibration.train.worker"
LIMIT_S = 120.0
EXAMPLE = """examples:
  python -m calibration train calibration/runs/fit/*.yaml --out runs
  python -m calibration train my_run.yaml --gpus 2 --out runs"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workloads", nargs="+", type=Path, metavar="WORKLOAD", help="workload files")
    ranks.add_arguments(parser, out="where the results go")
    parser.add_argument(
        "--limit", type=_seconds, default=LIMIT_S, metavar="S", help=f"seconds for one run [{LIMIT_S:g}]"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=4.0, metavar="S", help="seconds of steps to time, in rows of about 2 [4]"
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="the first rank of each, whose others are not there: nothing is moved, and only its host is measured",
    )
    parser.add_argument("--smoke", action="store_true", help="two steps of each, to see that they run")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("a number of seconds above zero")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 when all were trained; 1 when some failed, were skipped, or workers could not be started, which
    skips what is left."""
    named = by_name(arguments.workloads)
    import_module(WORKER)  # what training needs is there, before anything is written
    needed, refused = _checked(named)
    if arguments.alone:
        needed = dict.fromkeys(needed, 1)
    folder("--out", arguments.out)
    gpu, warm_up = arguments.device == "cuda", int(_length(arguments)["warm_up"])
    records = RunResults(
        arguments.out,
        {name: path for name, (path, _) in named.items()},
        _spoken(arguments),
        workloads={name: loaded for name, (_, loaded) in named.items() if isinstance(loaded, Workload)},
        gpu=gpu,
        warm_up=warm_up,
    )
    # Of all: a file there that is no record is said before anything is trained.
    done = {name for name in named if records.stands(name, failed_too=not arguments.retry)} & needed.keys()
    reason = ""
    if "RANK" in os.environ or len(done) < len(needed):  # every rank must see the same cases, whatever has been done
        with ranks.ranks(arguments, _again(arguments)) as started:
            world = started.world
            cases = {name: Case("train", name, {}, tuple(range(n)), arguments.limit) for name, n in needed.items()}
            whole = {name for name, (_, loaded) in named.items() if isinstance(loaded, Workload) and is_stack(loaded)}
            # Stacks of others use all ranks that there are.
            cases = {
                n: case for n, case in cases.items() if needed[n] == world or (needed[n] < world and n not in whole)
            }
            orders = {
                "keys": {name: case.key for name, case in cases.items()},
                "paths": {name: str(named[name][0].resolve()) for name in cases},
                "limit_s": arguments.limit,
                "length": _length(arguments),
                "alone": arguments.alone,
                "out": str(arguments.out.resolve()),
            }
            job = ranks.job(arguments, started, WORKER, list(cases.values()), orders, records.command)
            if job.rank:
                return ranks.follow(job)
            reason = ranks.lead(job, records, {case.key for name, case in cases.items() if name in done})
            refused |= {name: reason for name in cases if reason and not records.stands(name, failed_too=True)}
        for name in needed.keys() - cases.keys():
            problem = "not as many GPUs as the job has" if needed[name] < world else "more GPUs than there are"
            few = InputError(problem, key="--gpus", found=world, allowed=needed[name])
            refused[name] = str(few)
    for name in refused:
        records.skip(name, refused[name])
    return records.tell() or (1 if reason else 0)


def _checked(named: Mapping[str, tuple[Path, Workload | InputError]]) -> tuple[dict[str, int], dict[str, str]]:
    """Return by name the number of ranks that a workload needs, or the reason why it cannot be trained."""
    needed, refused = {}, {}
    for name, (_, loaded) in named.items():
        if isinstance(loaded, InputError):
            refused[name] = str(loaded)
        elif reason := refusal(loaded):
            refused[name] = reason
        else:
            needed[name] = loaded.n_ranks
    return needed, refused


def _length(arguments: argparse.Namespace) -> dict[str, float]:
    if arguments.smoke:
        return vars(Length(warm_up=1, settle_s=0.0, row_s=0.0, least=1, most=1, seconds=0.0))
    return vars(Length(seconds=arguments.seconds))


def _again(arguments: argparse.Namespace) -> list[str]:
    """The command line of another rank."""
    flags = ["--device", arguments.device, "--limit", str(arguments.limit), "--seconds", str(arguments.seconds)]
    flags += ["--smoke"] * arguments.smoke + ["--alone"] * arguments.alone
    return ["train", *flags, *map(str, arguments.workloads)]


def _spoken(arguments: argparse.Namespace) -> str:
    """The command as provenance gives it, without paths of this machine."""
    names = " ".join(path.name for path in arguments.workloads) if len(arguments.workloads) < 5 else "WORKLOAD.."
    gpus = f" --gpus {arguments.gpus}" if arguments.gpus else ""
    flags = " --alone" * arguments.alone + " --smoke" * arguments.smoke
    return f"python -m calibration train {names} --device {arguments.device}{gpus}{flags}"
