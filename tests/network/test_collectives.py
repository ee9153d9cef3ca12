"""Collectives: what they put on the links, how long they take alone, and which algorithm is chosen."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

import pytest

from simulator.cli.app import main
from simulator.cluster import Cluster, build_cluster
from simulator.config.cluster import load_cluster
from simulator.config.profile import load_profile
from simulator.config.stack import load_stack
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.network import ring, tree
from simulator.network.collectives import (
    BARRIER_BYTES,
    OPERATIONS,
    Operation,
    bus_factor,
    idle_seconds,
    patterns,
    plan,
)
from simulator.network.plan import Plan
from simulator.network.tree import other_parent, parent
from simulator.program import CollectiveKind
from simulator.units import GB, GiB, MiB, us
from tests.support.clusters import CLUSTERS, link_bytes
from tests.support.grids import every_pair, grid, thinned

IDEAL = Costs.ideal()
A100 = Costs.from_profile(load_profile("a100-sxm-80gb"))
H100 = Costs.from_profile(load_profile("h100-sxm-80gb"))
NODE, TWO, MANY = (build_cluster(load_cluster("dgx_a100"), nodes) for nodes in (1, 2, 128))

#: Groups as jobs have them (part of a node, nodes, one or two GPUs per node, stages far apart), and odd ones: a node
#: with fewer members, nodes without a common NIC.
GROUPS = {
    "tp2": [4, 5],
    "tp8": list(range(8)),
    "two nodes": list(range(16)),
    "dp16": list(range(3, 128, 8)),
    "two per node": [8 * node + gpu for node in range(5) for gpu in (2, 6)],
    "far": [0, 8 * 100],
    "uneven": [0, 1, 2, 8],
    "crooked": [0, 9, 18],
}


def runs(op: str, name: str, ranks: Sequence[int], cluster: Cluster) -> bool:
    """Whether the cluster has what the algorithm needs, and the group sits as it needs."""
    with suppress(InputError):
        return bool(patterns(op, ranks, cluster, name))
    return False


#: Every algorithm on every group that it can run on.
EVERY = [
    (op, name, group)
    for op, entry in OPERATIONS.items()
    for name in entry.algorithms
    for group, ranks in GROUPS.items()
    if runs(op, name, ranks, MANY)
]


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
    for gpu in ranks:
        into = [link.name for link in MANY.links if link.dst == MANY.gpus[gpu].name]
        out = [link.name for link in MANY.links if link.src == MANY.gpus[gpu].name]
        received, passed_on = (sum(carried.get(name, 0.0) for name in names) for names in (into, out))
        assert received == pytest.approx(0 if gpu == ranks[0] else 1e6)
        assert gpu != ranks[0] or passed_on == pytest.approx(1e6)


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


def members(op: str, group: str) -> list[int]:
    """A send is of two."""
    return GROUPS[group][:2] if op == "send" else GROUPS[group]


@pytest.mark.parametrize(("op", "group"), grid(OPERATIONS, GROUPS, every=4))
def test_auto_is_the_fastest_and_says_which(op: str, group: str) -> None:
    ranks = members(op, group)
    for exponent in range(3, 34, 3):
        times = {
            name: idle_seconds(plan(op, 2.0**exponent, ranks, MANY, A100, name), MANY, A100)
            for name in OPERATIONS[op].nccl
            if runs(op, name, ranks, MANY)
        }
        chosen = plan(op, 2.0**exponent, ranks, MANY, A100)
        assert idle_seconds(chosen, MANY, A100) == pytest.approx(min(times.values()))
        assert times[chosen.algorithm] == pytest.approx(min(times.values()))
        assert chosen.protocol in ("ll", "ll128", "simple")


def test_small_messages_take_the_tree_and_large_ones_the_ring() -> None:
    ranks = range(0, 8 * 64, 8)
    assert plan("all_reduce", 1e3, ranks, MANY, A100).algorithm == "tree"
    assert plan("all_reduce", 64e9, ranks, MANY, A100).algorithm == "ring"
    assert plan("all_reduce", 1e3, ranks, MANY, A100).protocol == "ll"
    assert plan("all_reduce", 64e9, ranks, MANY, A100).protocol == "simple"


@pytest.mark.parametrize(("op", "group"), grid([op for op in OPERATIONS if op != "barrier"], GROUPS, every=4))
def test_more_bytes_take_longer_and_never_beat_the_wire(op: str, group: str) -> None:
    """An ideal transfer takes less; what the real one takes relative to it is least for the largest messages."""
    sizes = [2.0**exponent for exponent in range(0, 36)]
    ranks = members(op, group)
    times = [idle_seconds(plan(op, size, ranks, MANY, A100), MANY, A100) for size in sizes]
    bounds = [idle_seconds(plan(op, size, ranks, MANY, IDEAL), MANY, IDEAL) for size in sizes]
    assert all(a < b for a, b in pairwise(times))
    assert all(time > bound for time, bound in zip(times, bounds, strict=True))
    ratios = [time / bound for time, bound in zip(times, bounds, strict=True)]
    assert ratios[-1] == min(ratios)


def test_a_slow_link_sets_the_pace_of_its_ring() -> None:
    """Eight rings in step: with NIC 2 of node 1 at half speed all of them take twice as long."""
    slow = build_cluster(
        load_cluster({"name": "dgx_a100", "overrides": [{"link": "node1.nic2", "bandwidth_scale": 0.5}]}, nodes=2)
    )
    times = []
    for cluster in (TWO, slow):
        operation = plan("all_gather", 1e10, range(16), cluster, IDEAL)
        times.append(idle_seconds(operation, cluster, IDEAL) - operation.latency_s)
    assert times[1] == pytest.approx(2 * times[0])


@pytest.mark.parametrize("n", range(2, 9))
def test_a_mesh_uses_all_its_links_alike(n: int) -> None:
    """A ring sends (n-1)/n of the message from each of n meshed GPUs, evenly over its n-1 links to the others, each a
    seventh of 300 GB/s among eight; so all 56 links of eight GPUs are busy together, all 12 of four."""
    mesh = build_cluster(load_cluster({"name": "dgx_a100", "node": {"nvlink": {"kind": "mesh"}}}, nodes=1))
    operation = plan("all_gather", 1e9, range(n), mesh, IDEAL)
    carried = link_bytes(operation, mesh)
    assert len(carried) == n * (n - 1)
    assert list(carried.values()) == pytest.approx([1e9 / n] * n * (n - 1))
    data = 1e9 / n / (300 * GB / 7)
    assert idle_seconds(operation, mesh, IDEAL) == pytest.approx(operation.latency_s + data, rel=1e-12)


@pytest.mark.parametrize(
    ("op", "algorithm", "name"),
    thinned([(*how, name) for how in dict.fromkeys((op, name) for op, name, _ in EVERY) for name in CLUSTERS], 8),
)
def test_patterns_are_the_sums_of_their_hops(name: str, op: str, algorithm: str) -> None:
    """Groups that sit alike in their nodes share one list of hops. On each of them, adding up the routes of the hops
    that the algorithm gives for the group itself must come to the same bytes per link and the same latency."""
    built = build_cluster(load_cluster(CLUSTERS[name]))
    n, per_node = len(built.gpus), built.spec.gpus_per_node
    groups = [
        range(n),
        range(n // 2, n),
        range(0, n, per_node),
        range(per_node - 1, n, per_node),
        [n - 1, 0],
        [0, n - 1],
    ]
    function = OPERATIONS[op].algorithms[algorithm]
    for ranks in (tuple(group) for group in groups if len(group) > 1 and runs(op, algorithm, tuple(group), built)):
        (pattern,) = patterns(op, ranks, built, algorithm)
        for stage, moves in zip(pattern.stages, function(built, ranks), strict=True):
            loads: dict[int, float] = {}
            latency_s = 0.0
            for hop in moves.hops:
                for index, share in built.spread(hop.sender, hop.receiver, hop.nic):
                    latency_s += hop.weight * share * built.links[index].latency_s
                    loads[index] = loads.get(index, 0.0) + share * hop.load
            assert {index: load * stage.flow_bytes for index, load in stage.loads} == pytest.approx(loads)
            assert stage.link_latency_s == pytest.approx(latency_s)


def test_a_slow_link_is_seen_by_the_groups_that_cross_it_alone() -> None:
    """Of 16 groups that sit alike, one per pair of nodes, only the one on nodes 4 and 5 meets the slow NIC."""
    slow = {"link": "node5.nic0", "bandwidth_scale": 0.5}
    built = build_cluster(load_cluster({"name": "dgx_a100", "overrides": [slow]}, nodes=32))
    times = [
        idle_seconds(plan("all_gather", 1e9, [8 * node, 8 * node + 8], built, IDEAL), built, IDEAL)
        for node in range(0, 32, 2)
    ]
    assert [round(time / times[0], 3) for time in times] == [1, 1, 2] + [1] * 13


def test_nvlink_is_left_by_ll128_where_nccl_leaves_it() -> None:
    """NCCL's tuner goes over to simple where a link carries more than the profile's ``most_bytes``, though simple is
    slower there: the time jumps, as measured."""
    limit = H100.transport("nvlink").protocols["ll128"].most_bytes
    assert limit is not None
    below, above = (plan("all_gather", 2 * limit * x, range(2), NODE, H100) for x in (0.99, 1.01))
    assert (below.protocol, above.protocol) == ("ll128", "simple")
    assert idle_seconds(above, NODE, H100) > 1.2 * idle_seconds(below, NODE, H100)


def test_an_algorithm_is_named_by_the_registry_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line makes it known to every command, under the name that the line gives it."""
    toy = Operation({**OPERATIONS["all_gather"].algorithms, "toy": tree.all_reduce}, lambda n: 1.0, ("ring",))
    monkeypatch.setitem(OPERATIONS, "all_gather", toy)
    assert plan("all_gather", 1e6, range(16), TWO, A100, "toy").algorithm == "toy"
    assert bus_factor("all_gather", 16) == 1
    monkeypatch.setitem(OPERATIONS, "shuffle", Operation({"toy": ring.all_gather}, lambda n: 3.0, ("toy",)))
    named, known = (
        plan(op, 1e6, range(16), TWO, A100, name) for op, name in (("shuffle", "toy"), ("all_gather", "ring"))
    )
    assert named.algorithm == "toy"
    assert named.phases == known.phases


