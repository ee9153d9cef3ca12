"""Kernels beside a collective on the same GPU: how much slower each gets while the other runs throughout.

Kernels are also measured beside a receive whose sender is late: its kernel is on the GPU, and waits.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from calibration.measure import attention, collectives, matmul, memory
from calibration.measure.bench import QUEUE, SLEEP_HZ, Bench, MeasuredFigures, summary
from calibration.measure.case import Case, Level, Scalar, UnavailableError, Work
from calibration.measure.team import Team

#: Kernels by name, each a case that is measured alone too, at sizes of a training step.
KERNELS: dict[str, Case] = {
    "matmul": Case("matmul", "mm", {"m": 8192, "n": 8192, "k": 8192, "role": "fwd", "dtype": "bf16"}),
    "matmul_small": Case("matmul", "mm", {"m": 2048, "n": 4096, "k": 4096, "role": "fwd", "dtype": "bf16"}),
    "attention": Case(
        "attention",
        "fwd",
        {
            "batch": 2,
            "heads": 32,
            "kv_heads": 32,
            "length": 4096,
            "head_dim": 128,
            "causal": True,
            "backend": "default",
        },
    ),
    "layer_norm": Case("memory", "layer_norm", {"rows": 16384, "width": 4096}),
    "residual_add": Case("memory", "residual_add", {"rows": 16384, "width": 4096}),
}
KERNELS["attention_bwd"] = Case("attention", "bwd", KERNELS["attention"].params)
SMOKE = Case("matmul", "mm", {"m": 64, "n": 64, "k": 64, "role": "fwd", "dtype": "tf32"})
MODULES = {"matmul": matmul, "attention": attention, "memory": memory}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
#: A receive that waits for its sender throughout, which is rank 0; between two GPUs.
LATE = "late_send"
WINDOW_S = 15e-3
ATTEMPTS = 5
RACES = 3
#: Time for the receive to get its SMs before the kernels begin.
HEAD_START_S = 1e-3


def cases(level: Level, world: int, local: int, only: collectives.Sizes = ()) -> Iterator[Case]:
    kernels: tuple[str, ...] = tuple(KERNELS)
    ops: tuple[str, ...] = COLLECTIVES
    sizes: tuple[int, ...] = (2**24, 2**28)
    if level == "smoke":
        kernels, ops, sizes = ("smoke",), COLLECTIVES[:1], (2**12,)
    elif level == "quick":
        kernels, ops, sizes = ("matmul", "layer_norm"), COLLECTIVES[:3], (2**26,)
    for ranks in collectives.groups(level, world, local, only):
        # What waits moves nothing yet: one size.
        late = itertools.product(kernels, (LATE,), sizes[:1] if len(ranks) == 2 else ())
        for kernel, op, nbytes in itertools.chain(late, itertools.product(kernels, ops, sizes)):
            params: dict[str, Scalar] = {"kernel": kernel, "bytes": nbytes, "dtype": "bf16"}
            yield Case("interference", op, params, ranks, limit_s=60.0)


def measure(case: Case, bench: Bench, team: Team) -> MeasuredFigures:
    """Seconds of the kernel and of the collective, each alone and beside the other, at the slowest member."""

    pair = prepared(KERNELS.get(str(case.params["kernel"]), SMOKE), case, bench, team)
    if case.op == LATE:
        return {**_late(team, pair, case.ranks.index(dist.get_rank()) == 0), **bench.telemetry.read()}
    rough = {work: max(team.all(loop(work, 5))) for work in (pair.kernel, pair.collective)}
    row: MeasuredFigures = {}
    for name, lead, other in (("kernel", pair.kernel, pair.collective), ("collective", pair.collective, pair.kernel)):
        alone, beside = _beside(team, lead, rough[lead], other, rough[other])
        row |= {f"{name}_s": alone["time_s"], f"{name}_beside_s": beside["time_s"]}
        row |= {f"{name}_beside_p10_s": beside["p10_s"], f"{name}_beside_p90_s": beside["p90_s"]}
    return {**row, **bench.telemetry.read()}


@dataclass(frozen=True)
class Pair:
    kernel: Work
    collective: Work


def prepared(kernel_case: Case, case: Case, bench: Bench, team: Team) -> Pair:
    """The kernel of ``kernel_case`` and the collective of ``case``. Raises `UnavailableError`."""

    def prepare() -> Pair:
        op = "send" if case.op == LATE else case.op
        return Pair(
            MODULES[kernel_case.kind].prepare(kernel_case, bench),
            collectives.prepare(Case("collective", op, case.params, case.ranks), bench, team.data),
        )

    if not bench.cuda:
        raise UnavailableError("a CPU has no streams to run side by side")
    return team.together(prepare)


def _count(each_s: float) -> int:
    return max(4, min(400, math.ceil(WINDOW_S / each_s)))


def loop(work: Work, n: int) -> float:
    work.run(0)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for i in range(n):
        work.run(i % work.sets)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / n


def _beside(
    team: Team, lead: Work, lead_s: float, other: Work, other_s: float
) -> tuple[MeasuredFigures, MeasuredFigures]:
    """Seconds of ``lead`` alone, and while ``other`` runs on another stream from before its start until after its end.

    Both in turn and in the same way, so that the GPU's clock is the same. All members issue the same numbers of runs;
    where ``other`` ended too early anywhere (it may slow ``lead`` manifold), all try again with more of it.
    """
    n, per_lead = _count(lead_s), 2.0 * lead_s / other_s
    side = torch.cuda.Stream()
    for _ in range(ATTEMPTS):
        n = max(2, min(n, int(QUEUE / max(1.0, per_lead))))
        m = max(2, math.ceil(n * per_lead))
        hold_s, races = 0.0, []
        for _ in range(RACES + 1):  # the first tells how long to hold
            team.barrier()
            alone = race(lead, n, other, 0, side, hold_s)
            team.barrier()
            beside = race(lead, n, other, m, side, hold_s)
            hold_s = 1.5 * beside.host_s
            races.append((alone.lead_s, beside.lead_s, beside.margin_s >= 0))
        member_races = team.all(races[1:])
        if all(covered for member in member_races for _, _, covered in member):
            slowest = [
                [max(times) for times in zip(*at_once, strict=True)] for at_once in zip(*member_races, strict=True)
            ]
            return summary([alone for alone, _, _ in slowest]), summary([beside for _, beside, _ in slowest])
        n, per_lead = n // 4, per_lead * 6
    raise UnavailableError("the other stream could not be kept busy throughout")


def _late(team: Team, pair: Pair, sends: bool) -> MeasuredFigures:
    """Seconds of the receiver's kernel alone, and while its receive waits: the sender sends when all have ended."""
    each_s = max(team.all(loop(pair.kernel, 5)))
    loop(pair.collective, 1)  # connections are made
    torch.cuda.synchronize()
    n, side = min(_count(each_s), QUEUE), torch.cuda.Stream()
    races = []
    for _ in range(RACES + 1):
        team.barrier()
        alone_s = 0.0 if sends else _waiting(pair.kernel, n, lambda: None, side)
        receive = functools.partial(pair.collective.run, 0)
        beside_s = 0.0 if sends else _waiting(pair.kernel, n, receive, side)
        waited = sends or not side.query()
        team.barrier()
        if sends:
            pair.collective.run(0)
        torch.cuda.synchronize()
        if not all(team.all(waited)):
            raise UnavailableError("the receive did not wait")
        races.append((alone_s, beside_s))
    received = max(team.all(races[1:]))  # the sender has measured nothing
    alone, beside = (summary([race[which] for race in received]) for which in (0, 1))
    return {
        "kernel_s": alone["time_s"],
        "kernel_beside_s": beside["time_s"],
        "kernel_beside_p10_s": beside["p10_s"],
        "kernel_beside_p90_s": beside["p90_s"],
    }


