"""Seconds of the host under another framework than plain PyTorch, from steps that nothing but the host bounds.

`python -m calibration train calibration/runs/hosts/*.yaml` makes such steps: their models are so narrow that the GPU
always waits. A step is then as long as the host takes for all that it issues. Steps tell less than layers do, which
`calibration.fit.hosts` measures one by one. So ops of modules are taken to keep plain PyTorch's proportions, all
``slower`` by one factor. Sections in `BY_PASS` have two, where records tell how long backward passes took. One is of
backward ops, and one of products and norms of forward passes, which are modules. Other forward ops are functions
of PyTorch, which take the same anywhere. Those of compiled code take the same time each, as one wrapper in Python
launches them. Only the kinds of `APART` have seconds of their own.

What is not told apart takes plain PyTorch's seconds, and is taken off a step first. Least squares are of errors
relative to that remainder, while points and residuals are of whole steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, get_args

from calibration.compare.record import RunRecord
from calibration.fit.cases import Cases
from calibration.fit.hosts import (
    CALLS,
    Counts,
    Equation,
    Issued,
    Pace,
    at_pace,
    issued_in_step,
    least_squares,
    told_by_one,
)
from calibration.fit.part import FittedPoint, ProfilePart, rounded
from simulator.config import Workload, load_workload
from simulator.config.section import as_data
from simulator.costs import launch
from simulator.errors import InputError
from simulator.frameworks.framework import LaunchSection
from simulator.hardware.host import AroundOps, LaunchClass, LaunchCosts
from simulator.hardware.profile import Profile
from simulator.lowering import build_program

#: What the figures cite.
SOURCE = "host_steps"
#: By section, kinds of work that its steps tell apart from all other. Steps with and without recomputation, with and
#: without tensor parallelism, of one micro-batch and of several, and of layers with unlike weights are among them.
APART: Mapping[LaunchSection, tuple[str, ...]] = {
    "megatron": ("checkpoint", "gradient", "optimizer", "tp_all_reduce", "update"),
    "torchtitan": ("checkpoint", "dtensor", "dtensor_update", "optimizer"),
    "hugging_face": ("checkpoint", "optimizer"),
    "deepspeed": ("hook", "optimizer", "update"),
    "compiled": ("autograd", "checkpoint", "dtensor", "dtensor_update", "graph", "optimizer"),
    "compiled_model": ("autograd", "checkpoint", "graph", "optimizer"),
}
#: Sections whose backward passes are fitted by themselves, where records tell how long those took. In Megatron-Core the
#: modules' own Python code is in forward passes. Transformers' modules have little.
BY_PASS: tuple[LaunchSection, ...] = ("megatron",)
#: Sections of compiled code.
COMPILED = ("compiled", "compiled_model")
#: Kernels of modules by class.
KERNELS = tuple(f"{way}_{name}" for way in ("forward", "backward") for name in ("matmul", "attention", "norm", "other"))
#: Kinds that are sped up and slowed down together.
MODULES = ("autograd", *KERNELS)


#: Kernels of forward passes that modules launch.
FORWARD_MODULES = ("forward_matmul", "forward_norm")


class IssuedPart(NamedTuple):
    """Seconds of a step, or of a part of it, and what the first rank issued in them."""

    seconds: float
    counts: Counts


class IssuedStep(NamedTuple):
    """A step in one piece, or what autograd's thread did and all else."""

    run: RunRecord
    parts: tuple[IssuedPart, ...]


