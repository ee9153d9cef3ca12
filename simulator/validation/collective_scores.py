"""Scores of the suite of collectives: errors of its rows, and the floor below which no prediction can come."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.errors import InputError, in_one_line
from simulator.units import MiB
from simulator.validation.collectives import NAME, PARTS, CollectiveCase, case_of, measured_s, printed_busbw_Bps
from simulator.validation.evaluate import MAX_SKIPPED, Outcome, summarise
from simulator.validation.rows import Row, UnsupportedError
from simulator.validation.suite import Bounds

LARGE_MESSAGE_BYTES = 64 * MiB
#: Of the geometric-mean error of part `PARTS[0]`: over all sizes, and above `LARGE_MESSAGE_BYTES`.
BOUND, BOUND_LARGE = 0.12, 0.07


@dataclass(frozen=True)
class Prediction:
    """``case`` took ``seconds`` with the ``algorithm`` and ``protocol`` that were chosen; ``bus_factor`` is nccl-tests'
    busbw / algbw."""

    seconds: float
    algorithm: str
    protocol: str
    bus_factor: float


@dataclass(frozen=True)
class Compared:
    """A row beside its prediction. ``case`` is None where the row cannot be simulated; ``busbw_Bps`` is what the row
    prints of it, if anything."""

    outcome: Outcome
    part: str
    case: CollectiveCase | None = None
    predicted: Prediction | None = None
    busbw_Bps: float | None = None

    @property
    def log_error(self) -> float:
        """ln(predicted / measured) of a row that was not skipped."""
        assert self.outcome.measured is not None
        assert self.outcome.predicted is not None
        return math.log(self.outcome.predicted / self.outcome.measured)

    @property
    def stack(self) -> str | None:
        """The stack that the row was made with, or the GPU; none of a row without a case."""
        if self.case is None:
            return None
        return self.case.stack.name if self.case.stack else self.case.cluster.gpu_types[0]

    @property
    def predicted_busbw_Bps(self) -> float | None:
        """Predicted bus bandwidth; none of a row that cannot be predicted."""
        if self.case is None or self.predicted is None:
            return None
        return self.case.nbytes / self.predicted.seconds * self.predicted.bus_factor

    def to_dict(self) -> dict[str, Any]:
        """The row under the names of the JSON output."""
        extra: dict[str, Any] = {"part": self.part, "stack": None, "measured_busbw_Bps": self.busbw_Bps}
        if self.case is not None and self.predicted is not None:
            extra |= {
                "stack": self.stack,
                "op": self.case.op,
                "size_bytes": self.case.nbytes,
                "n_gpus": len(self.case.ranks),
                "algorithm": self.predicted.algorithm,
                "protocol": self.predicted.protocol,
                "predicted_busbw_Bps": self.predicted_busbw_Bps,
            }
        return {**self.outcome.to_dict(), **extra}


def compare(rows: Iterable[Row], predict: Callable[[CollectiveCase], Prediction]) -> list[Compared]:
    """Every row beside what ``predict`` says of it. One without a time is skipped with the reason, but predicted where
    it can be, for its busbw."""
    return [_compared(row, predict) for row in rows]


def _compared(row: Row, predict: Callable[[CollectiveCase], Prediction]) -> Compared:
    part = PARTS[0]
    measured, case, prediction, busbw, skipped = None, None, None, None, ""
    try:
        measured = measured_s(row)
    except UnsupportedError as reason:
        skipped = in_one_line(reason)
    try:
        case = case_of(row)
        part = case.part
        busbw = printed_busbw_Bps(row)
        prediction = predict(case)
    except (UnsupportedError, InputError) as reason:
        skipped = "; ".join([*([skipped] if skipped else []), in_one_line(reason)])
    outcome = Outcome(
        row["id"],
        "time",
        "s",
        measured,
        prediction.seconds if prediction else None,
        skipped=skipped,
        fitted_on=bool(case and prediction and measured is not None and case.fitted_on),
    )
    return Compared(outcome, part, case, prediction, busbw)


def geometric_mean(errors: Iterable[float]) -> float | None:
    """exp(mean |ln(predicted / measured)|) - 1 of such logarithms; None of none.

    >>> round(geometric_mean([math.log(1.1), math.log(1 / 1.1)]), 6)
    0.1
    """
    sizes = [abs(error) for error in errors]
    return math.expm1(statistics.fmean(sizes)) if sizes else None


def score(compared: Sequence[Compared], bounds: Bounds, *, name: str = NAME) -> dict[str, Any]:
    """The suite's JSON: the figures of `summarise` for the first part, its geometric means, every part and stack, and
    the floor. A user's rows, under another ``name``, are bound by ``bounds`` alone.

    Rows without a time cannot be compared and do not count among the skipped ones that fail a suite.
    """
    timed = [row for row in compared if row.outcome.measured is not None]
    scored = [row for row in timed if row.outcome.predicted is not None]
    first = [row for row in scored if row.part == PARTS[0]]
    users_rows = name != NAME
    summary = summarise(name, [row.outcome for row in first], bounds)
    skipped = len(timed) - len(scored)
    mean = geometric_mean(row.log_error for row in first)
    large = geometric_mean(row.log_error for row in first if row.case and row.case.nbytes > LARGE_MESSAGE_BYTES)
    limits = {} if users_rows else {"geometric_mean": BOUND, "geometric_mean_large": BOUND_LARGE}
    kept = (
        mean is not None
        and summary["passed"] is not False
        and skipped <= MAX_SKIPPED * len(timed)
        and (users_rows or (mean <= BOUND and (large or 0.0) <= BOUND_LARGE))
    )
    bounded = bool(limits) or summary["passed"] is not None
    return {
        **summary,
        "rows": [row.to_dict() for row in compared],
        "n_rows": len(compared),
        "n_skipped": len(compared) - len(scored),
        "n_without_time": len(compared) - len(timed),
        "geometric_mean": mean,
        "geometric_mean_large": large,
        "parts": _parts(scored, compared),
        "stacks": _stacks(first),
        "floor": floor(scored),
        "bounds": {**summary["bounds"], **limits},
        "passed": kept if bounded else None,
    }


def _parts(scored: Sequence[Compared], compared: Sequence[Compared]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for name in PARTS:
        errors = [row.log_error for row in scored if row.part == name]
        parts.append({"part": name, "n": len(errors), **_errors(errors)})
    only_busbw = [
        math.log(row.predicted_busbw_Bps / row.busbw_Bps)
        for row in compared
        if row.outcome.measured is None and row.busbw_Bps and row.predicted_busbw_Bps and row.part == PARTS[0]
    ]
    return [*parts, {"part": "rows with a busbw alone", "n": len(only_busbw), **_errors(only_busbw)}]


def _errors(errors: Sequence[float]) -> dict[str, float | None]:
    return {
        "geometric_mean": geometric_mean(errors),
        "max_abs": max([abs(math.expm1(error)) for error in errors], default=None),
        "bias": statistics.fmean([math.expm1(error) for error in errors]) if errors else None,
    }


def _stacks(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return the errors of every stack, apart for the number of GPUs that it was fitted on and for other numbers."""
    by_stack: dict[str, list[Compared]] = {}
    for row in rows:
        by_stack.setdefault(str(row.stack if row.predicted else None), []).append(row)
    entries = []
    for name, stack_rows in by_stack.items():
        sets = {"fitted": True, "others": False}
        entry: dict[str, Any] = {"stack": name}
        for key, fitted in sets.items():
            errors = [row.log_error for row in stack_rows if row.outcome.fitted_on is fitted]
            entry[key] = {"n": len(errors), "geometric_mean": geometric_mean(errors)}
        entries.append(entry)
    return entries


def floor(rows: Sequence[Compared]) -> dict[str, Any]:
    """The spread of rows that measure one thing on equal hardware: no model of the hardware alone is nearer to all.

    ``geometric_mean`` is of their distances from the geometric mean of their group.
    """
    groups: dict[tuple[object, ...], list[Compared]] = {}
    for row in rows:
        if row.case is not None and row.part == PARTS[0]:
            case = row.case
            key = (case.op, case.nbytes, case.ranks, case.hardware, case.algorithm)
            groups.setdefault(key, []).append(row)
    several = {key: group for key, group in groups.items() if len(group) > 1}
    distances: list[float] = []
    spreads = []
    for (op, nbytes, ranks, hardware, _), group in several.items():
        assert isinstance(ranks, tuple)
        logs = [math.log(row.outcome.measured or math.nan) for row in group]
        distances += [log - statistics.fmean(logs) for log in logs]
        spreads.append(
            {
                "op": op,
                "size_bytes": nbytes,
                "n_gpus": len(ranks),
                "hardware": hardware,
                "rows": [row.outcome.id for row in group],
                "spread": math.expm1(max(logs) - min(logs)),
            }
        )
    return {"groups": spreads, "geometric_mean": geometric_mean(distances)}
