"""``python -m simulator.validation.record``: simulate every row of every suite and record the errors anew."""

from __future__ import annotations

import json

from simulator.api import run
from simulator.validation.accuracy import RECORD
from simulator.validation.evaluate import evaluate
from simulator.validation.rows import read_rows
from simulator.validation.suites import SUITES, Suite


def errors_of(suite: Suite) -> dict[str, float]:
    """row -> (predicted - measured) / measured, of the rows that can be simulated."""
    outcomes = evaluate(read_rows(suite.table), suite.settings_of, lambda workload: run(workload).spans.step_time_s)
    return {outcome.id: round(outcome.error, 6) for outcome in outcomes if outcome.error is not None}


def record() -> None:
    """Write the errors of all suites to `RECORD`."""
    errors = {name: errors_of(suite) for name, suite in SUITES.items()}
    RECORD.write_text(json.dumps(errors, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
