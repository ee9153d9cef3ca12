"""Algorithms over several nodes of several GPUs, rules R51 and R52, what people found out about NCCL, and multi-phase
plans in jobs."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import pairwise
from typing import Any, get_args

import pytest

from simulator.cli.app import main
from simulator.cluster import Cluster, build_cluster
from simulator.config.cluster import load_cluster
from simulator.config.parallelism import AllReduce
from simulator.config.profile import load_profile
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.network.collectives import OPERATIONS, bus_factor, idle_seconds, plan
from simulator.network.tree import EFFICIENCY
from simulator.units import GB, GiB
from tests.support import replay, scripts
from tests.support.clusters import HOP_s, NIC_Bps, NIC_LATENCY_s, link_bytes
from tests.support.exact import assert_same
from tests.support.jobs import job, play
from tests.support.replay import Place, Wire

IDEAL = Costs.ideal()
A100, H100 = (Costs.from_profile(load_profile(name)) for name in ("a100-sxm-80gb", "h100-sxm-80gb"))
SIZE = 1e9
#: Inside a node: ten times as fast as a NIC.
NVLINK_Bps, NVLINK_s = 1e10, 1e-4
SHAPES = [(2, 2), (2, 8), (3, 2), (3, 5), (4, 4), (5, 3), (8, 2), (7, 1), (1, 7)]


@cache
def grid(nodes: int, gpus: int, radix: int = 256, sharp: bool = True) -> Cluster:
    """Nodes with an NVSwitch and a NIC per GPU."""
    nvlink = {"kind": "nvswitch", "bandwidth_Bps": NVLINK_Bps, "latency_s": NVLINK_s, "sharp": sharp}
    nics = {"count": gpus, "bandwidth_bps": 8 * NIC_Bps, "latency_s": NIC_LATENCY_s}
    node = {"gpus": {"type": "ideal", "count": gpus}, "nvlink": nvlink, "pcie": {"generation": 6}, "nics": nics}
    spec = {"name": "grid", "nodes": nodes, "node": node, "fabric": {"radix": radix, "sharp": sharp}}
    return build_cluster(validated(ClusterSpec, spec))


def wire(sender: Place, receiver: Place) -> Wire:
    """Between ranks (node, place): over NVLink inside a node, else from NIC to NIC."""
    inside = sender[0] == receiver[0]  # type: ignore[index]
    kind = "nvlink" if inside else "nic"
    rate, latency_s = (NVLINK_Bps, NVLINK_s) if inside else (NIC_Bps, HOP_s)
    return (kind, "out", sender), (kind, "in", receiver), rate, latency_s


@pytest.mark.parametrize(("nodes", "gpus"), SHAPES)
def test_hierarchical(nodes: int, gpus: int) -> None:
    """2 (g-1) hops over NVLink with S/g each, 2 (N-1) between nodes with S/(g N)."""
    built = grid(nodes, gpus)
    operation = plan("all_reduce", SIZE, range(nodes * gpus), built, IDEAL, "hierarchical")
    inside = 2 * (gpus - 1) * (NVLINK_s + SIZE / gpus / NVLINK_Bps)
    between = 2 * (nodes - 1) * (HOP_s + SIZE / gpus / nodes / NIC_Bps)
    assert idle_seconds(operation, built, IDEAL) == pytest.approx(inside + between, rel=1e-9)
    script = scripts.hierarchical_all_reduce(nodes, gpus, SIZE)
    seconds, _ = replay.play(script, wire, posted=False)
    assert seconds == pytest.approx(inside + between, rel=1e-9)
    every = frozenset((node, place) for node in range(nodes) for place in range(gpus))
    held = replay.data(script, lambda place, part: place in every)
    assert all(held[rank, (place, node)] == every for rank in every for node in range(nodes) for place in range(gpus))


@pytest.mark.parametrize(("nodes", "gpus"), SHAPES)
def test_all_to_all_by_rail(nodes: int, gpus: int) -> None:
    """(g-1)/g S over NVLink to whoever is on the receiver's rail, then (N-1)/N S over one's own NIC."""
    built = grid(nodes, gpus)
    operation = plan("all_to_all", SIZE, range(nodes * gpus), built, IDEAL, "rail")
    inside = (gpus > 1) * (NVLINK_s + (gpus - 1) / gpus * SIZE / NVLINK_Bps)
    between = (nodes > 1) * (HOP_s + (nodes - 1) / nodes * SIZE / NIC_Bps)
    assert idle_seconds(operation, built, IDEAL) == pytest.approx(inside + between, rel=1e-9)
    script = scripts.rail_all_to_all(nodes, gpus, SIZE)
    seconds, _ = replay.play(script, wire)
    assert seconds == pytest.approx(inside + between, rel=1e-9)
    held = replay.data(script, lambda place, part: part[0] == place)  # type: ignore[index]
    every = [(node, place) for node in range(nodes) for place in range(gpus)]
    assert all(held[b, (a, b)] == {a} for a in every for b in every if a != b)


@pytest.mark.parametrize("nodes", [2, 3, 9])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_the_fabric_sums_up(nodes: int, gpus: int) -> None:
    """A head per NIC: each NIC sends S/g and receives it, however many nodes there are; every GPU sends (g-1)/g S to
    the heads, and as a head (g-1)/g S back. Up, into the fabric, out of it, and down: one hop's latency each way."""
    built = grid(nodes, gpus)
    operation = plan("all_reduce", SIZE, range(nodes * gpus), built, IDEAL, "collnet")
    on = link_bytes(operation, built)
    for node in range(nodes):
        for gpu in range(gpus):
            assert on[f"node{node}.nic{gpu}:tx"] == pytest.approx(SIZE / gpus)
            assert on[f"node{node}.nic{gpu}:rx"] == pytest.approx(SIZE / gpus)
            assert on.get(f"node{node}.gpu{gpu}.nvlink:tx", 0.0) == pytest.approx(2 * (gpus - 1) / gpus * SIZE)
    data = max(SIZE / gpus / NIC_Bps, 2 * (gpus - 1) / gpus * SIZE / NVLINK_Bps)
    latency = HOP_s + 2 * NVLINK_s * (gpus > 1)
    assert idle_seconds(operation, built, IDEAL) == pytest.approx(latency + data, rel=1e-9)


