"""The power limit: what classes of kernels draw and how their speed follows the clock, from kernels run for seconds.

A kernel alone (`calibration.measure.sustained`) has the highest clock in its first batch. Later it has the clock that
the limit leaves it. Products that share the GPU's time with waiting (`calibration.measure.shared`) have clocks in
between.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibration.fit import attention, matmul
from calibration.fit.cases import Cases, MeasuredCase
from calibration.fit.part import Constants, FittedPoint, ProfilePart, rounded, search
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.costs.power import Drawn, PowerBudget, load_class, longer, useful_hz
from simulator.frameworks.pytorch import FRAMEWORK as PYTORCH
from simulator.hardware.power import LoadClass, Power
from simulator.hardware.profile import Profile
from simulator.program import Kernel

#: Of products on an H200 (its calibration), assumed of GPUs whose products were not measured sharing the time.
EXPONENT, SPEED_EXPONENT, HIGHEST, AVERAGED_S = 1.71, 0.709, 0.945, 0.043
ASSUMED = (
    "how power and speed follow the clock and up to which, and how long the limit averages, are assumed: as on an H200"
)
SETTLING_S = 0.1  # clocks follow the power within tens of milliseconds
MEMORY_OPS = ("copy", "residual_add", "bias_grad")
ARITHMETIC_OPS = ("layer_norm", "gelu", "cast_bf16_fp32", "swiglu_split")
#: Products no faster at more than this share of the clock are as fast as they get.
CEILINGS = np.linspace(0.8, 1.0, 41)
REACHED = 0.02  # so near, a clock counts as the highest
DIFFERENT = 0.05  # logarithms of clocks that a slope can be told from

#: What stands between products -> its class.
OTHERS: Mapping[str, LoadClass] = {
    **dict.fromkeys(("copy", "residual_add", "bias_grad"), "memory"),
    **dict.fromkeys(("gelu", "gelu_bwd"), "arithmetic"),
    **dict.fromkeys(("layer_norm", "layer_norm_bwd"), "norm"),
    **dict.fromkeys(("attention_fwd", "attention_bwd"), "attention"),
}
#: Of streams in turns with products (`calibration.measure.shared`).
SIZES = {"rows": 32768, "width": 4096}


@dataclass(frozen=True)
class _LastingRun:
    """The later half of seconds on end: mean clock and power, seconds of a kernel; ``first_s``: at the beginning.
    ``share``: of the time that the kernel runs."""

    clock_hz: float
    watts: float
    seconds: float
    first_s: float
    share: float = 1.0

    @classmethod
    def from_case(cls, case: MeasuredCase) -> _LastingRun:
        row = case.row
        late = len(row["sm_mhz"]) // 2
        return cls(
            clock_hz=statistics.fmean(row["sm_mhz"][late:]) * 1e6,
            watts=statistics.fmean(row["power_w"][late:]),
            seconds=statistics.median(row["series_s"][len(row["series_s"]) // 2 :]),
            first_s=float(row["series_s"][0]),
            share=float(row.get("share", 1.0)),
        )


@dataclass(frozen=True)
class _Law:
    """How a class follows the clock, up to ``highest_hz``: exponents of its speed and of what it draws."""

    highest_hz: float
    speed: float
    power: float

    def figures(self) -> dict[str, float]:
        return {
            "highest_clock_hz": rounded(self.highest_hz),
            "speed_exponent": rounded(self.speed, 3),
            "power_exponent": rounded(self.power, 3),
        }


def fit(cases: Cases, profile: Profile) -> ProfilePart:
    """The section ``power``; nothing where no kernels of some class were run for seconds under the limit."""
    lasting = [case for case in cases.rows_of("sustained") if case.row.get("sm_mhz")]
    half = "bf16" if "bf16" in profile.gpu_spec.peak_flops_per_s else "fp16"
    products = [case for case in lasting if case.op == "mm" and case.params["dtype"] == half]
    backends = {str(case.params["backend"]) for case in lasting if "backend" in case.params}
    backend = next((name for name in attention.DEFAULT_BACKENDS if name in backends), None)
    attentions = [case for case in lasting if case.params.get("backend") == backend and backend]
    streamed = [case for case in lasting if case.op in (*MEMORY_OPS, *ARITHMETIC_OPS)]
    streams, arithmetic = (
        [_LastingRun.from_case(case) for case in streamed if case.op in ops] for ops in (MEMORY_OPS, ARITHMETIC_OPS)
    )
    idle = [float(case.row["power_w"]) for case in cases.rows_of("copy") if "power_w" in case.row]
    moving = [float(case.row["power_w"]) for case in cases.rows_of("collective") if "power_w" in case.row]
    base = profile.power
    shared = [case for case in cases.rows_of("shared") if case.row.get("sm_mhz")]
    shared = [case for case in shared if case.op != "mm" or matmul.is_of(case, profile.gpu_spec)]
    side = max((case.params["m"] for case in shared if case.op == "mm"), default=0)
    alike = [case for case in shared if case.op == "mm" and _cube(case) == side]
    waiting = [case for case in alike if _beside(case, "wait")]
    if not (products and attentions and streams and arithmetic and idle and (moving or base)):
        return ProfilePart({})
    highest_hz = max(float(mhz) for case in lasting for mhz in case.row["sm_mhz"]) * 1e6
    alone = [_LastingRun.from_case(case) for case in products]
    law = _Law(HIGHEST * highest_hz, SPEED_EXPONENT, EXPONENT)
    if waiting:
        on_end = [case for case in products if _cube(case) == side]
        law = _law([_LastingRun.from_case(case) for case in (*waiting, *on_end)], min(idle), highest_hz)
    scores = _fastest(attentions, _Law(highest_hz, law.speed, law.power))

    loads: dict[str, Any] = {
        "matmul": _load(products, profile, law),
        "attention": _load(attentions, profile, scores),
        "arithmetic": _streaming(arithmetic, scores, min(idle)),
        "norm": _streaming(arithmetic, scores, min(idle)),
        "memory": _streaming(streams, _Law(highest_hz, 0.0, law.power), min(idle)),
    }
    if moving:
        loads["communication"] = _streaming(streams, _Law(highest_hz, 0.0, 0.0), min(idle)) | {"watts": max(moving)}
    elif base:
        loads["communication"] = as_data(base.loads["communication"])
    notes = [*(["communication as on another GPU"] if not moving else []), *([] if waiting else [ASSUMED])]
    figures = {
        "limit_w": rounded(statistics.fmean(run.watts for run in alone)),
        "averaged_s": AVERAGED_S,
        "idle_w": min(idle),
        "highest_clock_hz": highest_hz,
        "loads": loads,
        **cases.cited,
        "note": "; ".join(notes),
    }
    alone_s = {case.op: case.seconds for case in cases.rows_of("memory") if case.params == SIZES}
    power = _in_turns(validated(Power, figures), alike, attentions, alone_s, profile)
    points = [_point(case, power, profile, held_out=case not in alike) for case in shared]
    return ProfilePart({"power": as_data(power)}, points)


def _streaming(runs: Sequence[_LastingRun], law: _Law, idle_w: float) -> dict[str, float]:
    """Return what a class draws at its highest clock, from kernels that ran at clocks of the limit."""
    drawn = [
        (run.watts - idle_w) * (law.highest_hz / useful_hz(run.clock_hz, law.highest_hz)) ** law.power for run in runs
    ]
    return {"watts": rounded(idle_w + statistics.fmean(drawn))} | _at_highest(law) | law.figures()


def _in_turns(
    power: Power,
    shared: Sequence[MeasuredCase],
    attentions: Sequence[MeasuredCase],
    alone_s: Mapping[str, float],
    profile: Profile,
) -> Power:
    """Return ``power`` with the loads of kernels in turns with products, and the seconds that the limit averages.

    Loads follow from turns that are too short for clocks to follow, as in a step; the seconds from longer turns.
    ``attentions``: cases of seconds on end; ``alone_s``: seconds of streams alone, by op.
    """
    turns: dict[str, list[MeasuredCase]] = {}
    for case in shared:
        if _beside(case, *OTHERS):
            turns.setdefault(OTHERS[str(case.params["beside"])], []).append(case)
    follows = power.loads["matmul"].power_exponent
    if speed := _following(turns.get("attention", []), attentions, power, profile):
        law = _fastest(attentions, _Law(power.highest_clock_hz, speed, follows))
        power = _with(power, "attention", _load(attentions, profile, law))
    streams: tuple[LoadClass, ...] = ("arithmetic", "norm")
    for kind in streams:
        if speed := _following(turns.get(kind, []), [], power, profile):
            law = _Law(_fastest_hz(turns[kind], alone_s, speed, power, profile), speed, follows)
            power = _with(power, kind, _at_highest(law) | law.figures())
    for kind in (*streams, "memory"):
        if kind in turns:
            power = _with(power, kind, _drawing(turns[kind], power, profile))
    longer = [case for case in shared if case.params["beside"] == "wait" and not _beside(case, "wait")]
    if longer:

        def off(constants: Constants) -> float:
            tried = replace(power, averaged_s=constants["averaged_s"])
            return statistics.fmean(abs(_point(case, tried, profile, held_out=False).error) for case in longer)

        fitted = search({"averaged_s": AVERAGED_S}, off, limits={"averaged_s": (1e-3, 10.0)})
        power = replace(power, averaged_s=rounded(fitted["averaged_s"], 2))
    return power


def _law(runs: Sequence[_LastingRun], idle_w: float, highest_hz: float) -> _Law:
    """Return the slopes of the products' power and speed against the clock, all logarithmic.

    The slopes hold up to the clock above which neither rises: the ceiling that leaves the least of both unexplained.
    """
    watts = np.log([(run.watts - idle_w * (1 - run.share)) / run.share - idle_w for run in runs])
    seconds = np.log([run.seconds for run in runs])
    tried = []
    for ceiling_hz in highest_hz * CEILINGS[::-1]:
        clock = np.log([useful_hz(run.clock_hz, ceiling_hz) for run in runs])
        lines = [np.polyfit(clock, values, 1) for values in (watts, seconds)]
        off = sum(
            float(np.sum((np.polyval(line, clock) - values) ** 2))
            for line, values in zip(lines, (watts, seconds), strict=True)
        )
        tried.append((off, _Law(float(ceiling_hz), -float(lines[1][0]), float(lines[0][0]))))
    return min(tried, key=lambda one: one[0])[1]


def _fastest(cases: Sequence[MeasuredCase], law: _Law) -> _Law:
    """The law of kernels whose first batch was as fast as they get: up to the clock that this took."""
    runs = [_LastingRun.from_case(case) for case in cases]
    fastest = [run.clock_hz * (run.seconds / run.first_s) ** (1 / law.speed) for run in runs]
    return _Law(min(statistics.geometric_mean(fastest), law.highest_hz), law.speed, law.power)


def _following(
    turns: Sequence[MeasuredCase], alone: Sequence[MeasuredCase], power: Power, profile: Profile
) -> float | None:
    """Return the speed exponent of kernels in turns with products; None where clocks differ too little for a slope.

    The seconds of the products tell the clock. ``alone``: the same kernels alone, at the clock that was read. One slope
    holds for all.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for case in turns:
        point = math.log(_clock_hz(case, power, profile)), math.log(float(case.row["other_s"]))
        points.setdefault(str(case.params["beside"]), []).append(point)
    for case in alone:
        run = _LastingRun.from_case(case)
        points.setdefault(case.op, []).append((math.log(run.clock_hz), math.log(run.seconds)))
    if not turns or max(np.ptp([clock for clock, _ in group]) for group in points.values()) < DIFFERENT:
        return None
    clock, seconds = np.concatenate([np.array(group) - np.mean(group, axis=0) for group in points.values()]).T
    return -float(np.dot(clock, seconds) / np.dot(clock, clock))


