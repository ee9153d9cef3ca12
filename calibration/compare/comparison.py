"""Simulated beside measured: every run, the errors of all quantities, whether layouts come in the measured order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

from calibration.commits import Commit
from calibration.compare.figures import Figures
from calibration.compare.measured import MeasuredRun
from calibration.predict.predictions import Predictions, Simulated
from calibration.workloads import texts_of
from simulator.config import Workload
from simulator.units import GiB
from simulator.validation.evaluate import Outcome, summarise
from simulator.validation.suite import Bounds

STEP_TIME, PREDICTED, MEMORY = "step time", "step time, predicted before the run", "peak allocated memory"
#: Runs are steady whose steps spread (p90 - p10, over the median) less; they are a suite of their own. Hosts that share
#: a machine stop for tenths of seconds, and the median of a few such steps does not tell the next run's. Of 71
#: workloads run twice the two medians differ by 23 % in the mean where a run was not steady, by 3 % elsewhere
#: (calibration/results).
STEADY_SPREAD, STEADY = 0.25, "step time, steady runs"
#: Classes of kernels whose seconds are compared; of communication the seconds in which bytes move. The seconds that
#: kernels wait for other ranks are only shown: they tell how far ranks drift apart, and the other stage's pace.
JUDGED = ("matmul", "attention", "memory", "optimizer", "transfer", "hand-over transfer")
SHOWN = ("waiting", "hand-over waiting")
#: Communication that nothing hides and bubbles are measured in the profiled step, in which hosts are slower, so that
#: ranks wait longer for them and for one another. Where it takes at most so many times as long as the timed ones, it
#: tells of these too.
AS_TIMED = 1.05
#: Layouts whose measured step times are closer than this have no order.
SAME_SPEED = 0.03


@dataclass(frozen=True)
class ComparedRun:
    """One workload. ``reason``: why there is no comparison, else empty. ``committed``: the figures predicted before,
    where they were; ``not_before``: else why not. ``work``: equal for runs of the same model on the same sequences.
    ``host_speed``: of the machine, as a multiple of the profile's; ``spread``: of the measured steps, p90 - p10 over
    the median; ``profiled``: seconds of the profiled step over that median. ``memory_reason``: why measured memory is
    not compared."""

    name: str
    n_gpus: int
    work: str
    reason: str = ""
    simulated: Figures | None = None
    measured: Figures | None = None
    committed: Figures | None = None
    not_before: str = ""
    host_speed: float = 1.0
    spread: float | None = None
    profiled: float | None = None
    memory_reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        sides = {"simulated": self.simulated, "measured": self.measured, "committed": self.committed}
        return {
            "name": self.name,
            "n_gpus": self.n_gpus,
            "work": self.work,
            "reason": self.reason,
            **{side: None if figures is None else figures.to_dict() for side, figures in sides.items()},
            "predicted_before": self.committed is not None,
            "not_before": self.not_before,
            "host_speed": self.host_speed,
            "spread": self.spread,
            "profiled": self.profiled,
            "memory_reason": self.memory_reason,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ComparedRun:
        """Return the row that `to_dict` gave as ``data``."""
        fields = {key: value for key, value in data.items() if key != "predicted_before"}
        for side in ("simulated", "measured", "committed"):
            fields[side] = fields[side] and Figures.from_dict(fields[side])
        return cls(**fields)


#: What is compared as a share of the step.
SHARES: dict[str, Callable[[Figures], float | None]] = {
    "exposed communication": lambda figures: figures.exposed_s and figures.exposed_s / figures.step_time_s,
    "bubble": lambda figures: figures.bubble,
}


def work_of(workload: Workload) -> str:
    """Return the work of a step, whatever the layout, as text: model, sequences per step and their length."""
    training = workload.training
    model = workload.model.model_dump(mode="json")
    return json.dumps({"model": model, "seq": training.seq, "global_batch": training.global_batch}, sort_keys=True)


def not_before(predictions: Predictions, commit: Commit | None, run: MeasuredRun, now: Simulated) -> str:
    """Why the file's prediction of ``run`` was not made before it; empty where it was. ``commit``: the file's; ``now``:
    the same run as it is simulated now."""
    if predictions.workloads[now.name] not in texts_of(now.sha256):
        return "predicted for another workload file"
    if predictions.on[now.name] != now.profile:
        return f"predicted for {predictions.on[now.name]}"
    if commit is None or commit.changed:
        return (
            "the predictions are not committed" if commit is None else "the predictions were changed and not committed"
        )
    if run.date is not None and commit.date >= run.date:
        return f"predictions committed {commit.date:%Y-%m-%d %H:%M}, after the run of {run.date:%Y-%m-%d %H:%M}"
    return ""


def suites(rows: Sequence[ComparedRun], bounds: Bounds, *, predicted: bool) -> list[dict[str, Any]]:
    """Per quantity every row and its error, mean, median and largest absolute error, and bias, as `validate` has them.

    ``bounds`` are of the step times; ``predicted``: the committed predictions are a suite too.
    """
    step = [_outcome(row, STEP_TIME, "s", _step(row.measured), _step(row.simulated)) for row in rows]
    unsteady = {row.name for row in rows if row.spread is not None and row.spread >= STEADY_SPREAD}
    summaries = [summarise(STEP_TIME, step, bounds)]
    if unsteady:
        steady = [replace(outcome, quantity=STEADY) for outcome in step if outcome.id not in unsteady]
        summaries.append(summarise(STEADY, steady, bounds))
    if predicted:
        before = [row for row in rows if row.committed is not None]
        predictions = [_outcome(row, PREDICTED, "s", _step(row.measured), _step(row.committed)) for row in before]
        summaries.append(summarise(PREDICTED, predictions, bounds))
    summaries.append(summarise(MEMORY, [_memory(row) for row in rows], Bounds()))
    for name in JUDGED:
        some = [
            _outcome(row, f"{name} kernels", "s", *class_s(row, name))
            for row in rows
            if row.reason or any(class_s(row, name))
        ]
        if some:
            summaries.append(summarise(f"{name} kernels", some, Bounds()))
    return summaries


def shares(rows: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Return the differences of exposed communication and of bubbles, as shares of the step.

    Each run has its simulated and its measured share. The mean, largest and signed mean difference are of all runs, and
    of the runs whose profiled step is ``as_timed`` (`AS_TIMED`).
    """
    differences = []
    for quantity, share in SHARES.items():
        lines = []
        for row in rows:
            real, ours = (None if figures is None else share(figures) for figures in (row.measured, row.simulated))
            if real is not None and ours is not None and (real or ours):
                as_timed = row.profiled is not None and row.profiled <= AS_TIMED
                lines.append({"id": row.name, "measured": real, "simulated": ours, "as_timed": as_timed})
        timed = [line for line in lines if line["as_timed"]]
        differences.append(
            {"quantity": quantity, "rows": lines, "all": _differences(lines), "as_timed": _differences(timed)}
        )
    return differences


