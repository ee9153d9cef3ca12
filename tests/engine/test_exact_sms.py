"""The engine's shortcuts where communication waits for SMs, and slows kernels each by its own share."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.api import run_step
from simulator.cluster import build_cluster
from simulator.config.cluster import cluster_data
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.engine.invariants import check
from simulator.frameworks import Framework, pytorch
from simulator.lowering import build_program
from simulator.step_result import StepResult
from tests.support import quick
from tests.support.exact import assert_same
from tests.support.jobs import job

H100 = load_profile("h100-sxm-80gb")
NODE = {key: value for key, value in cluster_data("dgx_h100")[0].items() if key != "nodes"} | {"name": "inline"}
ASYNC = {"grad_reduce": True, "p2p": True, "param_gather": True}
#: Kernels long enough that they, not their launches, set the pace.
LARGE = {"model__hidden": 2048, "model__heads": 16, "training__seq": 2048}
SECTIONS: list[dict[str, Any]] = [
    {"dp": 8, "overlap": ASYNC},
    {"dp": 8, "zero": 3, "overlap": ASYNC},
    {"tp": 2, "dp": 4, "overlap": {**ASYNC, "tp": True}},
    {"dp": 2, "pp": 4, "schedule": "1f1b", "overlap": ASYNC},
    {"tp": 2, "dp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved", "overlap": ASYNC},
    {"dp": 4, "pp": 2, "schedule": "zb_h1", "zero": 1, "overlap": ASYNC},
]


def play(section: dict[str, Any], costs: Costs, *, shortcuts: bool) -> StepResult:
    workload = quick.load(job(**LARGE) | {"parallelism": section, "cluster": NODE, "calibration": H100.name})
    cluster, program = build_cluster(workload.cluster), build_program(workload)
    spans = simulate(program, cluster, costs, fold=shortcuts, coalesce=shortcuts)
    return StepResult(workload, {H100.gpu: H100}, cluster, costs, program, spans, simulate=run_step)


@pytest.mark.parametrize(
    ("section", "software"),
    [
        pytest.param(section, software, marks=[] if i % 4 == 2 * j else [pytest.mark.slow])
        for i, section in enumerate(SECTIONS)
        for j, software in enumerate((pytorch.FRAMEWORK, pytorch.COMPILED))
    ],
)
def test_fold_and_coalesce_change_nothing_where_communication_waits_for_sms(
    section: dict[str, Any], software: Framework
) -> None:
    costs = Costs.from_profile(H100, software)
    assert costs.interference is not None
    assert costs.interference.queues
    short, plain = (play(section, costs, shortcuts=on) for on in (True, False))
    check(short.program, short.spans)
    check(plain.program, plain.spans)
    assert_same(short, plain)
