"""Summaries of steps that hosts bound: how long a step takes on hosts of half the speed."""

from __future__ import annotations

from typing import Any

from simulator.api import run
from simulator.config import load_workload
from simulator.output.summary import opening

NARROW: dict[str, Any] = {
    "name": "narrow",
    "model": {"layers": 2, "hidden": 128, "heads": 4, "vocab": 1024},
    "framework": "pytorch",
    "training": {"seq": 128, "global_batch": 1},
    "cluster": "hgx_h200_4gpu",
}
WIDE = NARROW | {
    "model": {"layers": 2, "hidden": 8192, "heads": 64, "vocab": 1024},
    "training": {"seq": 8192, "global_batch": 1},
}


def test_steps_that_hosts_bound_say_what_slower_ones_would_make_of_them() -> None:
    """A model so narrow that its GPU mostly waits: nearly all of the step is issuing, which takes twice as long."""
    report = run(load_workload(NARROW)).to_dict()
    assert report["host_bound_fraction"] > 0.5
    slower_s = run(load_workload(NARROW, {"cluster.node.host_speed": 0.5})).to_dict()["step_time_s"]
    assert report["slower_host_step_time_s"] == slower_s
    assert 1.8 < slower_s / report["step_time_s"] < 2.001
    assert "were it half as fast, a step would take" in opening(report)


def test_steps_that_gpus_bound_say_nothing_of_hosts() -> None:
    report = run(load_workload(WIDE)).to_dict()
    assert report["slower_host_step_time_s"] is None
    assert "half as fast" not in opening(report)


def test_nodes_of_all_kinds_have_slower_hosts() -> None:
    """Two kinds of nodes, whose hosts have 0.8 and 0.001 of the calibrated speed. Half of that are 0.4, and the slowest
    that a file may say."""
    gpus = {"type": "h200-sxm-141gb", "count": 1}
    group = {
        "gpus": gpus,
        "pcie": {"generation": 5, "lanes": 16},
        "nics": {"count": 1, "bandwidth_bps": 1e11, "latency_s": 1e-6},
    }
    groups = [{"count": 1, "node": group | {"host_speed": speed}} for speed in (0.8, 0.001)]
    job = load_workload(NARROW | {"cluster": {"name": "mixed", "groups": groups}}, {"training.global_batch": 2})
    assert [node.host_speed for node in job.with_hosts_at(0.5).cluster.node_specs] == [0.4, 0.001]
