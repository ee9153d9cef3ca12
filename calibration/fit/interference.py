"""Interference of NCCL's communication and kernels beside it.

Communication holds SMs and, once it moves bytes, takes memory bandwidth; kernels leave it a share of the latter.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from calibration.fit.cases import MEASURED, Cases, MeasuredCase
from calibration.fit.part import FittedPoint, ProfilePart, rounded
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.costs.interference import memory_bytes
from simulator.frameworks.pytorch import FRAMEWORK as PYTORCH
from simulator.hardware.interference import HeldSms, Interference
from simulator.hardware.profile import Profile
from simulator.network.collectives import bus_factor
from simulator.program import (
    Attention,
    Axis,
    Collective,
    CollectiveKind,
    Comm,
    Kernel,
    Matmul,
    Memory,
    PointToPoint,
    PointToPointKind,
    Purpose,
)

#: Kernels of `calibration.measure.interference` as the simulator prices them: those that SMs bound, and memory.
RACED: dict[str, Kernel] = {
    "matmul": Matmul(8192, 8192, 8192),
    "matmul_small": Matmul(2048, 4096, 4096),
    "attention": Attention(2, 32, 32, 4096, 4096, 128),
    "attention_bwd": Attention(2, 32, 32, 4096, 4096, 128, backward=True),
}
STREAMS: dict[str, Kernel] = {"layer_norm": Memory("norm", 1.0, 1.0), "residual_add": Memory("residual", 2.0, 1.0)}
#: Class of a profile's ``leaves`` -> kernels of its fit.
LEAVING = {
    "matmul": ("matmul", "matmul_small"),
    "attention": ("attention",),
    "norm": ("layer_norm",),
    "other": ("residual_add",),
}
#: A receive whose sender is late: the only case in which nothing moves.
LATE = "late_send"
#: Between two GPUs; the rest are collectives.
P2P = (LATE, "send_recv")
#: Numbers of SMs that are tried: NCCL has up to 32 channels.
SMS = range(4, 33, 2)
#: Of the memory's time: whatever moves beside such kernels is as fast as alone.
ALL = 1.0
ORIGIN = {"kind": "measured", "source": MEASURED, "note": ""}
#: Kernels in a row of a race, enough for its end not to matter.
RACE = 200


def race(kernel_s: float, collective_s: float, speed: float, kernels: int = RACE) -> float:
    """Return the slow-down of kernels in a row beside collectives in a row.

    A collective begins when a kernel ends, and the next is posted after its end. Kernels run at ``speed`` while a
    collective is in flight.
    """
    now, free_at = 0.0, 0.0
    for _ in range(kernels):
        if free_at <= now:
            free_at = now + collective_s
        slowed_s = min(kernel_s / speed, free_at - now)
        now += slowed_s + kernel_s - slowed_s * speed
    return now / (kernels * kernel_s)


def fit(cases: Cases, profile: Profile) -> ProfilePart:
    """Fit ``interference``. Held out: all of some numbers of GPUs (`Cases.held_out`). What was not measured stays as it
    was."""
    rows = cases.rows_of("interference")
    apart = cases.held_out(rows)
    fitted = [case for case in rows if len(case.ranks) not in apart]
    if not fitted:
        return ProfilePart({})
    late, moving = [case for case in fitted if case.op == LATE], [case for case in fitted if case.op != LATE]
    model = profile.interference
    figures: dict[str, Any] = as_data(model)
    attention, products = _rows_of(fitted, "attention", "attention_bwd"), _rows_of(fitted, "matmul", "matmul_small")
    if attention and products:
        figures |= {
            "sms": {
                "collective": _sms([case for case in attention if case.op not in P2P], profile),
                "p2p": _sms([case for case in attention if case.op in P2P], profile),
            },
            "matmul_sms": _sms(products, profile, pairs=True),
            **ORIGIN,
        }
    for name, some in (("memory_speed", moving), ("waiting_speed", late)):
        norms, residual_adds = _rows_of(some, "layer_norm"), _rows_of(some, "residual_add")
        if norms and residual_adds:
            figures[name] = {"norm": _speed(norms), "other": _speed(residual_adds)} | ORIGIN
    shown = {name: beside_kernels(cases, kernels) for name, kernels in LEAVING.items()}
    shares = {
        name: _share([case for case in some if len(case.ranks) not in apart], profile) for name, some in shown.items()
    }
    if all(shares.values()):
        figures["leaves"] = {
            **shares,
            **ORIGIN,
            "note": _unslowed(name for name, share in shares.items() if share == ALL),
        }
    speed = speeds(replace(profile, interference=validated(Interference, figures)))
    points = [
        FittedPoint(
            f"interference.{case.params['kernel']}.{len(case.ranks)}",
            float(case.params["bytes"]),
            float(case.row["kernel_beside_s"]),
            float(case.row["kernel_s"]) * slow_down(case, speed),
            len(case.ranks) in apart,
        )
        for case in rows
    ]
    points += [
        FittedPoint(
            f"{'moving' if case.kind == 'moving' else 'interference.collective'}.{name}.{len(case.ranks)}",
            float(case.params["bytes"]),
            slowed_s(case),
            collective_s(case, figures["leaves"][name], profile),
            len(case.ranks) in apart,
        )
        for name, some in shown.items()
        for case in some
    ]
    return ProfilePart({"interference": figures}, points)


def collective_s(case: MeasuredCase, leaves: float, profile: Profile) -> float:
    """Return the seconds of a measured collective beside a kernel that leaves it this share of the memory's time.

    Where both came in a row it waits until the last of n ranks has ended its kernel. Kernels end at any time, so that
    the wait is n / (n + 1) of a kernel.
    """
    n = len(case.ranks)
    waits_s = n / (n + 1) * float(case.row["kernel_beside_s"]) if case.kind == "interference" else 0.0
    return waits_s + _alone_s(case) * max(1.0, takes(case, profile) / leaves)


def takes(case: MeasuredCase, profile: Profile) -> float:
    """The share of the memory's time that a measured collective takes at full speed."""
    shared = Costs.from_profile(profile, PYTORCH).interference
    assert shared is not None
    n, nbytes = len(case.ranks), float(case.params["bytes"])
    moved = memory_bytes(_comm(case.op, nbytes), n, nbytes * bus_factor(case.op, n))
    return shared.takes(moved / _alone_s(case))


