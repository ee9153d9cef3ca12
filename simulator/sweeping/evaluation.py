"""Evaluation of a point: the work of one process, which ends with an outcome."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from simulator.api import run_step
from simulator.config import Workload, catalog, load_workload
from simulator.config.loading import written_in
from simulator.errors import InputError, SimulatorError, each, in_one_line, located
from simulator.garbage import rarely_searched
from simulator.sweeping.key import job_key, written_key
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point

#: Place of a point's changes in errors.
CHANGES = "the point"


def _always(key: str) -> bool:
    return True


@dataclass(frozen=True)
class OpenedPoint:
    """A point with its loaded workload and its key: all that a simulation needs, wherever it runs."""

    point: Point
    workload: Workload
    key: str


def evaluate(
    point: Point, finished: Container[str] = frozenset(), begins: Callable[[str], bool] = _always
) -> PointOutcome:
    """Return the outcome of a point; it depends on the point and the files that it names, on nothing else.

    A point whose key is in ``finished`` is not simulated again. ``begins`` is told the key before a simulation, and
    says whether to begin it.
    """
    opened = open_point(point, finished)
    if isinstance(opened, PointOutcome):
        return opened
    return simulated(opened) if begins(opened.key) else PointOutcome(opened.key, Status.KEPT)


def open_point(point: Point, finished: Container[str] = frozenset()) -> OpenedPoint | PointOutcome:
    """Return a point with its workload, or its outcome where it is not legal or its key is in ``finished``."""
    try:
        workload = load_workload(point.workload, point.changes, by=CHANGES)
        key = job_key(workload)
    except SimulatorError as error:
        return PointOutcome(written_key(point), Status.REFUSED, error=_sentence(error))
    except Exception as error:
        return PointOutcome(written_key(point), Status.FAILED, error=_breakdown(error))
    return PointOutcome(key, Status.KEPT) if key in finished else OpenedPoint(point, workload, key)


def simulated(opened: OpenedPoint) -> PointOutcome:
    """Return the outcome of a point whose workload is loaded."""
    began, point, key = time.perf_counter(), opened.point, opened.key
    source = None if isinstance(point.workload, Mapping) else point.workload
    try:
        with located(written_in(source, point.changes, CHANGES)), rarely_searched():
            figures, warnings = _figures_and_warnings(opened.workload)
    except SimulatorError as error:
        outcome = PointOutcome(key, Status.REFUSED, error=_sentence(error))
    except Exception as error:
        outcome = PointOutcome(key, Status.FAILED, error=_breakdown(error))
    else:
        outcome = PointOutcome(key, Status.SIMULATED, figures, warnings=warnings)
    return replace(outcome, wall_s=time.perf_counter() - began)


def _figures_and_warnings(workload: Workload) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what is kept of a simulation; all else is gone when Python looks for garbage again."""
    result = run_step(workload)
    return result.key_figures(), tuple(result.warnings)


def _sentence(error: SimulatorError) -> str:
    """Return what an error says, in one line; that a key is one of the point's goes without saying.

    A shipped file has its name, so that the sentence is the same wherever the simulator is installed.
    """
    if not isinstance(error, InputError):
        return in_one_line(error)
    errors, more = each(error)
    for one in errors:
        one.file = None if one.file is None or one.file.startswith(CHANGES) else catalog.name_of(one.file)
    return ". ".join([*map(in_one_line, errors), *([f"and {more:,} more"] if more else [])])


def _breakdown(error: Exception) -> str:
    """Return what broke down in the simulator itself, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"the simulator broke down: {type(error).__name__}: {error} ({frame.name}, line {frame.lineno})"
