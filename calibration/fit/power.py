"""The power limit: what classes of kernels draw and how their speed follows the clock, from kernels run for seconds.

A kernel alone (`calibration.measure.sustained`) has the highest clock in its first batch and what the limit leaves it
later; products that share the GPU's time with waiting (`calibration.measure.shared`) have clocks in between.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.fit import attention, matmul
from calibration.fit.cases import Cases, Measured
from calibration.fit.part import Part, Point, rounded
from simulator.config.power import LoadClass, Power
from simulator.config.profile import Profile
from simulator.costs import Costs
from simulator.costs.power import Loads, PowerBudget
from simulator.program import Kernel

EXPONENT = 2.0  # assumed until products that share the time were measured
ASSUMED = "exponent assumed; products follow the clock as attention does, as even their first batch is slowed"
SETTLING_S = 0.1  # clocks follow the power within about 50 ms
MEMORY_OPS = ("copy", "residual_add")
ARITHMETIC_OPS = ("layer_norm", "gelu", "cast_bf16_fp32", "bias_grad", "swiglu_split")


#: What stands between products -> its class.
OTHERS: Mapping[str, LoadClass] = {"copy": "memory", "attention_fwd": "attention", "attention_bwd": "attention"}


@dataclass(frozen=True)
class _Run:
    """The later half of seconds on end: mean clock and power, seconds of a kernel; ``first_s``: at the beginning.
    ``share``: of the time that the kernel runs."""

    clock_hz: float
    watts: float
    seconds: float
    first_s: float
    share: float = 1.0

    @classmethod
    def of(cls, case: Measured) -> _Run:
        row = case.row
        late = len(row["sm_mhz"]) // 2
        return cls(
            clock_hz=statistics.fmean(row["sm_mhz"][late:]) * 1e6,
            watts=statistics.fmean(row["power_w"][late:]),
            seconds=statistics.median(row["series_s"][len(row["series_s"]) // 2 :]),
            first_s=float(row["series_s"][0]),
            share=float(row.get("share", 1.0)),
        )


def fit(cases: Cases, profile: Profile) -> Part:
    """The section ``power``; nothing where no kernels of some class were run for seconds under the limit."""
    lasting = [case for case in cases.of("sustained") if case.row.get("sm_mhz")]
    products = [case for case in lasting if case.op == "mm" and case.params["dtype"] == "bf16"]
    backends = {str(case.params["backend"]) for case in lasting if "backend" in case.params}
    backend = next((name for name in attention.DEFAULT_BACKENDS if name in backends), None)
    attentions = [case for case in lasting if case.params.get("backend") == backend and backend]
    streams, arithmetic = (
        [_Run.of(case) for case in lasting if case.op in ops] for ops in (MEMORY_OPS, ARITHMETIC_OPS)
    )
    idle = [float(case.row["power_w"]) for case in cases.of("copy") if "power_w" in case.row]
    moving = [float(case.row["power_w"]) for case in cases.of("collective") if "power_w" in case.row]
    base = profile.power
    shared = [case for case in cases.of("shared") if case.row.get("sm_mhz")]
    waiting = [case for case in shared if _beside(case, "wait")]
    if not (products and attentions and streams and arithmetic and idle and (moving or base)):
        return Part({})
    highest_hz = max(float(mhz) for case in lasting for mhz in case.row["sm_mhz"]) * 1e6
    alone = [_Run.of(case) for case in products]
    slowed = _from_the_first([_Run.of(case) for case in attentions], highest_hz)
    exponent, speed_exponent = EXPONENT, slowed
    if waiting:
        sizes = {name: waiting[0].params[name] for name in ("m", "n", "k")}
        alike = [case for case in products if all(case.params[name] == size for name, size in sizes.items())]
        exponent, speed_exponent = _exponents([_Run.of(case) for case in (*waiting, *alike)], min(idle))

    def highest_w(runs: Sequence[_Run]) -> float:
        drawn = [(run.watts - min(idle)) * (highest_hz / run.clock_hz) ** exponent for run in runs]
        return rounded(min(idle) + statistics.fmean(drawn))

    constant = {"clock_hz": highest_hz, "priced_at_hz": highest_hz, "speed_exponent": 0.0}
    loads: dict[str, Any] = {
        "matmul": _load(products, profile, speed_exponent),
        "attention": _load(attentions, profile, slowed),
        "arithmetic": {"watts": highest_w(arithmetic)} | constant | {"speed_exponent": rounded(slowed, 3)},
        "memory": {"watts": highest_w(streams)} | constant,
    }
    if moving:
        loads["communication"] = {"watts": max(moving)} | constant
    elif base:
        loads["communication"] = base.loads["communication"].model_dump()
    notes = [*(["communication as on another GPU"] if not moving else []), *([] if waiting else [ASSUMED])]
    figures = {
        "limit_w": rounded(statistics.fmean(run.watts for run in alone)),
        "idle_w": min(idle),
        "highest_clock_hz": highest_hz,
        "exponent": rounded(exponent, 3),
        "loads": loads,
        **cases.cited,
        "note": "; ".join(notes),
    }
    power = _in_turns(Power.model_validate(figures), shared, attentions, profile)
    return Part({"power": power.model_dump()}, [_point(case, power, profile) for case in shared])


def _in_turns(power: Power, shared: Sequence[Measured], attentions: Sequence[Measured], profile: Profile) -> Power:
    """With what attention and copies do in turns with products that are too short for clocks to follow, as in a step.

    How much slower the products are than at the highest clock says what the clock was. Attention's speed follows it
    from its first batch alone, at the highest clock. Copies draw what leaves products the time that they took.
    """
    if beside := [case for case in shared if _beside(case, "attention_fwd", "attention_bwd")]:
        first = {case.op: _Run.of(case).first_s for case in attentions}
        slower = [
            (
                math.log(float(case.row["other_s"]) / first[str(case.params["beside"])]),
                math.log(power.highest_clock_hz / _clock_hz(case, power, profile)),
            )
            for case in beside
        ]
        speed_exponent = statistics.fmean(seconds / clock for seconds, clock in slower)
        power = _with(power, "attention", _load(attentions, profile, speed_exponent, power.highest_clock_hz))
    if beside := [case for case in shared if _beside(case, "copy")]:

        def too_slow(watts: float) -> float:
            tried = _with(power, "memory", {"watts": watts})
            return statistics.fmean(_point(case, tried, profile).error for case in beside)

        low, high = power.idle_w + 1, power.loads["memory"].watts
        if too_slow(low) < 0 < too_slow(high):
            while high - low > 0.1:
                middle = (low + high) / 2
                low, high = (low, middle) if too_slow(middle) > 0 else (middle, high)
            power = _with(power, "memory", {"watts": rounded(low)})
    return power


def _with(power: Power, kind: LoadClass, changes: Mapping[str, float]) -> Power:
    return power.model_copy(update={"loads": {**power.loads, kind: power.loads[kind].model_copy(update=dict(changes))}})


def _clock_hz(case: Measured, power: Power, profile: Profile) -> float:
    """The clock at which the model has the products of a case take as long as they took."""
    load = power.loads["matmul"]
    seconds = Costs.from_profile(profile, "eager").kernel_s(kernel_of(case), profile.gpu)
    return float(load.priced_at_hz * (seconds / _Run.of(case).seconds) ** (1 / load.speed_exponent))


def _beside(case: Measured, *others: str) -> bool:
    """Products in turns with one of these that are too short for clocks to follow: what is fitted."""
    return case.params["beside"] in others and float(case.params["period_s"]) < SETTLING_S


def kernel_of(case: Measured) -> Kernel:
    """The kernel that a case runs on end."""
    if case.op.startswith("attention"):
        return attention.kernel_of(Measured("attention", case.op.removeprefix("attention_"), case.params, (0,), {}))
    return matmul.kernel_of(Measured("matmul", case.op, case.params, (0,), {}))


def _load(
    cases: Sequence[Measured], profile: Profile, speed_exponent: float, first_hz: float | None = None
) -> dict[str, float]:
    """Watts and clock, means over the cases, and the clock at which their prices are what they took.

    ``first_hz``: what the clock was in their first batch, from which their speed then says what it was; without it the
    clock is what was read.
    """
    runs, costs = [_Run.of(case) for case in cases], Costs.from_profile(profile, "eager")
    clocks = [
        run.clock_hz if first_hz is None else first_hz * (run.first_s / run.seconds) ** (1 / speed_exponent)
        for run in runs
    ]
    clock_hz = statistics.geometric_mean(clocks)
    slower = statistics.geometric_mean(
        run.seconds / costs.kernel_s(kernel_of(case), profile.gpu) for case, run in zip(cases, runs, strict=True)
    )
    return {
        "watts": rounded(statistics.fmean(run.watts for run in runs)),
        "clock_hz": rounded(clock_hz),
        "priced_at_hz": rounded(clock_hz * slower ** (1 / speed_exponent)),
        "speed_exponent": rounded(speed_exponent, 3),
    }


def _from_the_first(runs: Sequence[_Run], highest_hz: float) -> float:
    """The speed exponent by which kernels slow down from their first batch, at the highest clock."""
    return statistics.fmean(math.log(run.seconds / run.first_s) / math.log(highest_hz / run.clock_hz) for run in runs)


def _exponents(runs: Sequence[_Run], idle_w: float) -> tuple[float, float]:
    """(of power, of speed): slopes against the clock, both logarithmic."""
    clock = np.log([run.clock_hz for run in runs])
    watts = np.log([(run.watts - idle_w) / run.share for run in runs])
    seconds = np.log([run.seconds for run in runs])
    return float(np.polyfit(clock, watts, 1)[0]), -float(np.polyfit(clock, seconds, 1)[0])


def _point(case: Measured, power: Power, profile: Profile) -> Point:
    """Seconds of a product that has a share of the GPU's time, at the clock that the budget leaves it."""
    run, kernel, other = _Run.of(case), kernel_of(case), OTHERS.get(str(case.params["beside"]))
    budget, costs = PowerBudget(power), Costs.from_profile(profile.model_copy(update={"power": power}), "eager")
    rest_s = run.seconds * (1 / run.share - 1)
    highest_s = costs.kernel_s(kernel, profile.gpu, budget.highest_hz)
    loads = Loads({"matmul": highest_s}, {"matmul": highest_s})
    if other is not None:
        rest_s *= (_clock_hz(case, power, profile) / budget.highest_hz) ** power.loads[other].speed_exponent
        loads.add(other, rest_s, rest_s)
    clock_hz = budget.clock_hz(loads, highest_s + rest_s, budget.highest_hz)
    fitted_s = costs.kernel_s(kernel, profile.gpu, clock_hz)
    held_out = not _beside(case, "wait", "copy")
    return Point(f"power.{case.params['beside']}", run.share, run.seconds, fitted_s, held_out)