def fit(cases: Cases, profile: Profile) -> ProfilePart:
    """Fit ``host.launch_s`` of the frameworks that steps were made with.

    Nothing where there are none, or where the profile does not say how fast its own host was.
    """
    told = profile.provenance
    if not cases.steps or told is None or told.host_forward_s is None or told.host_backward_s is None:
        return ProfilePart({})
    usual = Pace(told.host_forward_s, told.host_backward_s)
    plain = profile.host.launch_s["eager"]
    by_section: dict[LaunchSection, list[IssuedStep]] = {}
    for run in cases.steps:
        workload = load_workload(run.workload.resolved)
        by_section.setdefault(workload.software.launch_section, []).append(
            IssuedStep(run, issued_parts(run, workload, usual))
        )
    figures: dict[str, Any] = {}
    points: list[FittedPoint] = []
    for section in sorted(by_section):
        costs, fitted_steps = _fitted(section, by_section[section], plain)
        if section in profile.host.launch_s:  # what is measured by itself stays
            shipped = profile.host.launch_s[section].around_s
            costs["around_s"] |= {str(kind): seconds for kind, seconds in shipped.items() if kind in CALLS}
        figures[f"host.launch_s.{section}"] = costs
        points += fitted_steps
    figures[f"sources.{SOURCE}"] = _cited(cases.steps)
    return ProfilePart(figures, points)


def issued_parts(run: RunRecord, workload: Workload, usual: Pace) -> tuple[IssuedPart, ...]:
    """Return what the first rank issued, each times how slow its host was: in one piece, or backward passes apart.

    Where the other ranks were not there (``train --alone``), collectives take nothing but DTensor's Python code.
    """
    program = build_program(workload)
    issued = issued_in_step(program.roles[program.role_of[0]])
    slower, step_s, backward_s = _slower(run, usual), run.step_time_s.median, run.ranks[0].host.backward_s
    if backward_s is None or workload.software.launch_section not in BY_PASS:
        return (IssuedPart(step_s, _counts(at_pace(issued, slower), run, workload)),)
    return tuple(
        IssuedPart(seconds, _counts(at_pace(_by_thread(issued, autograd=autograd), slower), run, workload))
        for seconds, autograd in ((step_s - backward_s, False), (backward_s, True))
    )


def _by_thread(issued: Issued, *, autograd: bool) -> Issued:
    """Return what autograd's thread issued, or the main one."""
    return Issued({(kind, by_autograd): n for (kind, by_autograd), n in issued.items() if by_autograd is autograd})


def _counts(at_its_pace: Counts, run: RunRecord, workload: Workload) -> Counts:
    """Return the counts with DTensor's calls, and without collectives of ranks that were not there."""
    counts = dict(at_its_pace)
    dtensors = workload.software.work_on_dtensors
    if dtensors:
        counts["dtensor"] = sum(counts.get(kind, 0.0) for kind in dtensors)
    if run.n_gpus < workload.n_ranks:
        counts.pop("collective", None)
    return counts


def _cited(runs: Sequence[RunRecord]) -> str:
    """Return what the steps are, and on what they were made."""
    dates = sorted({str(run.date.date()) for run in runs})
    gpus = sorted({str(run.environment.get("gpu")) for run in runs})
    return f"own steps of models so narrow that the GPU waits for its host, {', '.join(dates)}: {', '.join(gpus)}"


def _fitted(
    section: LaunchSection, steps: Sequence[IssuedStep], plain: LaunchCosts
) -> tuple[dict[str, Any], list[FittedPoint]]:
    """Return the costs of a section and the steps behind them; ``plain``: plain PyTorch's on the same host.

    Raises `InputError` on a step that is no longer than what of it is not fitted.
    """
    factors = _factors(section, steps)
    equations = [[_equation(section, step.run.name, part, plain, factors) for part in step.parts] for step in steps]
    every = [one for parts in equations for one in parts]
    kinds = (
        *dict.fromkeys(factors.values()),
        *sorted({kind for one in every for kind in one.counts} & {*APART[section]}),
    )
    fitted = dict(zip(kinds, least_squares(every, kinds), strict=True))
    alone = iter(told_by_one(every, fitted))
    points = []
    for step, parts in zip(steps, equations, strict=True):
        told = [next(alone) for _ in parts]
        points.append(_point(step.run.step_time_s.median, parts, fitted, any(told)))
    return _costs(fitted, plain), points


def _factors(section: LaunchSection, steps: Sequence[IssuedStep]) -> Mapping[str, str]:
    """Return what is fitted for each kind of a module's kernel."""
    if section in COMPILED:
        return dict.fromkeys(KERNELS, "kernel")
    if all(len(step.parts) == 1 for step in steps):
        return dict.fromkeys(MODULES, "slower")
    backward = [kind for kind in MODULES if not kind.startswith("forward")]
    return dict.fromkeys(FORWARD_MODULES, "modules") | dict.fromkeys(backward, "backward")


