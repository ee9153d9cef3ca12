"""The algorithm that is chosen, slow links, and small groups."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest

from simulator.cluster import build_cluster
from simulator.config.cluster import load_cluster
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
from simulator.units import GB
from tests.support.clusters import CLUSTERS, link_bytes
from tests.support.collectives import A100, EVERY, GROUPS, H100, IDEAL, MANY, NODE, TWO, runs
from tests.support.grids import grid, thinned


def members(op: str, group: str) -> list[int]:
    """A send is of two."""
    return GROUPS[group][:2] if op == "send" else GROUPS[group]


@pytest.mark.parametrize(("op", "group"), grid(OPERATIONS, GROUPS, every=8))
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


@pytest.mark.parametrize(
    ("name", "gpus", "counted"),
    [("pcie", 2, 1 / 2), ("pcie", 3, 1.0), ("pcie", 4, 1.0), ("nvswitch", 2, 1.0), ("nvswitch", 4, 1.0)],
)
def test_a_tree_counts_on_half_of_a_chain_whose_links_go_one_way(name: str, gpus: int, counted: float) -> None:
    """The link out of either of two GPUs on PCIe carries the message once, up or down, and NCCL counts on half of it.
    In a longer chain the links of an inner GPU carry it up and down, and the loads say so. NVLinks count in full."""
    built = build_cluster(load_cluster(CLUSTERS[name]))
    (pattern,) = patterns("all_reduce", range(gpus), built, "tree")
    assert [leg.moves.counted for leg in pattern.legs] == [counted]


@pytest.mark.parametrize(("op", "group"), grid([op for op in OPERATIONS if op != "barrier"], GROUPS, every=4))
def test_more_bytes_take_longer_and_never_beat_the_wire(op: str, group: str) -> None:
    """An ideal transfer takes less; what the real one takes relative to it is least for the largest messages."""
    sizes = [2.0**exponent for exponent in range(0, 36, 3)]
    ranks = members(op, group)
    times = [idle_seconds(plan(op, size, ranks, MANY, A100), MANY, A100) for size in sizes]
    bounds = [idle_seconds(plan(op, size, ranks, MANY, IDEAL), MANY, IDEAL) for size in sizes]
    assert all(a < b for a, b in pairwise(times))
    assert all(time > bound for time, bound in zip(times, bounds, strict=True))
    ratios = [time / bound for time, bound in zip(times, bounds, strict=True)]
    assert ratios[-1] == min(ratios)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_bus_bandwidth_is_that_of_nccl_tests(n: int) -> None:
    """Factors are those of doc/PERFORMANCE.md there. A rank's port carries all but its own part once in an all-gather,
    reduce-scatter, all-to-all, gather and scatter. It does so twice in an all-reduce, of which a barrier is one. A
    broadcast, a reduce and a send carry the whole message once."""
    factors = {op: bus_factor(op, n) for op in OPERATIONS}
    once = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), (n - 1) / n)
    twice = dict.fromkeys(("all_reduce", "barrier"), 2 * (n - 1) / n)
    assert factors == pytest.approx(once | twice | dict.fromkeys(("broadcast", "reduce", "send", "send_recv"), 1.0))


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
    thinned([(*how, name) for how in dict.fromkeys((op, name) for op, name, _ in EVERY) for name in CLUSTERS], 16),
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
        for phase, moves in zip(pattern.legs, function(built, ranks), strict=True):
            loads: dict[int, float] = {}
            latency_s = 0.0
            for hop in moves.hops:
                for index, share in built.spread(hop.sender, hop.receiver, hop.nic):
                    latency_s += hop.weight * share * built.links[index].latency_s
                    loads[index] = loads.get(index, 0.0) + share * hop.load
            assert {index: load * phase.flow_bytes for index, load in phase.loads} == pytest.approx(loads)
            assert phase.link_latency_s == pytest.approx(latency_s)


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
    assert list(first.phases[0].loads) == list(second.phases[0].loads)


@pytest.mark.parametrize(
    ("op", "algorithm", "named"), [("all_reduse", "auto", "all_reduce"), ("all_gather", "tree", "ring")]
)
def test_unknown_names_are_refused(op: str, algorithm: str, named: str) -> None:
    with pytest.raises(InputError) as refusal:
        plan(op, 1e6, range(8), NODE, A100, algorithm)
    assert named in str(refusal.value)
