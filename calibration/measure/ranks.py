"""One process per GPU for a command: those that torchrun provides, or started here."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from calibration.measure.case import Case
from simulator.errors import InputError

if TYPE_CHECKING:
    from calibration.measure.agent import Job, Results

#: Where standard error is no terminal, a line of progress at most every so many seconds.
LINE_EVERY_S = 10.0
#: The number of the process that has started another rank, which ends with it.
STARTED_BY = "CALIBRATION_STARTED_BY"
#: How long another rank may take to end once there is nothing more to do.
LEAVE_S = 20.0


@dataclass(frozen=True)
class Ranks:
    """How many there are, and the processes of all but the first where they were ``started`` here."""

    world: int
    started: tuple[subprocess.Popen[bytes], ...] = ()


def add_arguments(parser: argparse.ArgumentParser, *, out: str) -> None:
    """Options of every command that uses GPUs; ``out`` says what --out is."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=out)
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of this machine to use [all; torchrun's]")
    parser.add_argument("--retry", action="store_true", help="try again what failed before")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries the flow without a GPU")


@contextlib.contextmanager
def ranks(arguments: argparse.Namespace, again: Sequence[str]) -> Iterator[Ranks]:
    """The ranks, of which this process is one: torchrun's, or else ``--gpus`` of them, for which the command line
    ``again`` is started for all but the first. A termination signal ends all of them."""
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield from _ranks(arguments, again)
    finally:
        signal.signal(signal.SIGTERM, before)


def _ranks(arguments: argparse.Namespace, again: Sequence[str]) -> Iterator[Ranks]:
    if "RANK" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        if arguments.gpus not in (None, world):
            raise InputError("the ranks are given by torchrun", key="--gpus", found=arguments.gpus, allowed=world)
        if STARTED_BY in os.environ:
            from calibration.measure.start import end_with_parent

            end_with_parent(int(os.environ[STARTED_BY]))
        yield Ranks(world)
        return
    gpus = _gpus(arguments.gpus, arguments.device)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    os.environ |= variables
    spawned = tuple(
        subprocess.Popen(
            [sys.executable, "-m", "calibration", *again, "--out", str(arguments.out)],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), STARTED_BY: str(os.getpid())},
        )
        for rank in range(1, gpus)
    )
    try:
        yield Ranks(gpus, spawned)
    except BaseException:  # they would wait for this rank
        for process in spawned:
            process.kill()
        raise
    finally:
        _leave(spawned)
        for name in variables:
            os.environ.pop(name)


def _leave(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended; those that do not are ended, all at once."""
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):  # one that waits in torch heeds the second only
        until = time.monotonic() + LEAVE_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in processes:
            if process.poll() is None:
                end(process)
    for process in processes:
        process.wait()


def job(
    arguments: argparse.Namespace,
    there: Ranks,
    worker: str,
    cases: list[Case],
    orders: dict[str, Any],
    command: str,
) -> Job:
    """The `Job` of this process, one of the ranks that are ``there``."""
    from calibration.measure.agent import Job

    world, rank = there.world, int(os.environ["RANK"])
    return Job(
        worker=worker,
        cases=cases,
        orders=orders,
        device=arguments.device,
        out=arguments.out,
        command=command,
        rank=rank,
        world=world,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_world=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        agents=there.started,
    )


def lead(job: Job, results: Results, skip: set[str]) -> str:
    """Rank 0: do the job together with the other ranks, leaving out the cases to ``skip``. Returns why it had to give
    up, or nothing."""
    from calibration.measure import agent, gpu

    if job.device == "cuda" and (why := gpu.untold()):
        print(f"no clocks, power and temperatures of GPUs: {why}", file=sys.stderr)
    progress = Progress({case.kind for case in job.cases if case.key not in skip})
    store = agent.open_store(job)
    try:
        reason = agent.lead(job, results, skip, store, progress.show)
        agent.leave(job, store)
    finally:
        progress.end()
    if reason:
        print(f"gave up: {reason}; see {job.out / 'log-0.txt'}", file=sys.stderr)
    return reason


def follow(job: Job) -> int:
    """Every other rank; its exit status."""
    from calibration.measure import agent

    store = agent.open_store(job)
    agent.follow(job, store)
    agent.leave(job, store)
    return 0


class Progress:
    """Progress on standard error: on a terminal one line that is written over, elsewhere a line now and then.

    The remaining time is at the pace behind the first case, before which workers start. It is shown once cases of most
    of the ``kinds`` have been seen: cases of one kind say nothing of another's.
    """

    def __init__(self, kinds: Collection[str]) -> None:
        self._kinds, self._seen = len(kinds), set[str]()
        self._first_s = self._told_s = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def show(self, done: int, total: int, key: str) -> None:
        now = time.monotonic()
        self._seen.add(key.partition("/")[0])
        left = ""
        if done == 1:
            self._first_s = now
        elif 2 * len(self._seen) > self._kinds:
            left = f", {(now - self._first_s) / (done - 1) * (total - done):.0f} s left"
        line = f"{done}/{total}{left}  {key}"[:114]
        if self._terminal:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif now - self._told_s >= LINE_EVERY_S:
            self._told_s = now
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr)


def _gpus(wanted: int | None, device: str) -> int:
    import torch

    there = torch.cuda.device_count() if device == "cuda" else None
    if there == 0:
        raise InputError("no GPU is visible to torch", fix="--device cpu tries the flow without one")
    gpus = there or 1 if wanted is None else wanted
    if gpus < 1 or (there and gpus > there):
        allowed = f"1 to {there}" if there else "1 or more"
        raise InputError("not so many GPUs here", key="--gpus", found=gpus, allowed=allowed)
    return gpus


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stop(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