@pytest.mark.parametrize(("gpus", "leaves"), [(2, 3), (4, 2)])
@pytest.mark.parametrize("name", ["collnet", "nvls"])
def test_a_leaf_sends_one_sum_up(name: str, gpus: int, leaves: int) -> None:
    """Radix 8 is 4 nodes under a leaf. With g GPUs a node has g rails, and each leaf sends up the S/g of its rail once
    and receives the sum once. A tree sends up what each pair of neighbours sends each other."""
    nodes = 4 * leaves
    built = grid(nodes, gpus, radix=8)
    on = link_bytes(plan("all_reduce", SIZE, range(nodes * gpus), built, IDEAL, name), built)
    uplinks = [nbytes for link, nbytes in on.items() if "leaf" in link]
    assert uplinks == pytest.approx([SIZE / gpus] * (gpus * leaves * 2))  # 2 directions


@pytest.mark.parametrize("nodes", [2, 4])
def test_nvls_over_a_fabric_that_sums_up(nodes: int) -> None:
    """(1 + 1/g) S over NVLink, S/g over a NIC."""
    built = grid(nodes, 4)
    on = link_bytes(plan("all_reduce", SIZE, range(4 * nodes), built, IDEAL, "nvls"), built)
    assert on["node1.gpu2.nvlink:tx"] == pytest.approx(1.25 * SIZE)
    assert on["node1.gpu2.nvlink:rx"] == pytest.approx(1.25 * SIZE)
    assert on["node1.nic2:tx"] == pytest.approx(SIZE / 4)


