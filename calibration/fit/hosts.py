"""Seconds of the host by kind of op, from layers that it issued: ``host.launch_s.eager``.

The simulator's own program of each narrow model counts the ops that the host had to issue, kind by kind. The seconds of
the kinds are fitted to the measured times by least squares of relative errors, none negative. They are of a host
with the median pace of the measurement. Probes beside each case tell the pace at its time, forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple, get_args

import numpy as np

from calibration.fit.cases import Cases, MeasuredCase
from calibration.fit.part import FittedPoint, rounded
from calibration.narrow import DEPTH, JOINED, PROBE, narrow
from simulator.costs import Costs, launch
from simulator.engine.issue_order import issued_by
from simulator.errors import InputError
from simulator.hardware.host import AroundOps, LaunchClass
from simulator.lowering import build_program
from simulator.models import layer
from simulator.program import COMPUTE_LANE, Block, Role, Step, StepPhase

Counts = Mapping[str, float]
#: Weight of equations of modules beside those of whole models. Modules of one kind in a row are in the CPU's caches,
#: and take half their time among other ops. So they decide only what models leave open.
WEIGHT_OF_MODULES = 0.1
#: What a module of a row launches forward and backward.
MODULES: dict[str, tuple[Counts, Counts]] = {
    "linear": ({"forward_matmul": 1}, {"backward_matmul": 2, "backward_other": 1}),
    "linear_no_bias": ({"forward_matmul": 1}, {"backward_matmul": 2}),
    "layer_norm": ({"forward_norm": 1}, {"backward_norm": 2}),
    "rms_norm": ({"forward_norm": 1}, {"backward_norm": 2}),
    "attention": ({"forward_attention": 1}, {"backward_attention": 1, "backward_other": 1}),
    "rope": ({"forward_other": 5}, {"backward_other": 5}),
    "gelu": ({"forward_other": 1}, {"backward_other": 1}),
    "residual": ({"forward_other": 1}, {}),
    **{
        name: ({"forward_other": 1, "forward_part": parts}, {"backward_other": 1, "backward_part": parts})
        for name, parts in JOINED.items()
    },
}


@dataclass(frozen=True)
class Equation:
    """A time that one rank took, what it issued in it, and how much its relative error weighs."""

    group: str
    seconds: float
    counts: Counts
    weight: float = 1.0


class Pace(NamedTuple):
    """Seconds of a host for the passes of the probe (`calibration.narrow.PROBE`), or their ratio to the usual host's.

    The main thread issues the forward pass, and autograd's thread the backward one. The pace of each thread changes by
    itself, as threads get cores of their own or share them.
    """

    forward: float
    backward: float


#: Calls whose seconds are measured by themselves, and which plain PyTorch does not make: of cuBLAS for each expert, of
#: bitsandbytes for each 4-bit weight (measurements/adapter-hosts.csv).
CALLS = {"dequantize", "expert"}
#: How often the host did what is called so, and whether autograd's thread did it.
Issued = Counter[tuple[str, bool]]


def usual_pace(cases: Cases) -> Pace | None:
    """Return the pace in the middle of the measurement, the medians of all probes; None: there are no probes."""
    probes = [pace for case in cases.rows for member in _probes(case) for pace in member]
    return Pace(*map(median, zip(*probes, strict=True))) if probes else None


def _probes(case: MeasuredCase) -> list[list[Pace]]:
    """Return every member's probes, before, between and behind its blocks of runs, where there are any."""
    if "probe_forward_s" not in case.row:
        return []
    both = zip(case.row["probe_s"], case.row["probe_forward_s"], strict=True)
    return [[Pace(part, all_s - part) for all_s, part in zip(*member, strict=True)] for member in both]