def _fastest_hz(
    turns: Sequence[MeasuredCase], alone_s: Mapping[str, float], speed: float, power: Power, profile: Profile
) -> float:
    """Return the clock at which streams in turns with products would be as fast as alone, their highest speed."""
    slower = [
        (_clock_hz(case, power, profile), float(case.row["other_s"]) / alone_s[op])
        for case in turns
        if (op := str(case.params["beside"])) in alone_s
    ]
    fastest = [clock_hz * by ** (1 / speed) for clock_hz, by in slower]
    return min([statistics.geometric_mean(fastest), power.highest_clock_hz]) if fastest else power.highest_clock_hz


def _drawing(turns: Sequence[MeasuredCase], power: Power, profile: Profile) -> dict[str, float]:
    """Return the watts of kernels in turns with products, and the exponent of the clock in them.

    Watts are the mean less those of the products, at the clock that the products' seconds tell. The exponent is fitted
    where clocks differ enough. Weights are shares of the time.
    """
    products, budget = power.loads["matmul"], PowerBudget(power)
    highest_hz = power.loads[OTHERS[str(turns[0].params["beside"])]].highest_clock_hz
    points: dict[str, list[tuple[float, float, float]]] = {}
    for case in turns:
        run, clock_hz = _LastingRun.from_case(case), _clock_hz(case, power, profile)
        if clock_hz >= (1 - REACHED) * products.highest_clock_hz:
            clock_hz = run.clock_hz  # no slower products tell it
        left_w = run.watts - power.idle_w - run.share * budget.drawn_w("matmul", clock_hz)
        if left_w > 0:
            clock = math.log(useful_hz(clock_hz, highest_hz) / highest_hz)
            point = clock, math.log(left_w / (1 - run.share)), 1 - run.share
            points.setdefault(str(case.params["beside"]), []).append(point)
    if not points:
        return {}
    clock, drawn, weight = np.array([point for group in points.values() for point in group]).T
    centred = [np.array(group) - np.average(group, axis=0, weights=[w for *_, w in group]) for group in points.values()]
    off, above, _ = np.concatenate(centred).T
    slope = np.average(off * above, weights=weight) / max(float(np.average(off**2, weights=weight)), 1e-12)
    # Where clocks hardly differ, or power would fall as they rise, it is taken to go as that of products.
    exponent = float(slope) if np.ptp(clock) > DIFFERENT and slope > 0 else products.power_exponent
    watts = power.idle_w + math.exp(np.average(drawn - exponent * clock, weights=weight))
    return {"watts": rounded(watts), "power_exponent": rounded(exponent, 3)}


