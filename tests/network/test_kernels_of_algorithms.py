"""Facts of each algorithm's steps beside their bytes: what is done without a link, peers, kernels, heads, channels.

A group has 12 GPUs, 4 in each of 3 nodes that have an NVSwitch and a NIC per GPU.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from simulator.cluster import Cluster, build_cluster
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.network.collectives import OPERATIONS, patterns, plan
from tests.support.clusters import link_bytes

N, PER_NODE, NODES = 12, 4, 3
#: Some need all members on one node, or one member on each.
IN_ONE_NODE, ONE_PER_NODE = range(PER_NODE), range(0, N, PER_NODE)


class Leg(NamedTuple):
    """One step: the share of the message that a rank handles without a link, and the rest as of `Moves`."""

    local_share: float
    peers: int = 0
    goes_on: bool = False
    heads: int = 0


def steps(count: int, local_share: float) -> list[Leg]:
    """Return steps of one kernel, which together handle this share."""
    return [Leg(local_share / count, goes_on=number > 0) for number in range(count)]


#: A reduce-scatter ends, and an all-gather begins, with 1/12 on each rank, which no link carries.
OWN = Leg(1 / N)
#: Four hops of a binomial tree reach 12 ranks, as 2^4 are 16.
LOG = 4
#: 8 of 12 ranks halve and double in 3 steps each way, and the other 4 have a step before and one behind.
HALVING = steps(2 * 3 + 2, 1 / 8)
ALL_REDUCE: dict[str, list[Leg]] = {
    "ring": [OWN],
    "tree": [OWN],
    "binary_tree": [OWN],
    "collnet": [Leg(1 / N, heads=PER_NODE)],
    "nvls": [Leg(0.0, heads=PER_NODE)],  # switches add up, and GPUs only hand over
    "nvls_tree": [Leg(0.0, heads=PER_NODE)],
    "halving_doubling": HALVING,
    "rs_ag": [OWN, OWN],  # two kernels
    "direct": [OWN, Leg(0.0, goes_on=True)],
    # Inside a node a rank ends with 1/4; of that 1/3 along its rail; and again 1/4 inside.
    "hierarchical": [Leg(1 / PER_NODE), Leg(1 / PER_NODE / NODES), Leg(1 / PER_NODE)],
}
EXPECTED: dict[tuple[str, str], list[Leg]] = {
    **{(op, name): legs for op in ("all_reduce", "barrier") for name, legs in ALL_REDUCE.items()},
    **{(op, name): [OWN] for op in ("all_gather", "reduce_scatter") for name in ("ring", "direct")},
    **{(op, "nvls"): [Leg(0.0, heads=PER_NODE)] for op in ("all_gather", "reduce_scatter")},
    **{(op, "pat"): steps(2, 1 / NODES) for op in ("all_gather", "reduce_scatter")},  # 2^2 are more than 3 nodes
    **{(op, "bruck"): steps(LOG, 1 / N) for op in ("all_gather", "all_to_all")},
    ("all_to_all", "pairwise"): [Leg(1 / N, peers=N - 1)],
    # Each rank keeps 1/12, in the first kernel; there it has 3 peers, and along its rail 2.
    ("all_to_all", "rail"): [Leg(1 / N, peers=PER_NODE - 1), Leg(0.0, peers=NODES - 1)],
    **{(op, "ring"): [Leg(0.0)] for op in ("broadcast", "reduce")},
    # A root sends to each other one at once. It receives from each in one kernel, which adds up.
    ("broadcast", "linear"): [Leg(0.0, peers=N - 1)],
    ("reduce", "linear"): [Leg(0.0)],
    **{(op, "linear"): [Leg(1 / N, peers=N - 1)] for op in ("scatter", "gather")},
    **{(op, "binomial"): steps(LOG, 0.0) for op in ("broadcast", "reduce", "scatter", "gather")},
    **{(op, "direct"): [Leg(0.0, peers=1)] for op in ("send", "send_recv")},
}


#: Messages that a rank sends, where all ranks do the same. In all-gathers and reduce-scatters these are
#: 11 of 12 parts. Bruck's all-to-all sends a part as often as its distance has bits, of distances 1 to 11 a sum of 20.
ONCE = (N - 1) / N
ALIKE: dict[tuple[str, str], float] = {
    **{("all_reduce", name): 2 * ONCE for name in ("ring", "rs_ag", "direct")},
    # Both ways 3/4 inside a node, and of a quarter 2/3 to other nodes.
    ("all_reduce", "hierarchical"): 2 * (3 / 4 + 2 / 3 / 4),
    # To the heads of the other quarters, as a head back to 3 others, and as a head through its NIC.
    ("all_reduce", "collnet"): 3 / 4 + 3 / 4 + 1 / 4,
    **{("all_gather", name): ONCE for name in ("ring", "direct", "bruck")},
    **{("reduce_scatter", name): ONCE for name in ("ring", "direct")},
    ("all_to_all", "pairwise"): ONCE,
    ("all_to_all", "rail"): 3 / 4 + 2 / 3,
    ("all_to_all", "bruck"): 20 / N,
    ("send_recv", "direct"): 1.0,
}


def members(op: str, name: str) -> range:
    if name == "nvls":
        return IN_ONE_NODE
    if name == "pat":
        return ONE_PER_NODE
    return range(2) if op == "send" else range(N)


def test_every_algorithm_is_here() -> None:
    assert set(EXPECTED) == {(op, name) for op, entry in OPERATIONS.items() for name in entry.algorithms}


def three_nodes() -> Cluster:
    nics = {"count": PER_NODE, "bandwidth_bps": 8e9, "latency_s": 1e-3}
    node: dict[str, Any] = {
        "gpus": {"type": "ideal", "count": PER_NODE},
        "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 1e10, "sharp": True},
        "pcie": {"generation": 6},
        "nics": nics,
    }
    spec = {"name": "small", "nodes": NODES, "node": node, "fabric": {"radix": 256, "sharp": True}}
    return build_cluster(validated(ClusterSpec, spec))


@pytest.mark.parametrize(("op", "name"), EXPECTED)
def test_steps_of_an_algorithm(op: str, name: str) -> None:
    """The table above says what each step does, derived from what a rank has, and from where it goes."""
    (pattern,) = patterns(op, members(op, name), three_nodes(), name)
    legs = [leg.moves for leg in pattern.legs]
    assert [(one.peers, one.goes_on, one.heads) for one in legs] == [one[1:] for one in EXPECTED[op, name]]
    assert [one.local_share for one in legs] == pytest.approx([one.local_share for one in EXPECTED[op, name]])


@pytest.mark.parametrize(("op", "name"), ALIKE)
def test_ranks_that_do_the_same_send_and_receive_as_much(op: str, name: str) -> None:
    """Ranks send in all 12 times what the table above says. NICs of each node send and receive as much as another's."""
    built = three_nodes()
    operation = plan(op, 1.0, range(N), built, Costs.ideal(), name)
    assert operation.sent_bytes / N == pytest.approx(ALIKE[op, name])
    carried = link_bytes(operation, built)
    by_node = [
        sum(nbytes for link, nbytes in carried.items() if re.fullmatch(rf"node{node}\.nic\d:{way}", link))
        for node in range(NODES)
        for way in ("tx", "rx")
    ]
    assert by_node == pytest.approx([by_node[0]] * (2 * NODES))
    assert by_node[0] > 0
