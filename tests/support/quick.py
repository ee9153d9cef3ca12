"""`simulator.run` for tests that run it often: without parsing the same cluster and profile again each time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulator.api import run_step
from simulator.cluster import build_cluster
from simulator.config import Workload, load_workload
from simulator.config.cluster import cluster_data
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.lowering import build_program
from simulator.program import Comm
from simulator.step_result import StepResult
from tests.support.jobs import FAST_HOSTS

PROFILE = load_profile("a100-sxm-80gb")
#: All that a host issues, as `simulator.costs.launch.issued` calls it.
ISSUED = tuple(Costs.from_profile(PROFILE).launch)
#: dgx_a100 as a mapping, under a name that is no file's, with the hosts of `tests.support.jobs.job`.
_DATA = cluster_data("dgx_a100")[0]
CLUSTER = {key: value for key, value in _DATA.items() if key != "nodes"} | {
    "name": "inline",
    "node": _DATA["node"] | FAST_HOSTS,
}

#: Shares of their speed that kernels keep beside communication, by its purpose (`ByPurpose`).
SPEEDS: list[dict[str, float]] = [{}, {"dp": 0.8}, {"pp": 0.7, "dp": 0.9}, {"tp": 0.9, "pp": 0.9, "dp": 0.5, "cp": 0.7}]


@dataclass(frozen=True)
class ByPurpose:
    """Communication of a purpose slows every kernel alike; the slowest counts; where ``queues``, it waits for SMs."""

    speeds: Mapping[str, float]
    queues: bool = False

    def load(self, waiting: Sequence[Comm], moving: Sequence[Comm]) -> float | None:
        slowest = min((self.speeds.get(comm.purpose, 1.0) for comm in (*waiting, *moving)), default=1.0)
        return slowest if slowest < 1 else None

    def speed(self, kernel: object, load: Hashable) -> float:
        return load if isinstance(load, float) else 1.0

    def takes(self, memory_Bps: float) -> float:
        return 0.0

    def leaves(self, kernel: object) -> float:
        return math.inf


def load(description: Mapping[str, Any]) -> Workload:
    """The workload, on `CLUSTER` unless it has one inline. Raises `InputError`."""
    own = {*description.get("cluster", {}).get("node", ())} - {*FAST_HOSTS}
    return load_workload(description if own else {**description, "cluster": CLUSTER})


def play(
    workload: Workload, speeds: Mapping[str, float] | None = None, *, fold: bool = True, coalesce: bool = True
) -> StepResult:
    """As `simulator.run`; ``speeds``: what communication takes from computation, in place of the profile's figures."""
    cluster = build_cluster(workload.cluster)
    costs = Costs.from_profile(PROFILE, workload.software)
    if speeds is not None:
        costs = replace(costs, interference=ByPurpose(speeds) if speeds else None)
    program = build_program(workload)
    return StepResult(
        workload,
        {PROFILE.gpu: PROFILE},
        cluster,
        costs,
        program,
        simulate(program, cluster, costs, fold=fold, coalesce=coalesce),
        simulate=run_step,
    )


def play_undisturbed(workload: Workload) -> StepResult:
    """Play a job on GPUs whose NCCL holds no SMs: communication takes nothing from the computation beside it."""
    return play(workload, {})


_PLAYED: dict[str, StepResult] = {}


def play_once(workload: Workload) -> StepResult:
    """Return the step of a job by `play`; equal jobs share one, which no test may change."""
    key = workload.model_dump_json()
    if key not in _PLAYED:
        _PLAYED[key] = play(workload)
    return _PLAYED[key]