def test_clusters_do_not_outlive_their_use() -> None:
    """What is worked out about a cluster goes with it."""
    built = build_cluster(load_cluster("dgx_a100"), 2)
    plan("all_reduce", 1e6, range(16), built, A100)
    gone = weakref.ref(built)
    del built
    gc.collect()
    assert gone() is None


def test_a_barrier_is_a_tiny_all_reduce() -> None:
    for group in GROUPS.values():
        assert plan("barrier", 0, group, MANY, A100) == plan("all_reduce", BARRIER_BYTES, group, MANY, A100)


def test_a_group_of_one_has_nothing_to_do() -> None:
    assert [plan(op, 1e6, [3], NODE, A100).phases for op in OPERATIONS] == [()] * len(OPERATIONS)


def test_a_send_goes_one_way_and_is_of_two() -> None:
    assert set(link_bytes(plan("send", 1e6, [0, 1], NODE, A100), NODE)) == {
        "node0.gpu0.nvlink:tx", "node0.gpu1.nvlink:rx",
    }  # fmt: skip
    with pytest.raises(InputError, match="one rank to one other"):
        plan("send", 1e6, [0, 1, 2], NODE, A100)


@pytest.mark.parametrize("n", range(2, 9))
def test_a_send_recv_of_nccl_tests_loads_every_rank_alike(n: int) -> None:
    """Each sends the message to the next and receives that of the one before (nccl-tests, src/sendrecv.cu): on every
    GPU's NVLink the message once in and once out, and busbw is algbw."""
    carried = link_bytes(plan("send_recv", 1e6, range(n), NODE, A100), NODE)
    assert carried == {f"node0.gpu{i}.nvlink:{way}": pytest.approx(1e6) for i in range(n) for way in ("tx", "rx")}
    assert bus_factor("send_recv", n) == 1