def _waiting(kernel: Work, n: int, receive: Callable[[], object], side: torch.cuda.Stream) -> float:
    """Seconds of a run of the kernel, ``receive`` having begun before on another stream."""
    with torch.cuda.stream(side):
        receive()
    torch.cuda._sleep(int(HEAD_START_S * SLEEP_HZ))
    return loop(kernel, n)


@dataclass(frozen=True)
class Race:
    """Seconds of a run of the lead, by which the other ended later, and that the host took to issue both."""

    lead_s: float
    margin_s: float
    host_s: float


def race(lead: Work, n: int, other: Work, m: int, side: torch.cuda.Stream, hold_s: float) -> Race:
    """Both streams are held for ``hold_s`` while the host issues everything; ``other``, if it runs, starts first."""
    first, start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    main = torch.cuda.current_stream()
    torch.cuda._sleep(int(min(hold_s, 0.2) * SLEEP_HZ) + 1000)
    side.wait_stream(main)
    began, issued = time.perf_counter(), 0

    def issue(upto: int) -> None:
        nonlocal issued
        with torch.cuda.stream(side):
            while issued < upto:
                other.run(issued % other.sets)
                issued += 1

    issue(min(1, m))
    with torch.cuda.stream(side):
        first.record()
    issue(min(2, m))
    main.wait_event(first)
    lead.run(0)
    start.record()
    for i in range(n):
        lead.run(i % lead.sets)
        issue(math.ceil((i + 1) * m / n))
    end.record()
    with torch.cuda.stream(side):
        last.record()
    host_s = time.perf_counter() - began
    torch.cuda.synchronize()
    return Race(start.elapsed_time(end) * 1e-3 / n, end.elapsed_time(last) * 1e-3, host_s)