def _comm(op: str, nbytes: float = 0.0) -> Comm:
    """Return communication of a kind between no ranks in particular."""
    if op in list(PointToPointKind):
        return PointToPoint("", PointToPointKind(op), nbytes, Axis.PP, Purpose.PIPELINE, peer=0)
    return Collective("", CollectiveKind(op), nbytes, Axis.DP, Purpose.DATA)


def _alone_s(case: MeasuredCase) -> float:
    return float(case.row["collective_s"]) if case.kind == "interference" else case.seconds


def slowed_s(case: MeasuredCase) -> float:
    """Seconds of a collective as measured beside its kernel: in a row, or from when its bytes move."""
    return float(case.row["collective_beside_s" if case.kind == "interference" else "beside_s"])


def beside_kernels(cases: Cases, kernels: Collection[str]) -> list[MeasuredCase]:
    """Collectives beside some kernels, by the profiler where it was asked, else those in a row that do not mostly wait;
    sends, which have less, apart."""
    in_row = [case for case in cases.rows_of("interference") if case.op != LATE]
    long = [case for case in in_row if float(case.row["kernel_beside_s"]) < float(case.row["collective_s"])]
    return [case for case in _rows_of(cases.rows_of("moving") or long, *kernels) if case.op not in P2P]


def _share(cases: Sequence[MeasuredCase], profile: Profile) -> float:
    """Return the share of the memory's time that kernels leave to the collectives beside them; 0: not measured.

    The share is `ALL` where the best one slows no collective: every larger one explains them as well.
    """
    if not cases:
        return 0.0

    def off(share: float) -> float:
        return sum(abs(collective_s(case, share, profile) / slowed_s(case) - 1) for case in cases)

    best = min((rounded(0.01 * step) for step in range(5, 61)), key=off)
    return best if best < max(takes(case, profile) for case in cases) else ALL


def _unslowed(names: Iterable[str]) -> str:
    told = ", ".join(names)
    return f"1: no smaller share explains collectives beside {told} better" if told else ""


#: Of a kernel that was raced, beside what it was raced with.
Speed = Callable[[str, str], float]


def speeds(profile: Profile) -> Speed:
    """Speeds as a profile has them."""
    shared = Costs.from_profile(profile, PYTORCH).interference
    assert shared is not None

    def speed(name: str, op: str) -> float:
        comm = [_comm("recv" if op in P2P else op)]
        return shared.speed((RACED | STREAMS)[name], shared.load(comm, []) if op == LATE else shared.load([], comm))

    return speed


def slow_down(case: MeasuredCase, speed: Speed) -> float:
    """Return the slow-down of a measured kernel: by the race of the two, or beside a receive that waits throughout."""
    beside = speed(case.word("kernel", RACED | STREAMS), case.op)
    if case.op == LATE:
        return 1 / beside
    return race(float(case.row["kernel_s"]), float(case.row["collective_s"]), beside)


def _rows_of(cases: Iterable[MeasuredCase], *kernels: str) -> list[MeasuredCase]:
    return [case for case in cases if case.params["kernel"] in kernels]


def _off(cases: Sequence[MeasuredCase], speed: Speed) -> float:
    """Mean distance between measured slow-downs and those that follow from ``speed``."""
    return statistics.fmean(
        abs(slow_down(case, speed) - float(case.row["kernel_beside_s"]) / float(case.row["kernel_s"])) for case in cases
    )


def _sms(cases: Sequence[MeasuredCase], profile: Profile, *, pairs: bool = False) -> int:
    """How many SMs less explain the cases best, two for each that NCCL holds with ``pairs``."""

    def off(sms: int) -> float:
        sms_by_kind = HeldSms(collective=sms, p2p=sms)
        model = replace(profile.interference, sms=sms_by_kind, matmul_sms=sms)
        return _off(cases, speeds(replace(profile, interference=model)))

    return min((2 * sms for sms in SMS) if pairs else SMS, key=off)


def _speed(cases: Sequence[MeasuredCase]) -> float:
    """The speed of a kernel at which its cases come out as measured."""
    candidates = [rounded(0.4 + 0.01 * step) for step in range(61)]
    return min(candidates, key=lambda speed: _off(cases, lambda *_: speed))