def test_patterns_do_not_depend_on_size() -> None:
    first, second = (plan("all_reduce", size, range(8), NODE, A100, "ring") for size in (1e3, 1e9))
    assert first.phases[0].loads is second.phases[0].loads


@pytest.mark.parametrize(
    ("op", "algorithm", "named"), [("all_reduse", "auto", "all_reduce"), ("all_gather", "tree", "ring")]
)
def test_unknown_names_are_refused(op: str, algorithm: str, named: str) -> None:
    with pytest.raises(InputError) as refusal:
        plan(op, 1e6, range(8), NODE, A100, algorithm)
    assert named in str(refusal.value)


def busbw(op: str, size: float, ranks: Sequence[int], cluster: Cluster, costs: Costs, algorithm: str = "auto") -> float:
    operation = plan(op, size, ranks, cluster, costs, algorithm)
    return size / idle_seconds(operation, cluster, costs) * bus_factor(op, len(ranks)) / GB


@pytest.mark.parametrize(
    ("op", "n", "size", "published"),
    [
        ("all_reduce", 8, 16 * GiB, 234.9),  # stas00/ml-engineering, network/README.md
        ("all_reduce", 8, GiB, 229.4),  # VIA-Research/vTrain, trace/a100
        ("all_reduce", 2, GiB, 197.3),
        ("all_reduce", 4, 512 * MiB, 216.7),  # ai-dynamo/aiconfigurator, a100_sxm, NCCL 2.27.3
        ("all_gather", 8, 512 * MiB, 205.3),
        ("reduce_scatter", 8, 512 * MiB, 212.8),
        ("all_to_all", 8, 512 * MiB, 203.1),
        ("all_reduce", 8, 64 * MiB, 171.5),  # stas00/ml-engineering; an older NCCL than was fitted
    ],
)
def test_a100_nvlink_is_near_published_measurements(op: str, n: int, size: float, published: float) -> None:
    assert busbw(op, size, range(n), NODE, A100) == pytest.approx(published, rel=0.12 if size == 64 * MiB else 0.08)