def members(case: MeasuredCase, usual: Pace | None) -> list[tuple[float, Pace]]:
    """Seconds of every member, and how many times longer than the usual host's its threads took, on the mean."""
    probes = _probes(case)
    if usual is None or not probes:
        return [(float(seconds), Pace(1.0, 1.0)) for seconds in case.row.get("each_s", [case.seconds])]
    times = []
    for blocks, paces in zip(case.row["block_s"], probes, strict=True):
        around = [[fmean(pair) for pair in zip(*two, strict=True)] for two in pairwise(paces)]
        slower = (fmean(mean_s) / at_best for mean_s, at_best in zip(zip(*around, strict=True), usual, strict=True))
        times.append((fmean(blocks), Pace(*slower)))
    return times


def fitted(cases: Cases) -> tuple[dict[str, object], list[FittedPoint]]:
    """``forward_s``, ``backward_s``, ``collective_s``, ``p2p_s`` and ``around_s``, and the times behind them."""
    usual = usual_pace(cases)
    equations = [equation for case in cases.rows_of("layers") for equation in _equations(case, members(case, usual))]
    kinds = sorted({kind for equation in equations for kind in equation.counts} - _untold(cases) - CALLS)
    seconds = dict(zip(kinds, least_squares(equations, kinds), strict=True))
    needed = {f"{way}_{name}" for way in ("forward", "backward") for name in get_args(LaunchClass)}
    if untold := sorted(kind for kind in needed | (seconds.keys() & {"collective", "p2p"}) if not seconds.get(kind)):
        raise InputError(
            "too few cases to tell what the host takes for each kind of op",
            key="layers",
            found=f"nothing of {', '.join(untold)}",
            fix="all cases of measure --only layers",
        )
    figures: dict[str, object] = {
        f"{way}_s": {name: rounded(seconds[f"{way}_{name}"]) for name in get_args(LaunchClass)}
        for way in ("forward", "backward")
    }
    figures |= {f"{name}_s": rounded(seconds[name]) for name in ("collective", "p2p") if name in seconds}
    figures["around_s"] = {name: rounded(seconds[name]) for name in get_args(AroundOps) if name in seconds}
    points = [
        FittedPoint(one.group, one.seconds, one.seconds, _sum(one.counts, seconds), False, alone)
        for one, alone in zip(equations, told_by_one(equations, seconds), strict=True)
    ]
    return figures, points


def _untold(cases: Cases) -> set[str]:
    """Kinds that go with others in all cases: parts of tokens, where as many go with every exchange; those then take
    the time of both."""
    numbers = {
        str(p.get("part", p.get("model"))) for p in (case.params for case in cases.rows_of("layers")) if _joins(p)
    }
    return set() if len(numbers) > 1 else {"forward_part", "backward_part"}


def _joins(params: Mapping[str, object]) -> bool:
    return params.get("part") in JOINED or params.get("layout") == "ep"


def _equations(case: MeasuredCase, timings: Sequence[tuple[float, Pace]]) -> list[Equation]:
    equations = []
    for (group, counts), (seconds, pace) in zip(_issued(case, len(timings)), timings, strict=True):
        weight = WEIGHT_OF_MODULES if "part" in case.params else 1.0
        equations.append(Equation(group, seconds, at_pace(counts, pace), weight))
    return equations


def _issued(case: MeasuredCase, n_members: int) -> list[tuple[str, Issued]]:
    """Return the group of points of every member, and the counts of the ops that it issued."""
    params, issued = case.params, Issued()
    if "part" in params:
        forward, backward = MODULES[case.word("part", MODULES)]
        issued.update({(kind, False): n * DEPTH for kind, n in forward.items()})
        if case.op == "passes":
            issued.update({(kind, True): n * DEPTH for kind, n in backward.items()} | {("autograd", True): 1})
        return [("launch.modules", issued)]
    workload = narrow(params)
    if case.op in ("split", "input"):
        part = layer(workload)
        passes = {StepPhase.FORWARD: part.forward, StepPhase.INPUT_GRADIENT: part.input_grad}
        if case.op == "split":
            passes[StepPhase.WEIGHT_GRADIENT] = part.weight_grad
        steps = tuple(Step(phase, Block(phase, ops), phase=phase) for phase, ops in passes.items())
        for (kind, by_autograd), n in counted(Role("layers", {COMPUTE_LANE: steps}), case.op).items():
            issued[kind, by_autograd] = n * (1 if kind == "autograd" else int(params["layers"]))
        return [("launch.split", issued)]
    program = build_program(workload)
    name = f"launch.{params.get('layout', 'one')}"
    return [(name, counted(program.roles[role], case.op)) for role in program.role_of[:n_members]]


