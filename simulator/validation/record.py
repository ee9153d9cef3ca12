"""``python -m simulator.validation.record [SUITE..]``: simulate every row of every suite, or of some, and record the
errors anew, and of steps what prediction intervals rest on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from simulator.analysis.training.advice import few_rounds
from simulator.api import run
from simulator.cluster import Cluster, build_cluster
from simulator.config import Workload
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.network import hosts
from simulator.network.collectives import OPERATIONS, bus_factor, fastest, idle_seconds, patterns
from simulator.network.pattern import Pattern
from simulator.validation import collectives, memory_suite
from simulator.validation.collective_scores import Compared, Prediction, compare
from simulator.validation.collectives import CollectiveCase
from simulator.validation.errors import RECORD
from simulator.validation.evaluate import Outcome, evaluate
from simulator.validation.measured_steps import STEPS, MeasuredStep, measured_steps, write_steps
from simulator.validation.memory_suite import MEMORY_SUITES
from simulator.validation.rows import Row, UnsupportedError, loaded, measured_step_s, read_rows
from simulator.validation.suite import Suite
from simulator.validation.suites import SUITES
from simulator.validation.traits import traits_of

#: Suites in the order of the file.
ALL = [*SUITES, *MEMORY_SUITES, collectives.NAME]
#: Columns on hosts that were probed beside a run. Nobody knows them before a machine is rented, so that prediction
#: intervals rest on steps that are simulated without them.
PROBED = ("cluster.node.host_speed", "cluster.node.autograd_speed", "cluster.overrides")


def step_time_s(row: Row, workload: Workload) -> float:
    """Seconds of a step of ``workload``."""
    return run(workload).spans.step_time_s


def memory_gib(row: Row, workload: Workload) -> float:
    """The memory that the row's source prints, GiB. A few rounds of micro-batches hold what many do."""
    result = run(few_rounds(workload))
    return memory_suite.predicted_gib(row, result.memories_within(memory_suite.capacity_of(row)))


def outcomes_of_steps(rows: Iterable[Row], suite: Suite) -> list[Outcome]:
    """Predicted beside measured step times, of rows of ``suite``."""
    return evaluate(rows, suite.settings_of, step_time_s)


def outcomes_of_memory(rows: Iterable[Row]) -> list[Outcome]:
    """Predicted beside measured memory."""
    return evaluate(rows, memory_suite.settings_of, memory_gib, memory_suite.MEMORY)


def predict_collective(case: CollectiveCase) -> Prediction:
    """A collective on an idle cluster, as nccl-tests measures it."""
    cluster, costs = _built(case.hardware, case.cluster.nodes), costs_of(case)
    plan = fastest(case.op, patterns_of(case), case.nbytes, costs)
    factor = bus_factor(case.op, len(case.ranks)) if case.op in OPERATIONS else 1.0
    return Prediction(idle_seconds(plan, cluster, costs), plan.algorithm, plan.protocol, factor)


def patterns_of(case: CollectiveCase) -> tuple[Pattern, ...]:
    """Return the patterns of the case's algorithms on the links."""
    cluster = _built(case.hardware, case.cluster.nodes)
    first = np.zeros(1, dtype=np.int64)
    ends = hosts.ends(case.op, cluster, first, ())[0].tolist() if case.op in hosts.OPERATIONS else case.ranks
    return patterns(case.op, ends, cluster, case.algorithm)


def costs_of(case: CollectiveCase) -> Costs:
    """How links carry bytes: as the case's stack says, or the profile of its GPU."""
    if case.stack is not None:
        return Costs.from_stack(case.stack)
    return Costs.from_profile(load_profile(case.cluster.gpu_types[0]))


@lru_cache(maxsize=64)
def _built(hardware: str, nodes: int) -> Cluster:
    return build_cluster(collectives.cluster_of(hardware), nodes)


def outcomes_of_collectives(rows: Iterable[Row]) -> list[Compared]:
    """Predicted beside measured collectives."""
    return compare(rows, predict_collective)


def errors_of(suite: Suite) -> dict[str, float]:
    """row -> (predicted - measured) / measured, of the rows that can be simulated."""
    return {step.id: error for error, step in simulated_rows(suite)}


def simulated_rows(suite: Suite, ids: Sequence[str] | None = None) -> Iterator[tuple[float, MeasuredStep]]:
    """Yield the error of each row that can be simulated, and its step as one would have predicted it beforehand.

    ``ids``: of these rows alone.
    """
    for row in read_rows(suite.table):
        if ids is None or row["id"] in ids:
            try:
                yield simulated_row(row, suite)
            except (UnsupportedError, InputError):
                continue


def simulated_row(row: Row, suite: Suite) -> tuple[float, MeasuredStep]:
    """Return the error of a row, and its step as one would have predicted it: without what was probed beside it.

    Raises `UnsupportedError` and `InputError`.
    """
    measured, settings = measured_step_s(row), suite.settings_of(row)
    workload = loaded({key: value for key, value in row.items() if key not in PROBED}, settings)
    figures = run(workload).key_figures()
    seconds = figures["step_time_s"]
    source = suite.measured_by or row.get("software", suite.name)
    traits = traits_of(workload, figures, suite.year)
    step = MeasuredStep(row["id"], suite.name, source, measured, seconds, traits)
    if any(row.get(key) for key in PROBED):
        seconds = step_time_s(row, loaded(row, settings))
    return round((seconds - measured) / measured, 6), step


def _errors(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {outcome.id: round(outcome.error, 6) for outcome in outcomes if outcome.error is not None}


def _errors_without_steps(name: str) -> dict[str, float]:
    """The errors of a suite of memory or of collectives, simulated anew."""
    if name in MEMORY_SUITES:
        return _errors(outcomes_of_memory(MEMORY_SUITES[name].rows))
    return _errors([row.outcome for row in outcomes_of_collectives(collectives.measurements())])


def record(names: Sequence[str]) -> None:
    """Write the errors of the suites ``names`` to `RECORD` and their steps to `STEPS`, each as it is done, and nothing
    of suites that are no more."""
    for name in names:
        if name not in SUITES:
            _write(name, _errors_without_steps(name))
            continue
        rows = list(simulated_rows(SUITES[name]))
        _write(name, {step.id: error for error, step in rows})
        new = [step for _, step in rows]
        recorded_steps = [step for step in measured_steps() if step.suite != name]
        suites = [suite.name for suite in SUITES.values() if suite.evidence]
        steps = [step for suite in suites for step in (*recorded_steps, *new) if step.suite == suite]
        STEPS.write_text(write_steps(steps), encoding="utf-8")
        measured_steps.cache_clear()


def _write(name: str, errors: Mapping[str, Any]) -> None:
    recorded_errors = {**json.loads(RECORD.read_text(encoding="utf-8")), name: errors}
    kept = {suite: recorded_errors[suite] for suite in ALL if suite in recorded_errors}
    RECORD.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m simulator.validation.record", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(ALL)} [all]")
    chosen = parser.parse_args().suites
    if unknown := set(chosen) - set(ALL):
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    record(chosen or ALL)
