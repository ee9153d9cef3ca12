"""How long the main job takes to simulate, stage by stage, and how much work that is.

    python -m benchmarks.bench_gpt175b [--workload gpt175b_3d] [--repeat 3] [--set parallelism.dp=4] [--plain]

Seconds are the best of the repeats, in one process; shares are of their sum. Counts do not depend on the machine:
compare those between two versions, and seconds only between runs on one machine at one time. ``--plain`` also
simulates without folding and coalescing, which says what these save (minutes on the main job).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from simulator.api import run_step
from simulator.cluster import build_cluster
from simulator.config import load_workload
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.input_files import parse_changes
from simulator.lowering import build_program
from simulator.step_result import StepResult
from simulator.timeline import Timeline

T = TypeVar("T")


class StageTimes:
    """Best seconds by stage, in the order in which stages first ran."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, stage: str, work: Callable[[], T]) -> T:
        """Run ``work`` as ``stage``; what it returns."""
        began = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - began
        self.seconds[stage] = min(seconds, self.seconds.get(stage, seconds))
        return result


def step(stages: StageTimes, name: str, changes: dict[str, Any]) -> StepResult:
    """One simulated step, all that a ``run`` with picture and trace does, stage by stage."""
    workload = stages.time("read workload", lambda: load_workload(name, changes))
    profile = stages.time("read profile", lambda: load_profile(workload.calibration))
    cluster = stages.time("build cluster", lambda: build_cluster(workload.cluster))
    program = stages.time("build program", lambda: build_program(workload))
    costs = Costs.from_profile(profile, workload.software)
    timeline = stages.time("simulate", lambda: simulate(program, cluster, costs))
    result = StepResult(workload, {profile.gpu: profile}, cluster, costs, program, timeline, simulate=run_step)
    answer = stages.time("analyse", result.to_dict)
    with TemporaryDirectory() as folder:
        stages.time("write JSON", lambda: (Path(folder) / "out.json").write_text(json.dumps(answer)))
        stages.time("write trace", lambda: result.save_trace(Path(folder) / "out.json.gz"))
        stages.time("draw", lambda: result.gantt().savefig(Path(folder) / "out.png"))
    return result


def counts(timeline: Timeline) -> str:
    """Return the numbers of events, rows and ranks, with their ratios."""
    spans, ranks = len(timeline.rank), len(timeline.ranks)
    return (
        f"{timeline.events:,} events, {spans:,} spans, {timeline.n_rows:,} ops, "
        f"{ranks:,} of {timeline.n_ranks:,} ranks simulated ({timeline.n_ranks / ranks:.1f} for one); "
        f"{timeline.events / spans:.2f} events a span, {timeline.n_rows / timeline.events:.1f} ops an event"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="gpt175b_3d")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--plain", action="store_true", help="also without folding and coalescing")
    options = parser.parse_args(arguments)
    changes = parse_changes(options.set)

    stages = StageTimes()
    for _ in range(max(options.repeat, 1)):
        result = step(stages, options.workload, changes)
    timeline = result.spans
    print(f"{options.workload}: step of {timeline.step_time_s:.3f} s")
    print(f"  {counts(timeline)}")
    total = sum(stages.seconds.values())
    for stage, seconds in stages.seconds.items():
        print(f"  {stage:<14} {seconds:8.3f} s {seconds / total:7.1%}")
    print(f"  {'sum':<14} {total:8.3f} s")
    simulated = stages.seconds["simulate"]
    print(
        f"  {timeline.events / simulated:,.0f} events/s, {timeline.n_rows / simulated:,.0f} ops/s, "
        f"{timeline.step_time_s / simulated:,.1f} simulated seconds a second"
    )
    if options.plain:
        plain = stages.time(
            "plain",
            lambda: simulate(result.program, result.cluster, result.costs, fold=False, coalesce=False),
        )
        print(f"without folding and coalescing: {counts(plain)}")
        print(
            f"  {stages.seconds['plain']:.3f} s, {stages.seconds['plain'] / simulated:.1f} times as long, "
            f"{plain.events / timeline.events:.1f} times the events"
        )


if __name__ == "__main__":
    main()
