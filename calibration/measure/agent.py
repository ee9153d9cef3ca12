"""Agents that watch over the measuring: every rank's agent starts a worker; all are stopped where one fails or hangs.

A worker is a program that reads its orders as JSON from standard input, and reports as lines of JSON. It writes
``environment`` once, and ``done`` at the end. Each case has ``start`` (its key) with ``limit_s``, and ``row``.
Agents talk through a store (torch's, as torchrun provides one): ``todo/G`` is what the workers of generation G measure,
``abort/G`` why they are stopped. The next generation goes on behind the case that failed, which is recorded with its
reason.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import torch.distributed as dist

from calibration.measure.case import Case
from calibration.measure.team import FOREVER
from simulator.errors import InputError

PYTHON = (sys.executable, "-m")
GRACE_S = 30.0  # over a case's own limit: the first case of a group starts its communicator
STARTUP_S = 240.0  # importing torch and starting CUDA and NCCL, at worst
POLL_S, STORE_POLL_S = 0.02, 0.3


@dataclass(frozen=True)
class Job:
    """The cases to measure, the ``worker`` (a module) that measures them, and this process's place among the ranks.

    ``orders``: what the worker must know beside its place. ``agents``: those of ranks from 1 on, where this process has
    started them.
    """

    worker: str
    cases: list[Case]
    orders: dict[str, Any]
    device: str
    out: Path
    command: str
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    agents: tuple[subprocess.Popen[bytes], ...] = ()

    def lost(self) -> str:
        """Return which of the ``agents`` has ended before its time, as by a signal; nothing while none has."""
        ends = {rank: agent.poll() for rank, agent in enumerate(self.agents, 1)}
        return next((f"the agent of rank {rank} {_ending(end)}" for rank, end in ends.items() if end), "")


class Results(Protocol):
    """Results of rank 0: the environment and the rows that its worker reports."""

    def start(self, environment: dict[str, Any]) -> None: ...

    def add(self, row: dict[str, Any]) -> None: ...


@dataclass
class WorkersOutcome:
    """How a generation of workers ended: ``reason`` is empty when they did all; ``case`` is what was being measured."""

    reason: str = ""
    case: Case | None = None


@dataclass
class _Current:
    case: Case | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + STARTUP_S)
    done: bool = False


def lead(job: Job, rows: Results, skip: set[str], store: dist.Store, show: Callable[[int, int, str], None]) -> str:
    """Rank 0: hands out what is pending until nothing is, workers end before they do anything, or an agent has gone.
    Returns why it had to give up, or nothing."""
    generation, finished = 0, set(skip)
    pending = [index for index, case in enumerate(job.cases) if case.key not in finished]
    total = len(pending)
    while pending:
        store.set(f"todo/{generation}", json.dumps(pending))
        before = len(finished)

        def take(row: dict[str, Any], key: str) -> None:
            rows.add(row)
            finished.add(key)
            show(len(finished) - len(skip), total, key)

        try:
            outcome = _watch(job, pending, generation, store, rows, take)
        except BaseException:  # the others must not wait for a rank that has gone
            store.set(f"abort/{generation}", "rank 0 gave up")
            store.set(f"todo/{generation + 1}", "[]")
            raise
        if outcome.reason:
            if outcome.case is not None:
                case = outcome.case
                error = {"kind": case.kind, "op": case.op, "params": case.params, "ranks": list(case.ranks)}
                take({**error, "error": outcome.reason}, case.key)
            if len(finished) == before or job.lost():
                store.set(f"todo/{generation + 1}", "[]")
                return outcome.reason
        generation += 1
        pending = [index for index in pending if job.cases[index].key not in finished]
    store.set(f"todo/{generation}", "[]")
    return ""


def follow(job: Job, store: dist.Store) -> None:
    """Every other rank: runs a worker per generation until there is nothing to do."""
    generation = 0
    while pending := json.loads(store.get(f"todo/{generation}")):
        _watch(job, pending, generation, store, None, lambda row, key: None)
        generation += 1


def _start_worker(module: str, log: Path, write_fd: int) -> subprocess.Popen[bytes]:
    """Start a worker that reads its orders from a pipe, and writes messages to ``write_fd`` and all else to ``log``."""
    with log.open("ab") as sink:
        return subprocess.Popen(
            (*PYTHON, module),
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=sink,
            pass_fds=(write_fd,),
            process_group=0,  # what a terminal interrupts are the agents, which end their workers
            env={**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        )


def _watch(
    job: Job,
    pending: list[int],
    generation: int,
    store: dist.Store,
    rows: Results | None,
    take: Callable[[dict[str, Any], str], None],
) -> WorkersOutcome:
    """Run this rank's worker to its end, or until it has to be stopped."""
    log = job.out / f"log-{job.rank}.txt"
    said_before = log.stat().st_size if log.exists() else 0
    read_fd, write_fd = os.pipe()
    worker = _start_worker(job.worker, log, write_fd)
    os.close(write_fd)
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    reader = threading.Thread(target=_listen, args=(os.fdopen(read_fd), messages), daemon=True)
    reader.start()
    assert worker.stdin is not None
    # The pipe of a worker that has ended before it read all is broken; its end is seen below.
    with contextlib.suppress(BrokenPipeError), worker.stdin as orders:
        orders.write(json.dumps(_orders(job, pending, generation, write_fd)).encode())
    current, next_look = _Current(), 0.0
    by_key = {job.cases[index].key: job.cases[index] for index in pending}
    try:
        while True:
            ended = worker.poll() is not None
            if ended:
                reader.join(5.0)
            while not messages.empty():
                _heed(messages.get(), current, by_key, rows, take)
            if ended and worker.returncode == 0 and (job.rank or current.done):
                return WorkersOutcome()
            reason = ""
            if ended:
                reason = f"rank {job.rank} {_ending(worker.returncode)}: {_last_line(log, said_before)}"
            elif job.rank == 0 and time.monotonic() > current.deadline:
                limit = current.case.limit_s if current.case else STARTUP_S
                reason = f"took longer than {limit:.0f} s"
            else:
                reason = job.lost()
            if reason:
                store.set(f"abort/{generation}", reason)
            elif time.monotonic() > next_look:
                next_look = time.monotonic() + STORE_POLL_S
                if store.check([f"abort/{generation}"]):
                    reason = store.get(f"abort/{generation}").decode()
            if reason:
                return WorkersOutcome(reason, current.case)
            time.sleep(POLL_S)
    finally:
        if worker.poll() is None:
            worker.kill()
        worker.wait()


