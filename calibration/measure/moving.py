"""Collectives beside kernels on the same GPU, by the profiler: seconds in which their bytes move.

A kernel of NCCL's is there from when its own GPU has SMs for it. The last one to begin waits for nobody. So the
shortest kernel of a collective lasts as long as its bytes move.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from calibration.measure import collectives, interference
from calibration.measure.bench import QUEUE, Bench, MeasuredFigures, summary
from calibration.measure.case import Case, Level, Scalar, UnavailableError
from calibration.measure.interference import Pair
from calibration.measure.team import Team

#: Beside those of `interference`: what SMs bound, though it is a stream.
KERNELS: dict[str, Case] = {
    **interference.KERNELS,
    "rope": Case("memory", "rope", {"batch": 2, "length": 8192, "heads": 32, "head_dim": 128}),
    "swiglu_split": Case("memory", "swiglu_split", {"rows": 16384, "width": 4096}),
}
#: Nothing gets SMs before the last of several of these has ended.
WITHOUT = ("attention_bwd",)
SIZES = {"all_reduce": (2**26, 2**28), "all_gather": (2**28,), "reduce_scatter": (2**28,), "send_recv": (2**28,)}
#: Collectives on their own, right after so many seconds of the kernel, and as hot.
AFTER, AFTER_S = 4, 4e-3
#: Both streams are held for so long while the host issues the first of both.
HOLD_S = 10e-3


def cases(level: Level, world: int, local: int, only: collectives.Sizes = ()) -> Iterator[Case]:
    kernels, ops = [name for name in KERNELS if name not in WITHOUT], SIZES
    if level == "smoke":
        kernels, ops = ["smoke"], {"all_reduce": (2**12,)}
    elif level == "quick":
        kernels, ops = ["matmul", "residual_add"], {"all_reduce": (2**28,)}
    for ranks in collectives.groups(level, world, local, only):
        for kernel, (op, sizes) in itertools.product(kernels, ops.items()):
            for nbytes in sizes:
                params: dict[str, Scalar] = {"kernel": kernel, "bytes": nbytes, "dtype": "bf16"}
                yield Case("moving", op, params, ranks, limit_s=60.0)


def measure(case: Case, bench: Bench, team: Team) -> MeasuredFigures:
    """Seconds of the collective beside the kernel, and right after it (``time_s``)."""
    pair = interference.prepared(KERNELS.get(str(case.params["kernel"]), interference.SMOKE), case, bench, team)
    each_s, collective_s = (max(team.all(interference.loop(work, 5))) for work in (pair.kernel, pair.collective))
    n = max(4, min(math.ceil(interference.WINDOW_S / each_s), QUEUE // (2 * pair.kernel.launches)))
    m = max(4, math.ceil(1.3 * n * each_s / collective_s) + 2)
    n_after = max(2, math.ceil(AFTER_S / each_s))
    side = torch.cuda.Stream()
    team.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        interference.race(pair.kernel, n, pair.collective, m, side, HOLD_S)
        team.barrier()
        _in_turn(pair, n_after)
    spans_by_rank = team.all(_spans(profile, (n + 1) / (n + 1 + n_after), m))
    if any(len(spans) != m + AFTER for spans in spans_by_rank):
        raise UnavailableError(f"kernels of NCCL's: {[len(spans) for spans in spans_by_rank]}, expected {m + AFTER}")
    shortest = [min(span.seconds for span in spans) for spans in zip(*spans_by_rank, strict=True)]
    covered = [all(span.covered for span in spans) for spans in zip(*spans_by_rank, strict=True)]
    beside = [seconds for seconds, there in zip(shortest[:m], covered, strict=False) if there]
    if not beside:
        raise UnavailableError("no collective ran beside the kernel throughout")
    return {
        **summary(shortest[m:]),
        "beside_s": statistics.median(beside),
        "beside_each_s": [float(f"{seconds:.5g}") for seconds in beside],
        **bench.telemetry.read(),
    }


def _in_turn(pair: Pair, n: int) -> None:
    for work, times in ((pair.kernel, n), (pair.collective, AFTER)):
        for i in range(times):
            work.run(i % work.sets)
    torch.cuda.synchronize()


@dataclass(frozen=True)
class NcclSpan:
    """A kernel of NCCL's on this GPU; whether the other kernels ran from its start to its end."""

    seconds: float
    covered: bool


def _spans(profile: torch.profiler.profile, share: float, m: int) -> list[NcclSpan]:
    """Return NCCL's kernels as they began; the first ``share`` of the other kernels run beside the first ``m``."""
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    nccl = [event.time_range for event in events if event.name.startswith("nccl")]
    other = [event.time_range for event in events if not event.name.startswith("nccl") and "spin" not in event.name]
    other = other[: round(share * len(other))]
    return [
        NcclSpan(
            span.elapsed_us() * 1e-6,
            bool(other) and i < m and other[0].start <= span.start and span.end <= other[-1].end,
        )
        for i, span in enumerate(nccl)
    ]
