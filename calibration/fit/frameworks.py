"""Seconds of the host under another framework than plain PyTorch, from steps that nothing but the host bounds.

`python -m calibration train calibration/runs/hosts/*.yaml` makes such steps: their models are so narrow that the GPU
always waits. A step is then as long as the host takes for all that it issues. Steps tell less than layers do, which
`calibration.fit.hosts` measures one by one. So ops of modules are taken to keep plain PyTorch's proportions, all
``slower`` by one factor. Those of compiled code take the same time each, as one wrapper in Python launches them. Only
the kinds of `APART` have seconds of their own.

What is not told apart takes plain PyTorch's seconds, and is taken off a step first. Least squares are of errors
relative to that remainder, while points and residuals are of whole steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from calibration.compare.record import RunRecord
from calibration.fit.cases import Cases
from calibration.fit.hosts import CALLS, Counts, Equation, Pace, at_pace, issued_in_step, least_squares, told_by_one
from calibration.fit.part import FittedPoint, ProfilePart, rounded
from simulator.config import Workload, load_workload
from simulator.config.section import as_data
from simulator.costs import launch
from simulator.errors import InputError
from simulator.frameworks.framework import LaunchSection
from simulator.hardware.host import LaunchCosts
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
#: Sections of compiled code.
COMPILED = ("compiled", "compiled_model")
#: Kernels of modules by class.
KERNELS = tuple(f"{way}_{name}" for way in ("forward", "backward") for name in ("matmul", "attention", "norm", "other"))
#: Kinds that are sped up and slowed down together.
MODULES = ("autograd", *KERNELS)


class IssuedStep(NamedTuple):
    """A step, and what its first rank issued in it."""

    run: RunRecord
    counts: Counts


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
            IssuedStep(run, issued_at_pace(run, workload, usual))
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


def issued_at_pace(run: RunRecord, workload: Workload, usual: Pace) -> Counts:
    """Return what the first rank issued, each times how slow its host was.

    Where the other ranks were not there (``train --alone``), collectives take nothing but DTensor's Python code.
    """
    program = build_program(workload)
    issued = issued_in_step(program.roles[program.role_of[0]])
    counts = dict(at_pace(issued, _slower(run, usual)))
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
    seconds = launch.launch_seconds(plain)
    together = "kernel" if section in COMPILED else "slower"
    equations: list[Equation] = []
    for step in steps:
        shares: defaultdict[str, float] = defaultdict(float)
        rest = 0.0
        for kind, n in step.counts.items():
            if kind in APART[section]:
                shares[kind] += n
            elif section in COMPILED and kind in KERNELS:
                shares[together] += n
            elif section not in COMPILED and kind in MODULES:
                shares[together] += n * seconds[kind]
            else:
                rest += n * seconds.get(kind, 0.0)
        remainder = step.run.step_time_s.median - rest
        if remainder <= 0:
            raise InputError(
                "a step is no longer than what of it is taken from plain PyTorch",
                key=step.run.name,
                found=f"{step.run.step_time_s.median:g} s, of which {rest:g} s",
                fix="take its record out of the folder steps",
            )
        equations.append(Equation(section, remainder, shares))
    kinds = (together, *sorted({kind for one in equations for kind in one.counts} - {together}))
    fitted = dict(zip(kinds, least_squares(equations, kinds), strict=True))
    points = [
        _point(step.run.step_time_s.median, one, fitted, alone)
        for step, one, alone in zip(steps, equations, told_by_one(equations, fitted), strict=True)
    ]
    return _costs(fitted, plain), points


def _point(step_s: float, equation: Equation, fitted: Mapping[str, float], alone: bool) -> FittedPoint:
    """Return a whole step beside its fit; ``alone``: it alone tells some kind of work."""
    error_s = sum(n * fitted[kind] for kind, n in equation.counts.items()) - equation.seconds
    return FittedPoint(f"launch.{equation.group}", step_s, step_s, step_s + error_s, False, alone)


def _costs(fitted: Mapping[str, float], plain: LaunchCosts) -> dict[str, Any]:
    """Return a section of a profile: what was ``fitted`` by kind, and all else as plain PyTorch has it."""
    around: dict[str, float] = {str(kind): value for kind, value in plain.around_s.items()}
    if (slower := fitted.get("slower")) is not None:
        note = f"ops of modules {slower:.2f} times as long as plain PyTorch's; what is not told apart as there"
        around["autograd"] = slower * around.get("autograd", 0.0)
        forward = {name: rounded(slower * value) for name, value in plain.forward_s.items()}
        backward = {name: rounded(slower * value) for name, value in plain.backward_s.items()}
    else:
        note = "kernels of compiled code, one as long as another; what is not told apart as in plain PyTorch"
        forward = dict.fromkeys(plain.forward_s, rounded(fitted["kernel"]))
        backward = dict.fromkeys(plain.backward_s, rounded(fitted["kernel"]))
    around |= {kind: value for kind, value in fitted.items() if kind not in ("slower", "kernel", "optimizer")}
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


def _slower(run: RunRecord, usual: Pace) -> Pace:
    """Return how many times as long as the usual host the slowest rank's took in the probes around the steps."""
    paces = []
    for rank in run.ranks:
        forward = fmean(rank.host.probe_forward_s or ())
        paces.append(Pace(forward / usual.forward, (fmean(rank.host.probe_s) - forward) / usual.backward))
    return max(paces, key=sum)