def _heed(
    message: dict[str, Any],
    current: _Current,
    by_key: dict[str, Case],
    rows: Results | None,
    take: Callable[[dict[str, Any], str], None],
) -> None:
    """Act on what the worker reports."""
    if "environment" in message and rows is not None:
        rows.start(message["environment"])
    elif "start" in message:
        current.case = by_key[message["start"]]
        current.deadline = time.monotonic() + message["limit_s"] + GRACE_S
    elif "row" in message and current.case is not None:
        take(message["row"], current.case.key)
        current.case, current.deadline = None, time.monotonic() + STARTUP_S
    elif "done" in message:
        current.done = True


def _orders(job: Job, pending: list[int], generation: int, report_fd: int) -> dict[str, Any]:
    return {
        **job.orders,
        "rank": job.rank,
        "world": job.world,
        "local_rank": job.local_rank,
        "local_world": job.local_world,
        "device": job.device,
        "pending": pending,
        "generation": generation,
        "report_fd": report_fd,
        "agent": os.getpid(),
        "command": job.command,
        "host": os.environ.get("MASTER_ADDR", ""),
        "port": os.environ.get("MASTER_PORT", "0"),
    }


def _listen(stream: IO[str], messages: queue.Queue[dict[str, Any]]) -> None:
    with stream:
        for line in stream:
            try:
                messages.put(json.loads(line))
            except ValueError:  # cut off by the worker's death
                return


def _ending(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was ended by signal {signal.Signals(-status).name}"


def _last_line(log: Path, begin: int) -> str:
    """The worker's last word, from byte ``begin`` of the log on: the message of its exception where it had one."""
    words = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in words.splitlines()[-40:] if line.strip()]
    errors = [line for line in lines if "Error" in line and not line.startswith("File")]
    return (errors or lines or ["no message"])[-1][:300]


def open_store(job: Job) -> dist.Store:
    """The agents' store: torchrun's where there is one, else rank 0 is host to it. Raises `InputError` where its host
    has gone."""
    if job.world == 1:
        return dist.HashStore()
    port = int(os.environ["MASTER_PORT"])
    host_it = job.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit, at = datetime.timedelta(seconds=STARTUP_S), os.environ["MASTER_ADDR"]
    try:
        store = dist.TCPStore(at, port, is_master=host_it, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        words = str(error).splitlines()[0]
        raise InputError(f"rank {job.rank} does not reach rank 0: {words}", key="MASTER_ADDR", found=at) from None
    store.set_timeout(FOREVER)
    return dist.PrefixStore("calibration", store)


def leave(job: Job, store: dist.Store) -> None:
    """End together: the store dies with rank 0, and the others may still have to read from it."""
    if store.add("left", 1) < job.world and job.rank == 0:
        deadline = time.monotonic() + 15
        while store.add("left", 0) < job.world and not job.lost() and time.monotonic() < deadline:
            time.sleep(0.05)
