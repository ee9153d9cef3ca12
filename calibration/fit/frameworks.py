"""Seconds of the host under another framework than plain PyTorch, from steps that nothing but the host bounds.

`python -m calibration train calibration/runs/hosts/*.yaml` makes such steps: their models are so narrow that the GPU
always waits. A step is then as long as the host takes for all that it issues. Steps tell less than layers do, which
`calibration.fit.hosts` measures one by one. So ops of modules are taken to keep plain PyTorch's proportions, all
``slower`` by one factor, and only the kinds of `ALONE` have seconds of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from calibration.compare.record import Run
from calibration.fit.cases import Cases
from calibration.fit.hosts import Counts, Equation, Pace, at_pace, issued_in_step, least_squares
from calibration.fit.part import Part, Point, rounded
from simulator.config import load_workload
from simulator.config.section import as_data
from simulator.costs import launch
from simulator.hardware.host import LaunchCosts
from simulator.hardware.profile import Profile
from simulator.lowering import build_program

#: What the figures cite.
SOURCE = "host_steps"
#: Kinds of work that the steps tell apart from all other. Steps with and without recomputation, with and without tensor
#: parallelism, of one micro-batch and of several, and of layers with seven and with twelve weights are among them.
ALONE = ("checkpoint", "gradient", "optimizer", "tp_all_reduce", "update")
#: Kinds that are sped up and slowed down together.
MODULES = (
    "autograd",
    *(f"{way}_{name}" for way in ("forward", "backward") for name in ("matmul", "attention", "norm", "other")),
)


def fit(cases: Cases, profile: Profile) -> Part:
    """Fit ``host.launch_s`` of the frameworks that steps were made with.

    Nothing where there are none, or where the profile does not say how fast its own host was.
    """
    told = profile.provenance
    if not cases.steps or told is None or told.host_forward_s is None or told.host_backward_s is None:
        return Part({})
    usual = Pace(told.host_forward_s, told.host_backward_s)
    figures: dict[str, Any] = {}
    points: list[Point] = []
    plain = profile.host.launch_s["eager"]
    by_section: dict[str, list[tuple[Run, Counts]]] = {}
    for run in cases.steps:
        workload = load_workload(run.workload.resolved)
        program = build_program(workload)
        issued = issued_in_step(program.roles[program.role_of[0]])
        counts = at_pace(issued, _slower(run, usual))
        by_section.setdefault(workload.software.launch_section, []).append((run, counts))
    for section, steps in by_section.items():
        costs, fitted_steps = _fitted(section, steps, plain)
        figures[f"host.launch_s.{section}"] = costs
        figures[f"sources.{SOURCE}"] = _cited([run for run, _ in steps])
        points += fitted_steps
    return Part(figures, points)


def _cited(runs: Sequence[Run]) -> str:
    """Return what the steps are, and on what they were made."""
    dates = sorted({str(run.date.date()) for run in runs})
    gpus = sorted({str(run.environment.get("gpu")) for run in runs})
    return f"own steps of models so narrow that the GPU waits for its host, {', '.join(dates)}: {', '.join(gpus)}"


def _fitted(
    section: str, steps: Sequence[tuple[Run, Counts]], plain: LaunchCosts
) -> tuple[dict[str, Any], list[Point]]:
    """Return the costs of a section and the steps behind them; ``plain``: plain PyTorch's on the same host.

    ``steps``: runs with the counts of what their first rank issues, each times how slow its host was.
    """
    seconds = launch.launch_seconds(plain)
    equations = []
    for run, counts in steps:
        modules = sum(n * seconds[kind] for kind, n in counts.items() if kind in MODULES)
        rest = sum(n * seconds[kind] for kind, n in counts.items() if kind not in (*MODULES, *ALONE))
        shares = {kind: n for kind, n in counts.items() if kind in ALONE} | {"slower": modules}
        equations.append(Equation(section, run.step_time_s.median - rest, shares))
    kinds = ("slower", *sorted({kind for one in equations for kind in one.counts} - {"slower"}))
    slower, *alone = least_squares(equations, kinds)
    around: dict[str, float] = {str(kind): value for kind, value in plain.around_s.items()}
    around["autograd"] = slower * around.get("autograd", 0.0)
    around |= {kind: value for kind, value in zip(kinds[1:], alone, strict=True) if kind != "optimizer"}
    fitted = dict(zip(kinds, (slower, *alone), strict=True))
    costs = {
        **as_data(plain, nulls=False),
        "forward_s": {name: rounded(slower * value) for name, value in plain.forward_s.items()},
        "backward_s": {name: rounded(slower * value) for name, value in plain.backward_s.items()},
        "optimizer_s": rounded(fitted["optimizer"]),
        "around_s": {name: rounded(value) for name, value in around.items()},
        "kind": "measured",
        "source": SOURCE,
        "note": f"ops of modules {slower:.2f} times as long as plain PyTorch's; what is not told apart as there",
    }
    points = [
        Point(f"launch.{section}", one.seconds, one.seconds, sum(n * fitted[k] for k, n in one.counts.items()), False)
        for one in equations
    ]
    return costs, points


def _slower(run: Run, usual: Pace) -> Pace:
    """Return how many times as long as the usual host the slowest rank's took in the probes around the steps."""
    paces = []
    for rank in run.ranks:
        forward = fmean(rank.host.probe_forward_s or ())
        paces.append(Pace(forward / usual.forward, (fmean(rank.host.probe_s) - forward) / usual.backward))
    return max(paces, key=sum)
