"""``python -m simulator.validation.record``: simulate every row of every suite and record the errors anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from simulator.analysis.advice import few_rounds
from simulator.api import run
from simulator.config import load_workload
from simulator.validation import memory_suite
from simulator.validation.accuracy import RECORD
from simulator.validation.evaluate import Outcome, evaluate
from simulator.validation.rows import Row, read_rows
from simulator.validation.suites import SUITES, Suite


def step_time_s(row: Row, workload: dict[str, Any]) -> float:
    """Seconds of a step of ``workload``."""
    return run(workload).spans.step_time_s


def memory_gib(row: Row, workload: dict[str, Any]) -> float:
    """The memory that the row's source prints, GiB. A few rounds of micro-batches hold what many do."""
    result = run(few_rounds(load_workload(workload)))
    return memory_suite.predicted_gib(row, result.memories_within(memory_suite.capacity_of(row)))


def outcomes_of_memory(rows: Sequence[Row]) -> list[Outcome]:
    """Predicted beside measured memory."""
    return evaluate(rows, memory_suite.settings_of, memory_gib, memory_suite.MEMORY)


def errors_of(suite: Suite) -> dict[str, float]:
    """row -> (predicted - measured) / measured, of the rows that can be simulated."""
    return _errors(evaluate(read_rows(suite.table), suite.settings_of, step_time_s))


def _errors(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {outcome.id: round(outcome.error, 6) for outcome in outcomes if outcome.error is not None}


def record() -> None:
    """Write the errors of all suites to `RECORD`."""
    errors = {name: errors_of(suite) for name, suite in SUITES.items()}
    errors[memory_suite.NAME] = _errors(outcomes_of_memory(memory_suite.memory_rows()))
    RECORD.write_text(json.dumps(errors, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