def probe_of(costs: Costs) -> Pace:
    """Seconds that the calibrated host takes for `calibration.narrow.PROBE`, by its costs."""
    counts = counted(build_program(narrow(PROBE)).roles[0], "passes").items()
    return Pace(
        *(costs.launched_s({kind: n for (kind, by), n in counts if by is autograd}) for autograd in (False, True))
    )


def counted(role: Role, op: str) -> Issued:
    """Return the counts of ops until the optimizer, or of the first forward pass alone.

    Code that is not compiled has no graphs.
    """
    lanes = {lane: tuple(step for step in steps if step.phase != "O") for lane, steps in role.lanes.items()}
    if op == "forward":
        compute = tuple(step for step in lanes[COMPUTE_LANE] if step.phase == "F")
        backward = {step.label for step in lanes[COMPUTE_LANE]} - {step.label for step in compute}
        needed = {label for step in compute for label in step.after}
        lanes = {
            lane: tuple(step for step in steps if step.label in needed and not backward & {*step.after})
            for lane, steps in lanes.items()
        } | {COMPUTE_LANE: compute}
    counts = issued_in_step(Role(role.name, lanes))
    return Issued({(kind, by_autograd): n for (kind, by_autograd), n in counts.items() if kind != "graph"})


def issued_in_step(role: Role) -> Issued:
    """Return the counts of all ops of a role, its optimizer's included."""
    counts = Issued()
    for phase, kind, n in issued_by(role):
        counts[kind, launch.by_autograd(phase, kind)] += n
    return counts


def at_pace(issued: Issued, slower: Pace) -> Counts:
    """Return the counts by kind alone, each times what its thread takes longer than the usual host's."""
    counts: dict[str, float] = {}
    for (kind, by_autograd), n in issued.items():
        counts[kind] = counts.get(kind, 0.0) + n * (slower.backward if by_autograd else slower.forward)
    return counts


def least_squares(equations: Sequence[Equation], kinds: Sequence[str]) -> list[float]:
    """The x >= 0 of least ``sum (weight (counts . x / seconds - 1))^2`` (Lawson and Hanson, Solving Least Squares
    Problems, 1974, algorithm NNLS)."""
    weight = np.array([one.weight for one in equations])
    a = np.array([[one.counts.get(kind, 0.0) * one.weight / one.seconds for kind in kinds] for one in equations])
    scale = np.linalg.norm(a, axis=0)
    a /= scale
    x, free = np.zeros(len(kinds)), np.zeros(len(kinds), dtype=bool)
    for _ in range(3 * len(kinds)):
        gain = np.where(free, 0.0, a.T @ (weight - a @ x))
        if gain.max() < 1e-10 * len(a):
            break
        free[int(gain.argmax())] = True
        while True:
            best = np.zeros(len(kinds))
            best[free] = np.linalg.lstsq(a[:, free], weight, rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                break
            # As far towards the best as nothing becomes negative; what reaches 0 stays there.
            share = float((x[below] / (x[below] - best[below])).min())
            x += share * (best - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = best
    return [float(value) for value in x / scale]


def told_by_one(equations: Sequence[Equation], seconds: Mapping[str, float]) -> list[bool]:
    """Return of each equation whether it is the only one with some kind of work, whose seconds then meet it exactly."""
    tellers = Counter(kind for one in equations for kind, n in one.counts.items() if n and seconds.get(kind))
    return [any(n and tellers[kind] == 1 for kind, n in one.counts.items()) for one in equations]


def _sum(counts: Counts, seconds: Mapping[str, float]) -> float:
    return sum(n * seconds.get(kind, 0.0) for kind, n in counts.items())
