"""Ranks that measure something together: they agree through a control group that does not touch the GPUs."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from calibration.measure.bench import BATCH_S, LONGEST_S, QUEUE, SLEEP_HZ, Bench, MeasuredFigures, summary
from calibration.measure.case import UnavailableError, Work

T = TypeVar("T")
#: Nobody waits shorter than the agents do: they end what hangs.
FOREVER = datetime.timedelta(days=1)
REPEATS = 7


@dataclass(frozen=True)
class Team:
    """``data`` carries the collectives that are measured, ``control`` what is said about them."""

    ranks: tuple[int, ...]
    data: dist.ProcessGroup
    control: dist.ProcessGroup

    @classmethod
    def from_ranks(cls, ranks: tuple[int, ...]) -> Team:
        """All ranks of the job must call this, in the same order."""
        return cls(ranks, dist.new_group(list(ranks), timeout=FOREVER), dist.new_group(list(ranks), FOREVER, "gloo"))

    def barrier(self) -> None:
        dist.barrier(self.control)

    def all(self, value: T) -> list[T]:
        """Return every member's value, in the order of ranks."""
        values: list[T] = [value] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.control)
        return values

    def together(self, attempt: Callable[[], T]) -> T:
        """``attempt`` at every member; where one fails, all raise `UnavailableError` with its reason."""
        result, reason = None, ""
        try:
            result = attempt()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        failures = [why for why in self.all(reason) if why]
        if failures:
            raise UnavailableError(failures[0])
        assert result is not None
        return result


def collective_time(bench: Bench, work: Work, team: Team) -> MeasuredFigures:
    """Return the seconds of a collective on the stream and of its call on the host.

    ``time_s``: collectives one after another, of the slowest member in each batch. ``host_s``: median of the members.
    """
    each_s, host_s = estimate(bench, work, team)
    n = max(1, min(40, QUEUE // (2 * work.launches), int(BATCH_S / each_s) + 1))
    repeats = max(3, min(REPEATS, int(LONGEST_S / (n * each_s)) + 1))
    if not bench.cuda:
        n, repeats = 1, 2
    batches, hosts = [], []
    for _ in range(repeats):
        team.barrier()
        seconds, host = timed(bench, work, n, host_s)
        batches.append(seconds)
        hosts.append(host)
    slowest = [max(batch) for batch in zip(*team.all(batches), strict=True)]
    return {
        **summary(slowest),
        "host_s": float(f"{statistics.median(team.all(statistics.median(hosts))):.5g}"),
        "runs": n,
        **bench.telemetry.read(),
    }


def estimate(bench: Bench, work: Work, team: Team) -> tuple[float, float]:
    """(seconds of a run, seconds of the host's call), roughly, and the same at every member."""
    for i in range(3):
        work.run(i % work.sets)
    bench.synchronize()
    team.barrier()
    times = team.all(timed(bench, work, 3, 0.0))
    return max(max(seconds for seconds, _ in times), 1e-6), max(host for _, host in times)


def timed(bench: Bench, work: Work, n: int, host_s: float) -> tuple[float, float]:
    """Seconds per run on the stream and on the host. The stream is held until the host has issued all, and one more
    run goes first, in which the members meet."""
    if not bench.cuda:
        began = time.perf_counter()
        for i in range(n):
            work.run(i % work.sets)
        seconds = (time.perf_counter() - began) / n
        return seconds, seconds
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if host_s:
        torch.cuda._sleep(int(min(0.05, 1.5 * (n + 1) * host_s + 50e-6) * SLEEP_HZ))
    work.run(0)
    start.record()
    began = time.perf_counter()
    for i in range(n):
        work.run(i % work.sets)
    host = (time.perf_counter() - began) / n
    end.record()
    bench.synchronize()
    return start.elapsed_time(end) * 1e-3 / n, host