def _cube(case: MeasuredCase) -> int:
    """The side of a product of three alike; 0 of others."""
    sizes = {int(case.params[name]) for name in ("m", "n", "k")}
    return sizes.pop() if len(sizes) == 1 else 0


def _at_highest(law: _Law) -> dict[str, float]:
    """Return the clocks of a load whose watts and prices are those at the highest clock that makes it faster."""
    return {"clock_hz": rounded(law.highest_hz), "priced_at_hz": rounded(law.highest_hz)}


def _with(power: Power, kind: LoadClass, changes: Mapping[str, float]) -> Power:
    return replace(power, loads={**power.loads, kind: replace(power.loads[kind], **changes)})


def _clock_hz(case: MeasuredCase, power: Power, profile: Profile) -> float:
    """The clock at which the model has the products of a case take as long as they took."""
    load = power.loads["matmul"]
    seconds = Costs.from_profile(profile, PYTORCH).kernel_s(kernel_of(case), profile.gpu)
    return float(load.priced_at_hz * (seconds / _LastingRun.from_case(case).seconds) ** (1 / load.speed_exponent))


def _beside(case: MeasuredCase, *kernels: str) -> bool:
    """Products in turns with one of these that are too short for clocks to follow: what is fitted."""
    return case.params["beside"] in kernels and float(case.params["period_s"]) < SETTLING_S


