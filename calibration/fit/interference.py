"""What NCCL's communication takes from kernels beside it: the SMs that it holds, and memory bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from calibration.fit.cases import MEASURED, Cases, Measured
from calibration.fit.part import Part, Point, rounded
from simulator.config.profile import Profile
from simulator.costs.costs import beside
from simulator.program import Attention, Kernel, Matmul

#: Kernels of `calibration.measure.interference` as the simulator prices them; the others are bound by memory.
RACED: dict[str, Kernel] = {
    "matmul": Matmul(8192, 8192, 8192),
    "matmul_small": Matmul(2048, 4096, 4096),
    "attention": Attention(2, 32, 32, 4096, 4096, 128),
    "attention_bwd": Attention(2, 32, 32, 4096, 4096, 128, backward=True),
}
#: Numbers of SMs that are tried: NCCL has up to 32 channels.
SMS = range(4, 33, 2)
#: Kernels in a row of a race, enough that it does not matter where it ends.
RACE = 200


def race(kernel_s: float, collective_s: float, speed: float, kernels: int = RACE) -> float:
    """Slow-down of kernels in a row beside collectives in a row: one begins when a kernel ends, the next is posted
    when it has ended, and kernels run at ``speed`` while one is in flight."""
    now, free_at = 0.0, 0.0
    for _ in range(kernels):
        if free_at <= now:
            free_at = now + collective_s
        slowed_s = min(kernel_s / speed, free_at - now)
        now += slowed_s + kernel_s - slowed_s * speed
    return now / (kernels * kernel_s)


def fit(cases: Cases, profile: Profile) -> Part:
    """Fit ``interference``: on all groups but those of 3, which are held out."""
    rows = cases.of("interference")
    fitted = [case for case in rows if len(case.ranks) != 3]
    if not fitted:
        return Part({})
    names = {case.params["kernel"] for case in fitted}
    sms = min(SMS, key=lambda n: _off(fitted, ("attention", "attention_bwd"), _with(profile, n, n)))
    matmul_sms = 2 * min(SMS, key=lambda n: _off(fitted, ("matmul", "matmul_small"), _with(profile, 2 * n, 2 * n)))
    memory_speed = {
        "norm": _speed(fitted, "layer_norm") if "layer_norm" in names else 1.0,
        "other": _speed(fitted, "residual_add") if "residual_add" in names else 1.0,
    }
    figures = {
        "sms": sms,
        "matmul_sms": matmul_sms,
        "memory_speed": memory_speed,
        "kind": "measured",
        "source": MEASURED,
    }
    speed = _with(profile, sms, matmul_sms, memory_speed)
    points = [
        Point(
            f"interference.{case.params['kernel']}.{len(case.ranks)}",
            float(case.params["bytes"]),
            float(case.row["kernel_beside_s"]),
            float(case.row["kernel_s"]) * slow_down(case, speed),
            len(case.ranks) == 3,
        )
        for case in rows
    ]
    return Part({"interference": figures}, points)


Speed = Callable[[str], float]


def _with(profile: Profile, sms: int, matmul_sms: int, memory: Mapping[Any, float] | None = None) -> Speed:
    """Speeds of the kernels that were raced, with so many SMs less."""
    model = profile.interference.model_copy(
        update={"sms": sms, "matmul_sms": matmul_sms, "memory_speed": memory or {"norm": 1.0, "other": 1.0}}
    )
    shared = beside(profile.model_copy(update={"interference": model}))
    assert shared is not None

    def of(name: str) -> float:
        kernel = RACED.get(name)
        if kernel is None:
            return model.memory_speed["norm" if name == "layer_norm" else "other"]
        return shared.speed(kernel, True)

    return of


def speeds(profile: Profile) -> Speed:
    """Speeds of the kernels that were raced, as a profile has them."""
    model = profile.interference
    return _with(profile, model.sms, model.matmul_sms, model.memory_speed)


def slow_down(case: Measured, speed: Speed) -> float:
    """That of a measured kernel, by the race of the two."""
    return race(float(case.row["kernel_s"]), float(case.row["collective_s"]), speed(str(case.params["kernel"])))


def _off(cases: Iterable[Measured], kernels: Sequence[str], speed: Speed) -> float:
    """Mean distance between the measured slow-downs of some kernels and those of a race."""
    known = {name: speed(name) for name in kernels}
    return statistics.fmean(
        abs(slow_down(case, known.__getitem__) - float(case.row["kernel_beside_s"]) / float(case.row["kernel_s"]))
        for case in cases
        if case.params["kernel"] in kernels
    )


def _speed(cases: Iterable[Measured], kernel: str) -> float:
    """The speed of a kernel at which races come out as measured."""
    candidates = [rounded(0.4 + 0.01 * step) for step in range(61)]
    chosen = [case for case in cases if case.params["kernel"] == kernel]
    return min(candidates, key=lambda speed: _off(chosen, (kernel,), lambda _: speed))
