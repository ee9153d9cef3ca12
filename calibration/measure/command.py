"""Measure kernels, copies, host launch costs, collectives and their interference on this machine's GPUs.

Results are lines of JSON in DIR/measurements.jsonl, appended as they come; a run that was interrupted goes on where it
stopped.
Under torchrun the ranks that it gives are used, on one node or several; otherwise --gpus processes are started here.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

from calibration.measure.agent import Job, follow, lead, leave, open_store
from calibration.measure.case import Level
from calibration.measure.plan import KINDS, plan
from calibration.measure.store import Rows
from simulator.errors import InputError

SHOWN = 20  # reasons of failures that are printed; all are in the file
EXAMPLE = """examples:
  python -m calibration measure --gpus 4 --out h100 --full
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d \\
      -m calibration measure --out h100 --only collective,interference"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of this machine to use [all; torchrun's]")
    parser.add_argument("--full", dest="level", action="store_const", const="full", default="quick", help="all sizes")
    parser.add_argument(
        "--smoke", dest="level", action="store_const", const="smoke", help="one small case per kind of op"
    )
    parser.add_argument("--only", metavar="KIND,..", help=f"of {', '.join(KINDS)} [all]")
    parser.add_argument("--retry", action="store_true", help="try again what failed before")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries the flow without a GPU")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 when all cases have a row, failed ones with their reason; 1 when workers could not be started."""
    kinds = _kinds(arguments.only)
    arguments.out.mkdir(parents=True, exist_ok=True)
    spawned: list[subprocess.Popen[bytes]] = []
    given = "RANK" in os.environ
    if given and arguments.gpus not in (None, int(os.environ["WORLD_SIZE"])):
        ranks = os.environ["WORLD_SIZE"]
        raise InputError("the ranks are given by torchrun", key="--gpus", found=arguments.gpus, allowed=ranks)
    if not given:
        gpus = _gpus(arguments.gpus, arguments.device)
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        for rank in range(1, gpus):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            spawned.append(
                subprocess.Popen(
                    [sys.executable, "-m", "calibration", *_again(arguments), "--out", str(arguments.out)],
                    env=environment,
                )
            )
    signal.signal(signal.SIGTERM, _stop)
    try:
        return _measure(_job(arguments, kinds), retry=arguments.retry)
    finally:
        for process in spawned:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
        if not given:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name)


def _measure(job: Job, *, retry: bool) -> int:
    store = open_store(job)
    if job.rank:
        follow(job, store)
        leave(job, store)
        return 0
    rows, progress = Rows(job.out), Progress()
    skip = rows.done(failed_too=not retry)
    reason = lead(job, rows, skip, store, progress.show)
    leave(job, store)
    progress.end()
    failures = rows.failures()
    for reason_of_many, count in Counter(f"{row['kind']}/{row['op']}: {row['error']}" for row in failures).most_common(
        SHOWN
    ):
        print(f"failed {count} x {reason_of_many}", file=sys.stderr)
    print(f"{len(rows) - len(failures)} measured, {len(failures)} failed: {rows.path}", file=sys.stderr)
    if reason:
        print(f"gave up: {reason}; see {job.out / 'log-0.txt'}", file=sys.stderr)
    return 1 if reason else 0


class Progress:
    """A line on a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._on = sys.stderr.isatty()

    def show(self, done: int, total: int, key: str) -> None:
        if self._on:
            left_s = (time.monotonic() - self._began) / done * (total - done)
            print(f"\r\033[K{done}/{total}, {left_s:.0f} s left  {key}"[:118], end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._on:
            print("\r\033[K", end="", file=sys.stderr)


def _job(arguments: argparse.Namespace, kinds: tuple[str, ...]) -> Job:
    world = int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    level: Level = arguments.level
    return Job(
        cases=plan(level, kinds, world, local_world),
        level=level,
        kinds=kinds,
        device=arguments.device,
        out=arguments.out,
        command=_spoken(arguments),
        rank=int(os.environ["RANK"]),
        world=world,
        local_rank=int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
        local_world=local_world,
    )


def _kinds(only: str | None) -> tuple[str, ...]:
    chosen = KINDS if only is None else tuple(only.split(","))
    for kind in chosen:
        if kind not in KINDS:
            raise InputError("no such kind", key="--only", found=kind, allowed=", ".join(KINDS))
    return chosen


def _gpus(wanted: int | None, device: str) -> int:
    there = torch.cuda.device_count() if device == "cuda" else wanted or 1
    if not there:
        raise InputError("no GPU is visible to torch", fix="--device cpu tries the flow without one")
    gpus = there if wanted is None else wanted
    if not 1 <= gpus <= there:
        raise InputError("not so many GPUs here", key="--gpus", found=gpus, allowed=f"1 to {there}")
    return gpus


def _again(arguments: argparse.Namespace) -> list[str]:
    """The command line of another rank."""
    flags = {"full": ["--full"], "smoke": ["--smoke"]}.get(arguments.level, [])
    flags += ["--only", arguments.only] if arguments.only else []
    return ["measure", "--device", arguments.device, *flags]


def _spoken(arguments: argparse.Namespace) -> str:
    """The command as provenance gives it, without paths of this machine."""
    return " ".join(["python -m calibration", *_again(arguments), "--gpus", os.environ["WORLD_SIZE"]])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stop(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
