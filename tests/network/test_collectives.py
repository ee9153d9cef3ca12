"""Collectives: what they put on the links, how long they take alone, and which algorithm is chosen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest

from simulator.cluster import Cluster
from simulator.network.collectives import (
    OPERATIONS,
    idle_seconds,
    plan,
)
from simulator.network.plan import Plan
from simulator.network.tree import other_parent, parent
from simulator.units import GB, us
from tests.support.clusters import link_bytes
from tests.support.collectives import EVERY, GROUPS, IDEAL, MANY, NODE, TWO
from tests.support.grids import every_pair, thinned


def sent(operation: Plan, cluster: Cluster, gpu: int) -> float:
    """Bytes that leave a GPU over its own ports."""
    name = cluster.gpus[gpu].name
    leaving = {link.name for link in cluster.links if link.src == name}
    return sum(nbytes for link, nbytes in link_bytes(operation, cluster).items() if link in leaving)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize(
    ("op", "share"),
    [
        ("all_reduce", lambda n: 2 * (n - 1) / n),
        ("all_gather", lambda n: (n - 1) / n),
        ("reduce_scatter", lambda n: (n - 1) / n),
        ("all_to_all", lambda n: (n - 1) / n),
    ],
)
def test_each_gpu_sends_its_share(op: str, share: Callable[[int], float], n: int) -> None:
    """A ring all-reduce sends 1/n of the message in each of 2 (n-1) steps, an all-gather or reduce-scatter in n-1, and
    in an all-to-all every rank keeps 1/n of its buffer. 16 GPUs fill two nodes."""
    cluster = NODE if n <= 8 else TWO
    name = next(iter(OPERATIONS[op].algorithms))
    operation = plan(op, 1e6, range(n), cluster, IDEAL, name)
    if op == "all_to_all" and n == 16:
        # GPUs pass on what others send through their NIC; each NIC carries the half that leaves the node, once.
        carried = link_bytes(operation, cluster)
        assert [carried[f"node0.nic{k}:tx"] for k in range(8)] == pytest.approx([1e6 * 8 / 16] * 8)
        return
    for gpu in range(n):
        assert sent(operation, cluster, gpu) == pytest.approx(share(n) * 1e6)


#: tp 4, dp 4 on two DGX A100: a dp group has two members in each node, at NICs that others are nearer to.
TP4_DP4 = [[tp + 4 * dp for dp in range(4)] for tp in range(4)] + [[4 * dp + tp for tp in range(4)] for dp in range(4)]


@pytest.mark.parametrize(
    ("op", "rounds", "ranks"),
    thinned(
        [
            (op, rounds, ranks)
            for ranks in [*TP4_DP4, *GROUPS.values(), [0, 9, 17, 26], [1, 8], list(range(24))]
            for op, rounds in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1))
        ],
        8,
    ),
)
def test_what_members_send_does_not_depend_on_how_they_are_joined(op: str, rounds: int, ranks: list[int]) -> None:
    """rounds x (n-1)/n of the message each, through own NICs or by way of another GPU (PXN); by tree or ring, which
    both move the message over n-1 edges up and down."""
    n = len(ranks)
    for name in {"all_reduce": ("ring", "tree"), "all_to_all": ("pairwise",)}.get(op, ("ring",)):
        operation = plan(op, 1e6, ranks, MANY, IDEAL, name)
        assert operation.sent_bytes / n == pytest.approx(rounds * (n - 1) / n * 1e6)


@pytest.mark.parametrize("ranks", GROUPS.values())
def test_a_broadcast_sends_the_message_to_all_others(ranks: list[int]) -> None:
    n = len(ranks)
    assert plan("broadcast", 1e6, ranks, MANY, IDEAL).sent_bytes == pytest.approx((n - 1) * 1e6)


@pytest.mark.parametrize("group", ["tp8", "two nodes", "dp16", "uneven", "crooked"])
def test_a_broadcast_reaches_everyone_once(group: str) -> None:
    """Every rank but the first receives the message exactly once, however many rings share it."""
    ranks = GROUPS[group]
    carried = link_bytes(plan("broadcast", 1e6, ranks, MANY, IDEAL), MANY)
    received, passed_on = Counter[str](), Counter[str]()
    for link in MANY.links:
        received[link.dst] += carried.get(link.name, 0.0)
        passed_on[link.src] += carried.get(link.name, 0.0)
    for gpu in ranks:
        assert received[MANY.gpus[gpu].name] == pytest.approx(0 if gpu == ranks[0] else 1e6)
    assert passed_on[MANY.gpus[ranks[0]].name] == pytest.approx(1e6)


@pytest.mark.parametrize(("op", "name", "group"), thinned(EVERY, 8))
def test_switches_and_nics_keep_nothing(op: str, name: str, group: str) -> None:
    """What enters a vertex that is no GPU leaves it."""
    operation = plan(op, 1e6, GROUPS[group], MANY, IDEAL, name)
    balance: dict[str, float] = {}
    for phase in operation.phases:
        for index, load in phase.loads:
            link = MANY.links[index]
            balance[link.dst] = balance.get(link.dst, 0.0) + load * phase.nbytes
            balance[link.src] = balance.get(link.src, 0.0) - load * phase.nbytes
    for vertex, left in balance.items():
        if "gpu" not in vertex:
            assert left == pytest.approx(0, abs=1e-6)
    assert sum(balance.values()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("op", "name", "group"), thinned(EVERY, 8))
def test_the_reference_flow_is_that_of_the_tightest_link(op: str, name: str, group: str) -> None:
    """So that two operations that meet on a NIC share it evenly, whatever they are: load 1 where load over bandwidth is
    largest. Every link is named once."""
    for phase in plan(op, 1e6, GROUPS[group], MANY, IDEAL, name).phases:
        tightest = max(phase.loads, key=lambda at: at[1] / MANY.links[at[0]].bandwidth_Bps)
        assert tightest[1] == pytest.approx(1)
        assert len({index for index, _ in phase.loads}) == len(phase.loads)
        assert all(load > 0 for _, load in phase.loads)


@every_pair(
    {
        "n": range(2, 9),
        "nbytes": [8.0, 1e5, 1e9],
        "op, rounds": [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)],
    }
)
def test_a_ring_alone_lasts_as_its_alpha_beta_form(op: str, rounds: int, nbytes: float, n: int) -> None:
    """With costs that add nothing: rounds x (n-1) steps, each a hop of 0.6 us and 1/n of the message at 300 GB/s."""
    steps = rounds * (n - 1)
    expected = steps * (0.6 * us + nbytes / n / (300 * GB))
    operation = plan(op, nbytes, range(n), NODE, IDEAL, "ring")
    assert idle_seconds(operation, NODE, IDEAL) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("nodes", [2, 3, 16])
def test_a_ring_of_one_gpu_per_node_is_bound_by_its_nic(nodes: int) -> None:
    """2 (n-1) steps over 25 GB/s. A hop crosses 2 + 2 PCIe links of 0.27 us and 1.3 us from card to card."""
    hop = 4 * 0.27 * us + 1.3 * us
    expected = 2 * (nodes - 1) * (hop + 1e8 / nodes / (25 * GB))
    ranks = range(3, 8 * nodes, 8)
    operation = plan("all_reduce", 1e8, ranks, MANY, IDEAL, "ring")
    assert idle_seconds(operation, MANY, IDEAL) == pytest.approx(expected, rel=1e-12)
    assert {link.split(".")[1] for link in link_bytes(operation, MANY)} == {"gpu3", "nic3", "nic3:tx", "nic3:rx"}


def test_a_ring_over_whole_nodes_uses_all_their_nics() -> None:
    """8 rings, one per NIC, each with 1/8 of the message: a NIC carries 2 (n-1)/n / 8 of it in each direction, and the
    ring lasts 1/8 of what it would through one NIC."""
    n = 16
    operation = plan("all_reduce", 1e9, range(n), TWO, IDEAL, "ring")
    carried = link_bytes(operation, TWO)
    for node in range(2):
        for nic in range(8):
            for direction in ("tx", "rx"):
                assert carried[f"node{node}.nic{nic}:{direction}"] == pytest.approx(2 * (n - 1) / n / 8 * 1e9)
    data = 2 * (n - 1) / n / 8 * 1e9 / (25 * GB)
    assert idle_seconds(operation, TWO, IDEAL) == pytest.approx(data + operation.latency_s, rel=1e-12)


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16, 33])
@pytest.mark.parametrize("per_node", [1, 8])
def test_a_tree_moves_the_message_up_and_down(nodes: int, per_node: int) -> None:
    """Both trees have nodes - 1 edges, each with half of the message up and down: 2 (nodes - 1) S between nodes in all,
    and no node sends more than 2 S (up S/2 and down 2 x S/2 as an inner node, up S/2 as a leaf)."""
    ranks = [8 * node + gpu for node in range(nodes) for gpu in range(per_node)]
    carried = link_bytes(plan("all_reduce", 1.0, ranks, MANY, IDEAL, "tree"), MANY)
    ports = {
        name: nbytes
        for name, nbytes in carried.items()
        if ".nic" in name and name.endswith(":tx") and "pcie" not in name
    }
    assert sum(ports.values()) == pytest.approx(2 * (nodes - 1))
    for node in range(nodes):
        assert sum(nbytes for name, nbytes in ports.items() if name.startswith(f"node{node}.")) <= 2 + 1e-9


@pytest.mark.parametrize("of", [parent, other_parent])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 69])
def test_both_trees_span_all_nodes_in_few_hops(of: Callable[[int, int], int], n: int) -> None:
    """One root, every node on a way to it of at most ceil(log2 n) + 1 hops, at most two children each."""
    parents = [of(node, n) for node in range(n)]
    assert parents.count(-1) == 1
    children = [parents.count(node) for node in range(n)]
    assert max(children) <= 2
    for node in range(n):
        hops = 0
        while node >= 0:
            node, hops = parents[node], hops + 1
        assert hops - 1 <= math.ceil(math.log2(n)) + 1


@pytest.mark.parametrize("n", [2, 4, 6, 8, 10, 14, 16, 18, 30, 32, 34, 62, 64, 66, 68])
def test_a_node_is_inner_in_one_tree_only(n: int) -> None:
    """For an even number of nodes: who passes data on in one tree is a leaf in the other, so that no link idles."""
    one, other = ([of(node, n) for node in range(n)] for of in (parent, other_parent))
    assert all(min(one.count(node), other.count(node)) == 0 for node in range(n))


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_a_tree_needs_logarithmically_many_hops(nodes: int) -> None:
    """log2 n hops up from the deepest node of n = 2^k, and as many down, where a ring makes 2 (n-1)."""
    hop = 4 * 0.27 * us + 1.3 * us
    operation = plan("all_reduce", 0.0, range(0, 8 * nodes, 8), MANY, IDEAL, "tree")
    assert operation.latency_s == pytest.approx(2 * math.log2(nodes) * hop)
