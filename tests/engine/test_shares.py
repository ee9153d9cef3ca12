"""What a step's time goes to is read off recorded facts, and so is the same whatever shortcuts it was played with."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from simulator.api import run
from simulator.errors import InputError
from tests.support.exact import leaves
from tests.support.grids import one_in
from tests.support.jobs import any_job, job
from tests.support.quick import CLUSTER, SPEEDS, load, play

#: (fold, coalesce), one of them off or both.
PLAIN = [(True, False), (False, True), (False, False)]


def figures(result: dict[str, Any]) -> dict[str, list[float]]:
    """What must not depend on the shortcuts."""
    step = result["step_time_s"]
    kinds = result["communication"].values()
    return {
        "breakdown": [part / step for part in leaves(result["time_breakdown_s"])],
        "host": [result["host_bound_fraction"]],
        "bubble": [result["bubble_fraction"]],
        "memory": [stage["peak"] / result["memory"]["capacity_bytes"] for stage in result["memory"]["per_stage"]],
        "communication": [kind[key] / step for kind in kinds for key in ("time_s", "exposed_s")],
    }


def uneven_job(seed: int) -> dict[str, Any]:
    """A random job with tensor parallelism, whose collectives stop blocks or do not, and sometimes a slow GPU."""
    one = Random(seed).choice
    workload = any_job(lambda *choices: one(choices))
    while workload["parallelism"]["tp"] == 1:
        workload = any_job(lambda *choices: one(choices))
    if workload["parallelism"]["pp"] > 1 and one([True, False]):  # backward passes in two halves
        schedule = one(["zb_h1", "interleaved_zb"])
        workload["parallelism"] |= {"schedule": schedule, "vpp": 2 if schedule == "interleaved_zb" else 1}
        workload["model"]["layers"] = 8
    if one([True, False, False]):
        workload["cluster"] = CLUSTER | {"overrides": [{"gpu": "node0.gpu1", "speed_scale": 0.7}]}
    return workload


@pytest.mark.parametrize("seed", one_in(2, range(8)))
def test_shares_of_the_step_do_not_depend_on_shortcuts(seed: int) -> None:
    try:
        workload = load(uneven_job(seed))
    except InputError:
        pytest.skip("not legal")
    speeds, (fold, coalesce) = SPEEDS[seed % len(SPEEDS)], PLAIN[seed % len(PLAIN)]
    short = figures(play(workload, speeds).to_dict())
    for name, values in figures(play(workload, speeds, fold=fold, coalesce=coalesce).to_dict()).items():
        assert short[name] == pytest.approx(values, abs=1e-9), name


#: Hosts as slow as the profile says.
SLOW_HOSTS = {"name": "dgx_a100", "node": {"host_speed": 1.0, "autograd_speed": 1.0}}


def test_waiting_for_the_launch_of_a_collective_is_the_hosts() -> None:
    """Kernels of nanoseconds: GPUs wait for nothing but launches, of kernels and of the collectives between them, also
    where these are a rendezvous. Equal ranks of one stage never wait for each other, so that there is no bubble."""
    workload = load(job(model__hidden=64, training__seq=16, parallelism__tp=2, cluster=SLOW_HOSTS))
    for fold, coalesce in [(True, True), *PLAIN]:
        parts = play(workload, fold=fold, coalesce=coalesce).to_dict()
        assert parts["time_breakdown_s"]["bubble"] <= 1e-9 * parts["step_time_s"]
        assert parts["host_bound_fraction"] > 0.3


def test_asynchronous_workers_are_cut_alike_however_their_passes_were_played() -> None:
    """A worker that meets others at servers now and then has steps of unequal length, and its mean period begins
    within a pass: what that did before does not count, kernel by kernel."""
    workload = job(
        model__layers=3,
        training__global_batch=6,
        parallelism__pp=3,
        parallelism__tp=2,
        parallelism__dp=2,
        parallelism__schedule="naive",
        parallelism__data_parallel="async",
    )
    nics = {"count": 2, "bandwidth_bps": 1e11, "latency_s": 3e-6}
    node = CLUSTER["node"] | {"gpus": {"type": "a100-sxm-80gb", "count": 1}, "nics": nics}
    workload["cluster"] = CLUSTER | {"node": node, "overrides": [{"gpu": "node0.gpu0", "speed_scale": 0.9}]}
    short, plain = (run({**workload, "simulation": {"coalesce": coalesce}}).to_dict() for coalesce in (True, False))
    assert not short["warnings"]
    for name, values in figures(plain).items():
        assert figures(short)[name] == pytest.approx(values, abs=1e-9), name
