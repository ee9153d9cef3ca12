"""Folding by arithmetic gives the classes that refinement over all ranks, groups and links gives one by one."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest

from simulator.api import cluster_of
from simulator.config import Workload, load_workload
from simulator.config.profile import load_profiles
from simulator.costs import Costs
from simulator.engine import Placed
from simulator.errors import InputError
from simulator.lowering import build_program
from tests.support.brute_folding import partition_differences
from tests.support.grids import thinned
from tests.support.jobs import job

#: Layouts of 16 to 32 ranks: all axes, pipelines of either direction, copies of a state, hosts.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp, pp, dp": {"tp": 2, "pp": 4, "dp": 4},
    "interleaved, whole nodes": {"tp": 8, "pp": 2, "dp": 2, "vpp": 2, "schedule": "interleaved"},
    "context": {"tp": 2, "cp": 2, "pp": 2, "dp": 2},
    "fully sharded in pairs": {"dp": 16, "zero": 3, "hsdp": 4},
    "a bidirectional pipeline": {"tp": 2, "pp": 4, "dp": 2, "schedule": "dualpipe"},
}
#: Axes whose sizes multiply to the number of ranks.
AXES = ("tp", "cp", "pp", "dp")
FABRICS: dict[str, dict[str, Any]] = {
    "leaves of four": {"kind": "rail_fat_tree", "tiers": 3, "radix": 8},
    "leaves of two, 3:1": {"kind": "fat_tree", "tiers": 3, "radix": 24, "oversubscription": 3},
    "dragonfly": {"kind": "dragonfly", "radix": 8},
    "torus": {"kind": "torus", "shape": [4, 2]},
}
ODD: dict[str, list[dict[str, Any]]] = {
    "whole": [],
    "slow GPU": [{"gpu": "node1.gpu3", "speed_scale": 0.9}],
    "slow card": [{"link": "node2.nic2", "bandwidth_scale": 0.5}],
    "missing card": [{"nic": "node0.nic1", "missing": True}],
    "dead card": [{"link": "node1.nic2", "missing": True}],
}
UPLINKS = {"leaves of four": "rail2.leaf0.up", "leaves of two, 3:1": "leaf1.up"}
ODDITIES = [*ODD, "slow uplink", "dead uplink"]
#: Each fabric, whole and odd, with every layout.
CASES = thinned(
    [
        (fabric, odd, layout)
        for fabric, odd, layout in product(FABRICS, ODDITIES, LAYOUTS)
        if fabric in UPLINKS or odd in ODD
    ],
    every=11,
)


@pytest.mark.parametrize(("fabric", "odd", "layout"), CASES)
def test_classes_are_those_of_refinement_one_by_one(fabric: str, odd: str, layout: str) -> None:
    """Eight nodes, in the rail-optimised tree of three leaves and two spines. A dead uplink cuts some of them off."""
    workload = job(parallelism=LAYOUTS[layout])
    scale = {"missing": True} if odd == "dead uplink" else {"bandwidth_scale": 0.5}
    overrides = ODD[odd] if odd in ODD else [{"link": UPLINKS[fabric], **scale}]
    workload["cluster"] |= {"fabric": FABRICS[fabric], "nodes": 8, "overrides": overrides}
    if fabric == "leaves of four":
        workload["cluster"]["nodes"] = 20
        workload["cluster"]["node"] |= {"gpus": {"type": "a100-sxm-80gb", "count": 4}, "nics": {"count": 4}}
        n_ranks = math.prod(LAYOUTS[layout].get(axis, 1) for axis in AXES)
        workload["placement"] = [0, 4, 16, 19] if n_ranks == 16 else [0, 1, 2, 4, 5, 12, 16, 19]
    try:
        loaded = load_workload(workload)
        cluster = cluster_of(loaded)
        placed = Placed.on(build_program(loaded), costs_of(loaded), cluster, loaded.nodes)
        differences = list(partition_differences([placed], cluster))
    except InputError as refused:
        pytest.skip(f"does not fit the cluster: {refused.message}")
    assert differences == []


def costs_of(workload: Workload) -> Costs:
    return Costs.from_profiles(load_profiles(workload.calibrations, workload.training))