def _differences(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    off = [line["simulated"] - line["measured"] for line in lines]
    if not off:
        return {"n": 0}
    sizes = [abs(one) for one in off]
    return {"n": len(off), "mean_abs": fmean(sizes), "max_abs": max(sizes), "bias": fmean(off)}


def order(rows: Iterable[ComparedRun]) -> dict[str, Any]:
    """Return how many pairs of runs simulate in the measured order, and the wrong ones.

    Pairs are of runs of the same work whose measured step times differ by more than `SAME_SPEED`.
    """
    compared = [(row.name, row.work, row.simulated, row.measured) for row in rows]
    pairs, wrong = 0, []
    for (a, work_a, sim_a, real_a), (b, work_b, sim_b, real_b) in combinations(compared, 2):
        if work_a != work_b or sim_a is None or sim_b is None or real_a is None or real_b is None:
            continue
        slower, faster = max(real_a.step_time_s, real_b.step_time_s), min(real_a.step_time_s, real_b.step_time_s)
        if slower / faster - 1 <= SAME_SPEED:
            continue
        pairs += 1
        if (real_a.step_time_s < real_b.step_time_s) != (sim_a.step_time_s < sim_b.step_time_s):
            wrong.append(
                {
                    "runs": [a, b],
                    "measured_s": [real_a.step_time_s, real_b.step_time_s],
                    "simulated_s": [sim_a.step_time_s, sim_b.step_time_s],
                }
            )
    return {"pairs": pairs, "in_measured_order": pairs - len(wrong), "wrong": wrong}


def error(simulated: float | None, measured: float | None) -> float | None:
    """(simulated - measured) / measured; None where one is missing or nothing was measured."""
    return None if simulated is None or not measured else (simulated - measured) / measured


def peak_bytes(row: ComparedRun) -> tuple[float | None, float | None]:
    """(measured, simulated) peak bytes of the rank whose error is largest; None where a side is not known."""
    return _worst_rank(row, lambda figures: figures.peak_allocated_bytes)


def class_s(row: ComparedRun, name: str) -> tuple[float | None, float | None]:
    """(measured, simulated) seconds of a class of kernels, of the rank whose error is largest; None where a side is not
    known."""
    return _worst_rank(row, lambda figures: figures.class_s[name])


def _worst_rank(
    row: ComparedRun, values: Callable[[Figures], Sequence[float] | None]
) -> tuple[float | None, float | None]:
    """(measured, simulated) of the rank whose error is largest, of several the one that is off by most; where none has
    one, the most that each side has."""
    measured, simulated = (() if side is None else values(side) or () for side in (row.measured, row.simulated))
    pairs = [pair for pair in zip(measured, simulated, strict=False) if pair[0]]
    if pairs:
        return max(pairs, key=lambda pair: (abs(pair[1] / pair[0] - 1), abs(pair[1] - pair[0])))
    return max(measured, default=None), max(simulated, default=None)


def _memory(row: ComparedRun) -> Outcome:
    measured, simulated = peak_bytes(row)
    if row.memory_reason and not row.reason:
        return Outcome(row.name, MEMORY, "GiB", None, None, skipped=row.memory_reason)
    return _outcome(row, MEMORY, "GiB", measured and measured / GiB, simulated and simulated / GiB)


def _outcome(row: ComparedRun, quantity: str, unit: str, measured: float | None, predicted: float | None) -> Outcome:
    if row.reason or not measured or predicted is None:
        missing = "not told by the record" if measured is None and row.measured is not None else "not measured"
        return Outcome(row.name, quantity, unit, measured or None, None, skipped=row.reason or missing)
    return Outcome(row.name, quantity, unit, measured, predicted)


def _step(figures: Figures | None) -> float | None:
    return None if figures is None else figures.step_time_s
