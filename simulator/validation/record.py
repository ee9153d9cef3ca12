"""``python -m simulator.validation.record [SUITE..]``: simulate every row of every suite, or of some, and record the
errors anew, and what the suites of steps cover."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from simulator.analysis.training.advice import few_rounds
from simulator.api import run
from simulator.cluster import Cluster, build_cluster
from simulator.config import Workload
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.network import hosts
from simulator.network.collectives import OPERATIONS, bus_factor, fastest, idle_seconds, patterns
from simulator.network.pattern import Pattern
from simulator.validation import collectives, memory_suite
from simulator.validation.accuracy import COVERED, RECORD, coverage
from simulator.validation.collective_scores import Compared, Prediction, compare
from simulator.validation.collectives import Case
from simulator.validation.evaluate import Outcome, evaluate
from simulator.validation.memory_suite import MEMORY_SUITES
from simulator.validation.rows import Row, loaded, read_rows
from simulator.validation.suites import SUITES, Suite

#: Suites in the order of the file.
ALL = [*SUITES, *MEMORY_SUITES, collectives.NAME]


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


def predict_collective(case: Case) -> Prediction:
    """A collective on an idle cluster, as nccl-tests measures it."""
    cluster, costs = _built(case.hardware, case.cluster.nodes), costs_of(case)
    plan = fastest(case.op, patterns_of(case), case.nbytes, costs)
    factor = bus_factor(case.op, len(case.ranks)) if case.op in OPERATIONS else 1.0
    return Prediction(idle_seconds(plan, cluster, costs), plan.algorithm, plan.protocol, factor)


def patterns_of(case: Case) -> tuple[Pattern, ...]:
    """Return the patterns of the case's algorithms on the links."""
    cluster = _built(case.hardware, case.cluster.nodes)
    ends = hosts.ends(case.op, cluster, 0, ()) if case.op in hosts.OPERATIONS else case.ranks
    return patterns(case.op, ends, cluster, case.algorithm)


def costs_of(case: Case) -> Costs:
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
    return _errors(outcomes_of_steps(read_rows(suite.table), suite))


def _errors(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {outcome.id: round(outcome.error, 6) for outcome in outcomes if outcome.error is not None}


def errors_in(name: str) -> dict[str, float]:
    """The errors of a suite, simulated anew."""
    if name in MEMORY_SUITES:
        return _errors(outcomes_of_memory(MEMORY_SUITES[name].rows))
    if name == collectives.NAME:
        return _errors([row.outcome for row in outcomes_of_collectives(collectives.measurements())])
    return errors_of(SUITES[name])


def coverage_in(name: str) -> dict[str, Any]:
    """Return the coverage of the measured steps of a suite; rows without a measurement cover nothing."""
    suite = SUITES[name]
    rows = [row for row in read_rows(suite.table) if row.get("measured_step_s") or row.get("derived_step_s")]
    return coverage([loaded(row, suite.settings_of(row)) for row in rows])


def record(names: Sequence[str]) -> None:
    """Write the errors of the suites ``names`` to `RECORD` and what they cover to `COVERED`, each as it is done, and
    nothing of suites that are no more."""
    for name in names:
        _write(RECORD, name, errors_in(name))
        if name in SUITES:
            _write(COVERED, name, coverage_in(name))


def _write(path: Path, name: str, content: Mapping[str, Any]) -> None:
    recorded_content = {**json.loads(path.read_text(encoding="utf-8")), name: content}
    kept = {suite: recorded_content[suite] for suite in ALL if suite in recorded_content}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m simulator.validation.record", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(ALL)} [all]")
    chosen = parser.parse_args().suites
    if unknown := set(chosen) - set(ALL):
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    record(chosen or ALL)
