"""What optimizers and losses took on an H200: rows of calibration/measurements/optimizers-and-losses.csv."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from simulator.cluster import Cluster, build_cluster
from simulator.config.profile import load_profile
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.frameworks import Framework
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.hardware.profile import Profile
from simulator.operations.nodes import Op
from simulator.program import Block, Program, Role, Step, StepPhase
from simulator.timeline import Timeline

FILE = Path(__file__).resolve().parents[2] / "calibration" / "measurements" / "optimizers-and-losses.csv"
GPU = "h200-sxm-141gb"


@cache
def measured(case: str) -> Mapping[tuple[str, str, str], Mapping[str, float]]:
    """Quantities of every row of a case by name, implementation and type."""
    quantities: dict[tuple[str, str, str], dict[str, float]] = {}
    with FILE.open(encoding="utf-8", newline="") as rows:
        for row in csv.DictReader(rows):
            if row["case"] == case:
                key = (row["name"], row["implementation"], row["dtype"])
                quantities.setdefault(key, {})[row["quantity"]] = float(row["value"])
    return quantities


@cache
def profile() -> Profile:
    return load_profile(GPU)


@cache
def cluster() -> Cluster:
    node = {"gpus": {"type": GPU, "count": 1}, "pcie": {"generation": 5}}
    return build_cluster(validated(ClusterSpec, {"name": "one", "node": node}))


def played(passes: Mapping[StepPhase, Sequence[Op]], software: Framework) -> Timeline:
    """A step of one H200 that runs these passes one after another."""
    steps = tuple(Step(phase.name, Block(phase.name, tuple(ops)), phase=phase) for phase, ops in passes.items() if ops)
    program = Program((Role("alone", {"compute": steps}),), (0,), {})
    return simulate(program, cluster(), Costs.from_profile(profile(), software))


def kernel_s(timeline: Timeline, launches: int) -> float:
    """Seconds of the kernels of ``timeline`` as a profiler counts them: without the gaps behind them."""
    rows = timeline.rows()
    gap = profile().kernels.gap_s
    assert gap is not None
    return float((rows["end_s"] - rows["start_s"]).sum()) - launches * gap.value