def kernel_of(case: MeasuredCase) -> Kernel:
    """The kernel that a case runs on end."""
    if case.op.startswith("attention"):
        return attention.kernel_of(MeasuredCase("attention", case.op.removeprefix("attention_"), case.params, (0,), {}))
    return matmul.kernel_of(MeasuredCase("matmul", case.op, case.params, (0,), {}))


def _load(cases: Sequence[MeasuredCase], profile: Profile, law: _Law) -> dict[str, float]:
    """Watts and clock, means over the cases, and the clock at which their prices are what they took."""
    runs, costs = [_LastingRun.from_case(case) for case in cases], Costs.from_profile(profile, PYTORCH)
    clock_hz = statistics.geometric_mean(useful_hz(run.clock_hz, law.highest_hz) for run in runs)
    slower = statistics.geometric_mean(
        run.seconds / costs.kernel_s(kernel_of(case), profile.gpu) for case, run in zip(cases, runs, strict=True)
    )
    return {
        "watts": rounded(statistics.fmean(run.watts for run in runs)),
        "clock_hz": rounded(clock_hz),
        "priced_at_hz": rounded(clock_hz * slower ** (1 / law.speed)),
    } | law.figures()


def _point(case: MeasuredCase, power: Power, profile: Profile, *, held_out: bool) -> FittedPoint:
    """Seconds of a kernel that has a share of the GPU's time, at the clock that the budget leaves it. Long turns with
    others are held out too."""
    run, kernel, other = _LastingRun.from_case(case), kernel_of(case), OTHERS.get(str(case.params["beside"]))
    budget, costs = PowerBudget(power), Costs.from_profile(replace(profile, power=power), PYTORCH)
    kind = load_class(kernel)
    assert kind is not None
    other_s = run.seconds * (1 / run.share - 1)
    times = math.ceil(run.share * float(case.params["period_s"]) / run.seconds)
    kernel_s = costs.kernel_s(kernel, profile.gpu, budget.highest_hz)
    if other is not None:
        load = power.loads[other]
        other_s *= longer(load, budget.highest_hz, _clock_hz(case, power, profile))
    busy_s, whole_s = times * kernel_s, times * (kernel_s + other_s)
    spans = [Drawn(0.0, busy_s, {kind: busy_s}, {kind: busy_s * costs.intensity(kernel)})]
    if other is not None:
        spans.append(Drawn(busy_s, whole_s, {other: whole_s - busy_s}, {other: whole_s - busy_s}))
    clock_hz = budget.clock_hz(budget.trace(spans, whole_s), budget.highest_hz)
    fitted_s = costs.kernel_s(kernel, profile.gpu, clock_hz)
    group = f"power.{case.params['beside']}" if case.op == "mm" else f"power.{case.op}_alone"
    return FittedPoint(group, run.share, run.seconds, fitted_s, held_out or bool(other and not _beside(case, *OTHERS)))