def test_infiniband_is_near_published_measurements() -> None:
    """One HDR NIC: 24 GB/s (NVIDIA/nccl issue 1048), and 19 us for 8 bytes (nccl-tests issue 150). NDR: 46 to 48 GB/s a
    NIC (nccl-tests issue 290)."""
    assert busbw("all_reduce", 4 * GiB, [0, 8], TWO, A100, "ring") == pytest.approx(24, rel=0.01)
    assert idle_seconds(plan("all_reduce", 8, [0, 8], TWO, A100), TWO, A100) == pytest.approx(19 * us, rel=0.03)
    two = build_cluster(load_cluster("dgx_h100"), 2)
    assert busbw("all_reduce", 16 * GiB, range(16), two, H100, "ring") / 8 == pytest.approx(47, rel=0.01)


def command(*arguments: str) -> int:
    """The exit status of one command."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_table_of_nccl_tests(capsys: pytest.CaptureFixture[str]) -> None:
    """algbw is size over time, busbw 2 (n-1)/n of that for an all-reduce; rows double from 8 bytes to 16 GiB."""
    assert (
        command(
            "collective",
            "--cluster",
            "dgx_a100",
            "--nodes",
            "2",
            "--op",
            "all_reduce",
            "--sizes",
            "8:16G",
            "--json",
            "-",
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert [row["size_bytes"] for row in result["rows"]] == [2**exponent for exponent in range(3, 35)]
    for row in result["rows"]:
        assert set(row) == {"size_bytes", "algorithm", "protocol", "channels", "time_s", "algbw_Bps", "busbw_Bps"}
        assert row["algbw_Bps"] * row["time_s"] == pytest.approx(row["size_bytes"])
        assert row["busbw_Bps"] == pytest.approx(row["algbw_Bps"] * 30 / 16)
    assert command("collective", "--cluster", "dgx_a100", "--op", "all_gather", "--ranks", "0-3", "--sizes", "1G") == 0
    shown = capsys.readouterr().out
    assert "1,073,741,824" in shown
    assert "all_gather of 4 GPUs on 1 x dgx_a100" in shown


def origins(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, list[dict[str, str | None]]]:
    """What ``collective`` says of an all-reduce's constants: under its table, and in its JSON."""
    words = ["collective", "--op", "all_reduce", "--sizes", "1G", *arguments]
    assert command(*words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert command(*words, "--json", "-") == 0
    return shown[-1], json.loads(capsys.readouterr().out)["links"]


def test_the_table_says_what_the_constants_of_its_links_rest_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the links that are crossed and no others: those of a GPU that was measured, of one that is completed from
    another's profile, and of a stack, whose source is its own."""
    line, links = origins(capsys, "--cluster", "dgx_h100")
    assert line == "Constants of links on h100-sxm-80gb: nvlink measured."
    assert [(link["link"], link["kind"], link["like"]) for link in links] == [("nvlink", "measured", None)]
    line, links = origins(capsys, "--cluster", "gb200_nvl72", "--nodes", "2")
    assert line == (
        "Constants of links on gb200-186gb: nvlink published, pcie assumed, infiniband assumed; "
        "what its profile lacks is as on h100-sxm-80gb."
    )
    assert {(link["gpu"], link["like"]) for link in links} == {("gb200-186gb", "h100-sxm-80gb")}
    assert "Azure" in str(links[0]["source"])
    assert str(links[1]["source"]).startswith("profile h100-sxm-80gb of")
    line, (link,) = origins(capsys, "--cluster", "gb200_nvl72", "--stack", "gb200-coreweave")
    assert line == "Constants of links on gb200-186gb: nvlink published."
    assert (link["like"], link["source"]) == (None, load_stack("gb200-coreweave").source)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--op", "redoce"], "unknown operation"),
        (["--op", "all_gather", "--algorithm", "tree"], "auto, ring, nvls"),
        (["--op", "all_reduce", "--sizes", "16:8"], "--sizes"),
        (["--op", "all_reduce", "--sizes", "0"], "--sizes"),
        (["--op", "all_reduce", "--sizes", "8:64:1"], "--sizes"),
        (["--op", "all_reduce", "--ranks", "0,99"], "--ranks"),
        (["--op", "all_reduce", "--ranks", "3"], "at least two"),
        (["--op", "barrier", "--sizes", "8"], "no size"),
        (["--op", "all_reduce", "--calibration", "nothing"], "nothing"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("collective", "--cluster", "dgx_a100", *arguments) == 2
    output = capsys.readouterr()
    assert told in output.err
    assert not output.out


def test_programs_know_the_same_operations() -> None:
    """A program may not import the network; its list of collectives is the registry's, less the transfer."""
    assert set(CollectiveKind) == set(OPERATIONS) - {"send"}
