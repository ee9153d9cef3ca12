"""How work is timed: buffers of random data that outgrow the cache, device time by events, host time by the clock."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from calibration.measure.case import Scalar, UnavailableError, Work
from calibration.measure.gpu import Telemetry

MeasuredFigures = dict[str, object]
CACHE_MULTIPLE = 3  # buffers of all sets together, in sizes of the L2 cache
MOST_SETS = 128
BATCH_S, REPEATS, WARM_S, LONGEST_S = 6e-3, 10, 25e-3, 0.4
POOL_BYTES = 2**30
LONGEST_SLEEP_S = 0.03
SLEEP_HZ = 2e9  # cycles/s of torch.cuda._sleep, rounded up
QUEUE = 900  # kernels that can be queued on a stream before the host has to wait, about


class Bench:
    """Times `Work` on one device. A CPU is timed by the clock, which serves to try the flow, not to calibrate."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.telemetry = Telemetry(device.index if self.cuda else None)
        self._l2 = torch.cuda.get_device_properties(device).L2_cache_size if self.cuda else 0
        self._pools: dict[torch.dtype, torch.Tensor] = {}
        self._offset = 0

    # buffers

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A tensor of standard normal values to be read only: a window of a pool, another one at each call."""
        numel = math.prod(shape)
        size = POOL_BYTES // 4 if self.cuda else 2**20
        if numel > size // 2:
            return self.fresh(*shape, dtype=dtype)
        if dtype not in self._pools:
            self._pools[dtype] = self.fresh(size, dtype=dtype)
        if self._offset + numel > size:
            self._offset = 0
        window = self._pools[dtype][self._offset : self._offset + numel]
        self._offset += -(-numel // 512) * 512  # aligned for any kernel
        return window.view(shape)

    def fresh(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A tensor of standard normal values of its own."""
        if dtype in (torch.bfloat16, torch.float16, torch.float32):
            return torch.randn(shape, dtype=dtype, device=self.device)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device).to(dtype)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def sets(self, nbytes: float, most: int = MOST_SETS) -> int:
        """How many sets of ``nbytes`` a case rotates through, so that each finds the cache taken by others."""
        if not self.cuda:
            return 2
        return max(1, min(most, math.ceil(CACHE_MULTIPLE * self._l2 / max(nbytes, 1.0))))

    def rotated(
        self, nbytes: float, make: Callable[[], Callable[[], object]], launches: int = 1, most: int = 64
    ) -> Work:
        """Work whose every set of buffers is a function of its own; ``nbytes`` are read or written by each."""
        sets = self.sets(nbytes, most)
        calls = [make() for _ in range(sets)]
        return Work(lambda i: calls[i](), nbytes=nbytes, launches=launches, sets=sets)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    # timing

    def heat(self, seconds: float) -> None:
        """Keep the GPU busy with products: what is measured next meets it as warm as training keeps it."""
        if not self.cuda:
            return
        a, b = (self.fresh(8192, 8192) for _ in range(2))
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            for _ in range(20):
                torch.mm(a, b)
            self.synchronize()

    def device_time(self, work: Work, *, repeats: int = REPEATS) -> MeasuredFigures:
        """Seconds of one run on the stream, run after run, when the host is ahead of the GPU.

        Long kernels keep the GPU busy by themselves. Before a batch of short ones the stream is held by a sleeping
        kernel until the host has issued them all; ``starved`` tells where that failed.
        """
        if not self.cuda:
            return summary(self._clocked(work, 1, 2))
        each_s, host_s = self._estimate(work)
        most = max(1, min(64, QUEUE // work.launches))
        n = max(1, min(most, math.ceil(BATCH_S / each_s)))
        repeats = max(3, min(repeats, int(LONGEST_S / (n * each_s))))
        waits = host_s > 0.5 * each_s
        self._warm(work, each_s)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
        starved = False
        for repeat in range(repeats):
            start, end = marks[2 * repeat], marks[2 * repeat + 1]
            if waits:
                torch.cuda._sleep(int(min(LONGEST_SLEEP_S, 1.5 * n * host_s + 50e-6) * SLEEP_HZ))
            start.record()
            for i in range(n):
                work.run(i % work.sets)
            starved |= waits and start.query() and n * work.launches < QUEUE
            end.record()
            if waits:
                end.synchronize()
        state = self.telemetry.read()  # while the last batch is still running, if it is long
        self.synchronize()
        samples = [a.elapsed_time(b) * 1e-3 / n for a, b in zip(marks[::2], marks[1::2], strict=True)]
        return {**summary(samples), "runs": n, **({"starved": True} if starved else {}), **state}

    def issuing(self, work: Work) -> Callable[[], float]:
        """Says, when called, how many seconds the host takes to issue a run, the GPU's queue never full."""
        n = max(2, min(100, QUEUE // (2 * work.launches))) if self.cuda else 1
        return lambda: self._clocked(work, n, 1)[0]

    def sustained(self, work: Work, seconds: float) -> MeasuredFigures:
        """Seconds of one run through ``seconds`` without a pause, with the state of the GPU as it goes."""
        if not self.cuda:
            return self.device_time(work)
        each_s, _ = self._estimate(work)
        n = max(1, math.ceil(0.05 / each_s))
        time.sleep(0.5)  # so that the first samples show the clock before the power limit lowers it
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(max(2, int(seconds / (n * each_s))) + 1)]
        states = []
        marks[0].record()
        for index, mark in enumerate(marks[1:]):
            for i in range(n):
                work.run(i % work.sets)
            mark.record()
            if index:
                marks[index - 1].synchronize()  # at most two batches are queued
                states.append(self.telemetry.read())
        self.synchronize()
        samples = [a.elapsed_time(b) * 1e-3 / n for a, b in itertools.pairwise(marks)]
        late = samples[len(samples) // 2 :]
        return {**summary(late), "series_s": [float(f"{s:.5g}") for s in samples], **_series(states)}

    def shared(self, work: Work, other: Work, seconds: float, share: float, period_s: float) -> MeasuredFigures:
        """Return a row as `sustained` does, of ``work`` with about ``share`` of every period; ``other`` has the rest.

        ``share`` in the row is the measured one; seconds of a run of ``other`` are ``other_s``.
        """
        if not self.cuda:
            return self.device_time(work)
        counts = [
            max(1, round(part * period_s / self._estimate(one)[0])) for one, part in ((work, share), (other, 1 - share))
        ]
        time.sleep(0.5)
        marks: list[list[torch.cuda.Event]] = []
        states: list[dict[str, object]] = []
        began = read = time.monotonic()
        while time.monotonic() - began < seconds:
            marks.append([torch.cuda.Event(enable_timing=True) for _ in range(3)])
            marks[-1][0].record()
            for mark, one, count in zip(marks[-1][1:], (work, other), counts, strict=True):
                for i in range(count):
                    one.run(i % one.sets)
                mark.record()
            if len(marks) > 2:
                marks[-3][2].synchronize()  # at most two periods are queued
                if time.monotonic() - read > 0.05:
                    states.append(self.telemetry.read())
                    read = time.monotonic()
        self.synchronize()
        busy, rest = ([a[n].elapsed_time(a[n + 1]) * 1e-3 for a in marks] for n in (0, 1))
        late = len(marks) // 2
        whole = marks[late][0].elapsed_time(marks[-1][2]) * 1e-3
        return {
            **summary([s / counts[0] for s in busy[late:]]),
            "share": float(f"{sum(busy[late:]) / whole:.4g}"),
            "other_s": float(f"{statistics.median(rest[late:]) / counts[1]:.4g}"),
            "series_s": [float(f"{s / counts[0]:.5g}") for s in busy],
            **_series(states),
        }

    def kernels(self, work: Work) -> list[list[Scalar]]:
        """Return names and seconds of the kernels of a run, in order, from the profiler.

        Seconds are medians of 3 runs, or of one run where the runs launch unlike kernels.
        """
        if not self.cuda:
            raise UnavailableError("a CPU launches no kernels")
        work.run(0)
        self.synchronize()
        seen = self._profiled(work, 3)
        names, each = [name for name, _ in seen], len(seen) // 3
        if names != 3 * names[:each]:
            return [[name, seconds] for name, seconds in self._profiled(work, 1)]
        runs = zip(*(seen[i * each : (i + 1) * each] for i in range(3)), strict=True)
        return [[same[0][0], statistics.median(seconds for _, seconds in same)] for same in runs]

    def _profiled(self, work: Work, runs: int) -> list[tuple[str, float]]:
        """Names and seconds of the kernels of so many runs, in order."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for i in range(runs):
                work.run(i % work.sets)
            self.synchronize()
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        events.sort(key=lambda event: event.time_range.start)
        return [(e.name[:200], e.time_range.elapsed_us() * 1e-6) for e in events]

    def _estimate(self, work: Work) -> tuple[float, float]:
        """(seconds of a run, seconds that the host takes to issue it), roughly."""
        for i in range(2):
            work.run(i % work.sets)
        self.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        hosts = []
        for i in range(3):
            began = time.perf_counter()
            work.run(i % work.sets)
            hosts.append(time.perf_counter() - began)
        end.record()
        self.synchronize()
        return max(start.elapsed_time(end) * 1e-3 / 3, 1e-6), statistics.median(hosts)

    def _warm(self, work: Work, each_s: float) -> None:
        for i in range(max(1, min(200, math.ceil(WARM_S / each_s)))):
            work.run(i % work.sets)
        self.synchronize()

    def _clocked(self, work: Work, n: int, repeats: int) -> list[float]:
        samples = []
        for _ in range(repeats):
            self.synchronize()
            began = time.perf_counter()
            for i in range(n):
                work.run(i % work.sets)
            samples.append((time.perf_counter() - began) / n)
        self.synchronize()
        return samples


def _series(states: Sequence[Mapping[str, object]]) -> MeasuredFigures:
    """Return the GPU's states as a list of each figure; empty states are left out."""
    told = [state for state in states if state]
    return {name: [state.get(name) for state in told] for name in dict.fromkeys(itertools.chain(*told))}


def summary(samples: Sequence[float]) -> MeasuredFigures:
    """Median, tenth and ninetieth percentile and number of ``samples``, in seconds."""
    ordered = sorted(samples)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return {
        "time_s": float(f"{statistics.median(ordered):.5g}"),
        "p10_s": float(f"{low:.5g}"),
        "p90_s": float(f"{high:.5g}"),
        "samples": len(ordered),
    }
