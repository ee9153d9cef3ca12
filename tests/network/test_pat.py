"""PAT: who has it, when it is chosen, and what it spares a fabric. Its closed form and replay are in
`test_algorithms`."""

from __future__ import annotations

import math

import pytest

from simulator.cluster import build_cluster
from simulator.config import load_cluster
from simulator.config.profile import load_profile
from simulator.config.stack import load_stack
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.network.collectives import patterns, plan
from tests.support.clusters import link_bytes

IDEAL, H100 = Costs.ideal(), Costs.from_profile(load_profile("h100-sxm-80gb"))
OPS = ("all_gather", "reduce_scatter")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [2, 3, 7, 8, 33, 64])
def test_software_is_that_of_the_tuner(op: str, n: int) -> None:
    """NCCL's tuner: log2(n) hops of 1 / 3.5 of a ring's, and 2.8 of 14 microseconds for each of the n - 1 parts."""
    (pattern,) = patterns(op, range(0, 8 * n, 8), build_cluster(load_cluster("dgx_h100", nodes=n)), "pat")
    software = sum(phase.moves.software * sum(count for _, count in phase.hops) for phase in pattern.legs)
    assert software == pytest.approx(math.ceil(math.log2(n)) / 3.5 + (n - 1) / 5)


@pytest.mark.parametrize("op", OPS)
def test_auto_takes_it_between_many_nodes_of_one_gpu_until_rings_are_full(op: str) -> None:
    """A ring's latency grows with n, a tree's with its logarithm; large messages take the ring, whose bandwidth PAT
    does not reach, and the more ranks the later. Where two members share a node NCCL has no PAT."""
    last = 0
    for n in (16, 64, 256):
        built = build_cluster(load_cluster("dgx_h100", nodes=n))
        sizes = [e for e in range(10, 36) if plan(op, 2.0**e, range(0, 8 * n, 8), built, H100).algorithm == "pat"]
        assert sizes[0] == 10
        assert sizes == list(range(10, sizes[-1] + 1))
        assert last < sizes[-1] < 35
        last = sizes[-1]
        two = [rank for node in range(0, 8 * n, 8) for rank in (node, node + 1)]
        assert plan(op, 1024.0, two, built, H100).algorithm != "pat"
        with pytest.raises(InputError, match="one GPU in each node"):
            plan(op, 1024.0, two, built, H100, "pat")


def test_software_without_it_takes_the_ring_unless_told() -> None:
    """RCCL and NCCL before 2.23 do not choose it."""
    for name, chosen in (("h20-infiniband", "ring"), ("h200-dranet", "pat")):
        costs, built = Costs.from_stack(load_stack(name)), build_cluster(load_cluster("dgx_h100", nodes=64))
        assert plan("all_gather", 1024.0, range(0, 512, 8), built, costs).algorithm == chosen
        assert plan("all_gather", 1024.0, range(0, 512, 8), built, costs, "pat").algorithm == "pat"
    assert not load_profile("mi300x-192gb").transports["roce"].pat


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("nodes", [16, 32, 64])
def test_far_steps_carry_little(op: str, nodes: int) -> None:
    """Under leaves of 8 nodes: of step d, min(d, 8) of a leaf's ranks send to another leaf, each one part of 1/n for
    every odd multiple of d below n. Bruck's all-gather sends d parts there, and so moves far more over the uplinks."""
    spec = {
        "name": "leaves",
        "nodes": nodes,
        "node": {
            "gpus": {"type": "ideal", "count": 1},
            "pcie": {"generation": 6},
            "nics": {"count": 1, "bandwidth_bps": 8e9, "latency_s": 1e-6},
        },
        "fabric": {"radix": 16},
    }
    built = build_cluster(validated(ClusterSpec, spec))

    def up(name: str) -> float:
        carried = link_bytes(plan(op, float(nodes), range(nodes), built, IDEAL, name), built)
        ways = {round(nbytes, 6) for link, nbytes in carried.items() if ".up:" in link}
        assert len(ways) == 1
        return ways.pop()

    steps = [1 << k for k in range(nodes.bit_length() - 1)]
    assert up("pat") == pytest.approx(sum(min(d, 8) * (nodes // (2 * d)) for d in steps))
    if op == "all_gather":
        assert up("bruck") == pytest.approx(sum(min(d, 8) * d for d in steps))
        assert up("bruck") > up("pat")