def _equation(
    section: LaunchSection, name: str, part: IssuedPart, plain: LaunchCosts, factors: Mapping[str, str]
) -> Equation:
    """Return the seconds of a part of a step, less what is not fitted, and how often each kind is in them.

    Raises `InputError` where they are no longer than what of them is not fitted.
    """
    seconds = launch.launch_seconds(plain)
    shares: defaultdict[str, float] = defaultdict(float)
    rest = 0.0
    for kind, n in part.counts.items():
        if kind in APART[section]:
            shares[kind] += n
        elif kind in factors:
            shares[factors[kind]] += n if section in COMPILED else n * seconds[kind]
        else:
            rest += n * seconds.get(kind, 0.0)
    if part.seconds <= rest:
        raise InputError(
            "a step is no longer than what of it is taken from plain PyTorch",
            key=name,
            found=f"{part.seconds:g} s, of which {rest:g} s",
            fix="take its record out of the folder steps",
        )
    return Equation(section, part.seconds - rest, shares)


def _point(step_s: float, equations: Sequence[Equation], fitted: Mapping[str, float], alone: bool) -> FittedPoint:
    """Return a whole step beside its fit; ``alone``: it alone tells some kind of work."""
    error_s = sum(
        sum(n * fitted[kind] for kind, n in equation.counts.items()) - equation.seconds for equation in equations
    )
    return FittedPoint(f"launch.{equations[0].group}", step_s, step_s, step_s + error_s, False, alone)


def _costs(fitted: Mapping[str, float], plain: LaunchCosts) -> dict[str, Any]:
    """Return a section of a profile: what was ``fitted`` by kind, and all else as plain PyTorch has it."""
    around: dict[str, float] = {str(kind): value for kind, value in plain.around_s.items()}
    if (kernel := fitted.get("kernel")) is not None:
        note = "kernels of compiled code, one as long as another; what is not told apart as in plain PyTorch"
        forward = dict.fromkeys(plain.forward_s, rounded(kernel))
        backward = dict.fromkeys(plain.backward_s, rounded(kernel))
    else:
        note, by_class, slower = _longer(fitted)
        around["autograd"] = slower * around.get("autograd", 0.0)
        forward = {name: rounded(by_class.get(name, 1.0) * value) for name, value in plain.forward_s.items()}
        backward = {name: rounded(slower * value) for name, value in plain.backward_s.items()}
    around |= {kind: value for kind, value in fitted.items() if kind in get_args(AroundOps)}
    return {
        **as_data(plain, nulls=False),
        "forward_s": forward,
        "backward_s": backward,
        "optimizer_s": rounded(fitted["optimizer"]),
        "around_s": {name: rounded(value) for name, value in around.items()},
        "kind": "measured",
        "source": SOURCE,
        "note": note,
    }


def _longer(fitted: Mapping[str, float]) -> tuple[str, Mapping[str, float], float]:
    """Return a note, and how many times as long as plain PyTorch's ops take: forward by class, and backward.

    Classes that are left out take as long as plain PyTorch's.
    """
    last = "what is not told apart as there"
    if (slower := fitted.get("slower")) is not None:
        note = f"ops of modules {slower:.2f} times as long as plain PyTorch's; {last}"
        return note, dict.fromkeys(get_args(LaunchClass), slower), slower
    modules, backward = fitted["modules"], fitted["backward"]
    note = (
        f"products and norms of forward passes {modules:.2f} times as long as plain PyTorch's, "
        f"backward ops {backward:.2f} times; {last}"
    )
    return note, {"matmul": modules, "norm": modules}, backward


def _slower(run: RunRecord, usual: Pace) -> Pace:
    """Return how many times as long as the usual host the slowest rank's took in the probes around the steps."""
    paces = []
    for rank in run.ranks:
        forward = fmean(rank.host.probe_forward_s or ())
        paces.append(Pace(forward / usual.forward, (fmean(rank.host.probe_s) - forward) / usual.backward))
    return max(paces, key=sum)
