"""Python entry point of advice on speed: `advise` simulates changes of a job and ranks those that help."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.advising.proposals import Proposal, proposals
from simulator.analysis.training.key_changes import KeyChange
from simulator.api import run, run_step
from simulator.bounds import as_number
from simulator.config import Workload, altered
from simulator.errors import DeadlockError, InputError
from simulator.input_files import as_options
from simulator.step_result import StepResult

#: Seconds after which no simulation begins, unless a user says otherwise.
BUDGET_S = 30.0
#: How many changes are named.
MOST = 3
#: A change helps where it saves this share of the step.
HELPS = 0.005


@dataclass(frozen=True)
class SimulatedChange:
    """A legal change with the figures of the changed job.

    ``saved_s``: seconds by which its step is shorter.
    """

    change: KeyChange
    step_time_s: float
    saved_s: float
    fits: bool
    peak_bytes: float
    capacity_bytes: float

    def to_dict(self) -> dict[str, Any]:
        """Return the change, how to type it, and its figures, SI units."""
        return {
            "change": dict(self.change),
            "options": as_options(self.change),
            "step_time_s": self.step_time_s,
            "saved_s": self.saved_s,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
        }


@dataclass(frozen=True, repr=False)
class SpeedAdvice:
    """Advice on what makes a step faster that takes ``step_time_s`` now.

    ``best``: the changes that help most; all fit in memory, whether the job does or not. ``too_large``: the fastest
    change that does not fit, where it beats all of ``best``. ``simulated``, ``refused``,
    ``left``: how many changes were simulated, cannot run in this job, and were left when the time was over. A change
    that turns out to change nothing, or how many GPUs work, is in none of them.
    """

    step_time_s: float
    best: tuple[SimulatedChange, ...]
    too_large: SimulatedChange | None
    simulated: int
    refused: int
    left: int

    def to_dict(self) -> dict[str, Any]:
        """Return the advice under the names of the JSON output, SI units."""
        return {
            "changes": [one.to_dict() for one in self.best],
            "too_large": None if self.too_large is None else self.too_large.to_dict(),
            "simulated": self.simulated,
            "refused": self.refused,
            "left": self.left,
        }

    def __repr__(self) -> str:
        """Return the advice as the lines of the summary."""
        from simulator.output.change_table import change_text

        return change_text(self.to_dict(), self.step_time_s)


def advise(
    job: StepResult | str | Path | Mapping[str, Any] | Workload,
    *,
    set: Mapping[str, Any] | None = None,
    budget_s: float = BUDGET_S,
    watch: Callable[[int, int], object] = lambda done, total: None,
) -> SpeedAdvice:
    """Simulate changes of ``job``, a result or what `run` takes, and return those that help most.

    Changes of what takes most of the step come first. ``budget_s``: seconds after which no simulation begins. ``watch``
    is told how many of how many changes are done. Raises `InputError` on what cannot be used.
    """
    budget_s = as_number(budget_s, file="budget_s")
    result = job if isinstance(job, StepResult) else run(job, set=set)
    began = time.monotonic()
    now = result.report
    listed = proposals(result.workload, now["time_breakdown_s"], now["stages"]["layers_per_stage"])
    outcomes: list[SimulatedChange] = []
    refused = left = 0
    for number, proposal in enumerate(listed):
        watch(number, len(listed))
        if time.monotonic() - began >= budget_s:
            left = len(listed) - number
            break
        try:
            workload = altered(result.workload, proposal.change)
            if _is_comparable(workload, result.workload):
                outcomes.append(_simulated(result, workload, proposal))
        except (InputError, DeadlockError):
            refused += 1
    return _ranked(result, outcomes, refused, left)


def _is_comparable(changed: Workload, job: Workload) -> bool:
    """Return False where a change turned out to change nothing, or how many GPUs work."""
    return changed.n_ranks == job.n_ranks and changed != job


def _simulated(result: StepResult, workload: Workload, proposal: Proposal) -> SimulatedChange:
    """Return the figures of the changed ``workload``. Raises `InputError` or `DeadlockError` where it cannot run."""
    figures = run_step(workload, built=result.cluster).key_figures()
    return SimulatedChange(
        change=proposal.change,
        step_time_s=figures["step_time_s"],
        saved_s=result.spans.step_time_s - figures["step_time_s"],
        fits=figures["fits"],
        peak_bytes=figures["peak_bytes"],
        capacity_bytes=figures["capacity_bytes"],
    )


def _ranked(result: StepResult, outcomes: list[SimulatedChange], refused: int, left: int) -> SpeedAdvice:
    """Return the advice that follows from the simulated changes."""
    step = result.spans.step_time_s
    faster = sorted((one for one in outcomes if one.saved_s >= HELPS * step), key=lambda one: one.step_time_s)
    best = tuple([one for one in faster if one.fits][:MOST])
    larger = [one for one in faster if not one.fits]
    too_large = larger[0] if larger and (not best or larger[0].saved_s > best[0].saved_s) else None
    return SpeedAdvice(step, best, too_large, len(outcomes), refused, left)