@pytest.mark.parametrize(
    ("op", "name", "ranks", "cluster", "told"),
    [
        ("all_reduce", "collnet", range(4), grid(2, 2, sharp=False), "fabric: {sharp: true}"),
        ("all_reduce", "nvls", range(4), grid(2, 2, sharp=False), "nvlink: {sharp: true}"),
        ("all_reduce", "collnet", range(2), grid(2, 2), "between nodes"),
        ("all_reduce", "collnet", [0, 3], grid(2, 2), "NICs of one number"),
        ("all_reduce", "hierarchical", [0, 1, 2], grid(2, 2), "equally many members"),
        ("all_to_all", "rail", [0, 1, 2], grid(2, 2), "equally many members"),
    ],
)
def test_what_cannot_run_is_refused(op: str, name: str, ranks: Any, cluster: Cluster, told: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(op, SIZE, ranks, cluster, IDEAL, name)
    assert told in str(caught.value)
    assert plan(op, SIZE, ranks, cluster, IDEAL).phases


def test_only_infiniband_sums_up() -> None:
    with pytest.raises(InputError, match="InfiniBand switches sum up"):
        load_cluster({"name": "dgx_h100", "fabric": {"transport": "roce", "sharp": True}})


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_r51_ring_and_direct_take_as_long_on_one_switch(n: int) -> None:
    """Both send 2 (n-1)/n S from each rank; 2 (n-1) hops against 2 matter little for a large message."""
    built = build_cluster(load_cluster("dgx_h100"))
    ring, direct = (plan("all_reduce", 16 * GiB, range(n), built, H100, name) for name in ("ring", "direct"))
    assert idle_seconds(ring, built, H100) == pytest.approx(idle_seconds(direct, built, H100), rel=0.01)
    ring, direct = (plan("all_reduce", SIZE, range(n), grid(1, n), IDEAL, name) for name in ("ring", "direct"))
    assert ring.latency_s == pytest.approx(2 * (n - 1) * NVLINK_s)
    assert direct.latency_s == pytest.approx(2 * NVLINK_s)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_r52_a_tree_over_two_nodes_moves_less_than_a_ring(gpus: int) -> None:
    """Across the boundary S in each direction against 2 (n-1)/n S: 1.875 times on 2 x 8 GPUs, as much on 2 x 1. So are
    the times where NICs limit both, but for what NCCL's tuner says that trees lose (`EFFICIENCY`)."""
    n = 2 * gpus
    nics = {"count": gpus, "bandwidth_bps": 8 * NIC_Bps, "latency_s": 0.0}
    nvlink = {"kind": "nvswitch", "bandwidth_Bps": 1e12}
    node = {"gpus": {"type": "ideal", "count": gpus}, "nvlink": nvlink, "pcie": {"generation": 6}, "nics": nics}
    built = build_cluster(validated(ClusterSpec, {"name": "two", "nodes": 2, "node": node}))
    ring, tree = (plan("all_reduce", SIZE, range(n), built, IDEAL, name) for name in ("ring", "tree"))
    for operation, share in ((ring, 2 * (n - 1) / n), (tree, 1.0)):
        on = link_bytes(operation, built)
        for way in ("tx", "rx"):
            assert sum(on[f"node0.nic{k}:{way}"] for k in range(gpus)) == pytest.approx(share * SIZE, rel=1e-9)
    data = [idle_seconds(operation, built, IDEAL) - operation.latency_s for operation in (ring, tree)]
    assert data[0] / data[1] == pytest.approx(2 * (n - 1) / n * EFFICIENCY, rel=1e-9)


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_an_all_to_all_is_bound_by_what_leaves_the_node(nodes: int) -> None:
    """(N-1)/N of a GPU's buffer goes through its NIC: algbw is N/(N-1) of the NIC, busbw (n-1)/n of that."""
    built = build_cluster(load_cluster("dgx_a100"), nodes)
    n = 8 * nodes
    operation = plan("all_to_all", 1e12, range(n), built, IDEAL)
    algbw = 1e12 / idle_seconds(operation, built, IDEAL)
    assert algbw == pytest.approx(nodes / (nodes - 1) * 25 * GB, rel=1e-3)
    assert algbw * bus_factor("all_to_all", n) == pytest.approx((n - 1) / n * nodes / (nodes - 1) * 25 * GB, rel=1e-3)


def test_latency_grows_with_ranks_in_a_ring_and_with_their_logarithm_in_a_tree() -> None:
    """DGX H100 of 2, 4, 8 and 16 nodes: twice the nodes, twice as many hops in a ring, two more in a tree."""
    latencies = {}
    for name in ("ring", "tree"):
        latencies[name] = []
        for nodes in (2, 4, 8, 16):
            built = build_cluster(load_cluster("dgx_h100"), nodes)
            latencies[name].append(plan("all_reduce", 8, range(8 * nodes), built, H100, name).latency_s)
    ring, tree = ([b - a for a, b in pairwise(latencies[name])] for name in ("ring", "tree"))
    assert ring[1] == pytest.approx(2 * ring[0], rel=0.02)
    assert ring[2] == pytest.approx(2 * ring[1], rel=0.02)
    assert tree == pytest.approx([tree[0]] * 3, rel=0.02)


@pytest.mark.parametrize(("cluster", "costs"), [("dgx_a100", A100), ("dgx_h100", H100)])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_protocols_follow_one_another(op: str, cluster: str, costs: Costs) -> None:
    """LL for the smallest messages, LL128 above, simple for the largest: once each, on one node and on two."""
    for nodes in (1, 2):
        built = build_cluster(load_cluster(cluster), nodes)
        names = [plan(op, 2.0**exponent, range(8 * nodes), built, costs, "ring").protocol for exponent in range(3, 35)]
        seen = [name for name, after in pairwise([*names, ""]) if name != after]
        assert seen == [name for name in ("ll", "ll128", "simple") if name in seen]
        assert seen[-1] == "simple"
        assert len(seen) > 1


def test_auto_is_nccls_alone() -> None:
    """A direct all-reduce of two steps would be faster for small messages; NCCL has none."""
    built = build_cluster(load_cluster("dgx_h100"))
    direct, auto = (plan("all_reduce", 1e4, range(8), built, H100, name) for name in ("direct", "auto"))
    assert idle_seconds(direct, built, H100) < idle_seconds(auto, built, H100)
    assert auto.algorithm in OPERATIONS["all_reduce"].nccl
    for entry in OPERATIONS.values():
        assert set(entry.nccl) <= set(entry.algorithms)


def test_kernels_one_after_another_each_start_and_choose() -> None:
    """A reduce-scatter and an all-gather take what the two take, and steps of one kernel share a start."""
    built = build_cluster(load_cluster("dgx_h100"))
    for size in (1e4, 1e6, 1e9):
        both = idle_seconds(plan("all_reduce", size, range(8), built, H100, "rs_ag"), built, H100)
        each = [
            idle_seconds(plan(op, size, range(8), built, H100, "ring"), built, H100)
            for op in ("reduce_scatter", "all_gather")
        ]
        assert both == pytest.approx(sum(each), rel=1e-12)
    operation = plan("all_reduce", 0.0, range(8), built, H100, "halving_doubling")
    protocol = H100.transport("nvlink").protocols[operation.protocol]  # type: ignore[index]
    assert operation.latency_s == pytest.approx(protocol.base_latency_s + 6 * (protocol.hop_latency_s + 0.6e-6))
    assert len(operation.phases) == 6


@pytest.mark.parametrize("algorithm", ["halving_doubling", "rs_ag", "direct", "hierarchical"])
def test_fold_and_coalesce_change_nothing_with_several_phases(algorithm: str) -> None:
    layout = {"tp": 2, "dp": 4, "pp": 2, "sequence_parallel": False, "collective_algorithm": algorithm}
    workload = job() | {"parallelism": layout}
    short, plain = play(workload, fold=True, coalesce=True), play(workload, fold=False, coalesce=False)
    check(short.program, short.played)
    check(plain.program, plain.played)
    assert_same(short, plain)
    assert short.to_dict()["communication"]["dp"]["algorithm"] == algorithm


def test_workloads_may_name_every_all_reduce() -> None:
    assert set(get_args(AllReduce)) == {"auto", *OPERATIONS["all_reduce"].algorithms}


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_commands_say_what_there_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`collective --help` and `list collectives` name every operation with its algorithms."""
    monkeypatch.setenv("COLUMNS", "200")
    assert command("collective", "--help") == 0
    shown = capsys.readouterr().out
    assert command("list", "collectives", "--json", "-") == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed["rows"]) == len(OPERATIONS)
    for op, entry in OPERATIONS.items():
        (line,) = [line for line in shown.splitlines() if line.split()[:1] == [op] or line.split()[1:2] == [op]]
        assert all(name in line for name in entry.algorithms), line


def test_a_table_says_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("collective", "--cluster", "dgx_h100", "--op", "all_reduce", "--sizes", "1G", "--json", "-") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["algorithm"], row["protocol"], row["channels"]) == ("nvls", "simple", 8)
    assert math.isclose(row["busbw_Bps"], row["algbw_Bps"] * 14 / 8)
