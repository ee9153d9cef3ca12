"""Fabrics: switches and trunks counted by hand, routes against a search of their own, and jobs that play on them."""

from __future__ import annotations

from itertools import islice, pairwise, permutations
from typing import Any

import networkx as nx
import pytest

from simulator.cluster import Cluster, build_cluster
from simulator.config import load_cluster
from simulator.config.cluster import describe_fabric
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.fabrics import FABRICS, Fabric, ports_down
from simulator.network.collectives import idle_seconds, plan
from tests.support.clusters import CLUSTERS, check_route
from tests.support.exact import assert_same
from tests.support.jobs import job, play

PORT_Bps = 25e9
#: Every kind of fabric, small enough to count: nodes of a DGX A100, 8 NICs of 25 GB/s.
FABRICS_OF: dict[str, dict[str, Any]] = {
    "rail_fat_tree": {"kind": "rail_fat_tree", "radix": 8, "tiers": 3},
    "rail_only": {"kind": "rail_only", "radix": 8, "tiers": 2},
    "rail_only one leaf": {"kind": "rail_only"},
    "fat_tree": {"kind": "fat_tree", "radix": 32, "tiers": 2},
    "fat_tree oversubscribed": {"kind": "fat_tree", "radix": 64, "tiers": 2, "oversubscription": 3},
    "fat_tree three tiers": {"kind": "fat_tree", "radix": 8, "tiers": 3},
    "dragonfly": {"kind": "dragonfly", "radix": 15},
    "dragonfly of many cables": {"kind": "dragonfly", "radix": 24},
    "torus 2D": {"kind": "torus", "shape": [4, 2]},
    "torus 3D": {"kind": "torus", "shape": [2, 1, 4]},
    "switch_tree": {
        "kind": "switch_tree",
        "switches": {"top": {}, "a": {"at": "top", "nodes": 6}, "b": {"at": "top", "nodes": 2}},
    },
    "sites": {"kind": "fat_tree", "sites": {"count": 2, "bandwidth_bps": 400e9, "latency_s": 5e-3}},
    "window": {
        "kind": "fat_tree",
        "sites": {"count": 2, "bandwidth_bps": 400e9, "latency_s": 5e-3, "window_bytes": 1e8},
    },
}
NODES = 8


def built(name: str, **changes: Any) -> Cluster:
    return build_cluster(load_cluster({"name": "dgx_a100", "fabric": {**FABRICS_OF[name], **changes}}, nodes=NODES))


def test_every_kind_of_fabric_is_here() -> None:
    assert {fabric["kind"] for fabric in FABRICS_OF.values()} == set(FABRICS)


@pytest.mark.parametrize("name", FABRICS_OF)
def test_routes_have_the_fewest_trunks_and_shares_add_up(name: str) -> None:
    """Against networkx: every way that carries something is a shortest one, every shortest one carries something, and
    what enters a switch leaves it."""
    cluster = built(name)
    trunks = {link.index for link in cluster.trunks}
    graph = nx.DiGraph()
    graph.add_edges_from((link.src, link.dst, {"link": link.index}) for link in cluster.trunks)
    for a, b in islice(permutations(range(0, len(cluster.gpus), 7), 2), 0, None, 5):
        check_route(cluster, a, b)
        if cluster.node_of(a) == cluster.node_of(b):
            continue
        spread = dict(cluster.spread(a, b))
        used = {link: share for link, share in spread.items() if link in trunks}
        ports = [cluster.links[i] for i in spread if i not in used and cluster.links[i].kind == "infiniband"]
        start, goal = ports[0].dst, ports[1].src
        if start == goal:
            assert not used
            continue
        ways = list(nx.all_shortest_paths(graph, start, goal))
        expected = {graph.edges[hop]["link"] for way in ways for hop in pairwise(way)}
        assert used.keys() == expected
        for switch in {end for link in expected for end in (cluster.links[link].src, cluster.links[link].dst)}:
            into = sum(share for link, share in used.items() if cluster.links[link].dst == switch)
            out = sum(share for link, share in used.items() if cluster.links[link].src == switch)
            assert out - into == pytest.approx((switch == start) - (switch == goal), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "switches", "trunks", "bisection_Bps"),
    [
        # Half of 8 nodes send 4 x 8 x 25 GB/s wherever nothing blocks.
        # 4 ports down: 2 leaves per rail, 16 in all, with a spine group per rail, under a core.
        ("rail_fat_tree", 16 + 8 + 1, 16 + 8, 32 * PORT_Bps),
        ("rail_only one leaf", 8, 0, 32 * PORT_Bps),
        # The same without the core: 8 trees.
        ("rail_only", 16 + 8, 16, 32 * PORT_Bps),
        # 16 ports down: 2 nodes of 8 NICs per leaf, 4 leaves, a spine group.
        ("fat_tree", 4 + 1, 4, 32 * PORT_Bps),
        # 48 ports down are 6 nodes, 16 up. Nodes 4 and 5, of the second half, are under the first half's leaf; to 6 and
        # 7 lead the 16 uplinks, as many as these have NICs.
        ("fat_tree oversubscribed", 2 + 1, 2, 32 * PORT_Bps),
        # 4 ports down: a node has 2 leaves, 16 leaves in 4 spine groups under a core.
        ("fat_tree three tiers", 16 + 4 + 1, 16 + 4, 32 * PORT_Bps),
        # p = 4, a = 8, h = 4: 32 NICs a group, 4 nodes. Two groups, each with 8 x 7 / 2 cables inside; port q of one
        # leads to port q of the other, four from router to router.
        ("dragonfly", 2 * 8, 2 * 28 + 8, 32 * PORT_Bps),
        # p = 6, a = 12: 72 NICs, 9 nodes: one group, 12 x 11 / 2 cables.
        ("dragonfly of many cables", 12, 66, 32 * PORT_Bps),
        # 200 GB/s of a node in 4 directions. The halves are x < 2 and x >= 2, with 2 x 2 cables of 50 GB/s between.
        ("torus 2D", 8, 8 + 4, 4 * 50e9),
        # The halves are x = 0 and x = 1: 4 links of two cables each.
        ("torus 3D", 8, 8 + 4, 4 * 2 * 50e9),
        # Nodes 4 and 5 are under the first half's switch; to 6 and 7 lead the uplinks of their 16 NICs.
        ("switch_tree", 3, 2, 32 * PORT_Bps),
        # Per site 20 ports down, 2 leaves and a spine group; a WAN link of 50 GB/s, or 100 MB per 10 ms.
        ("sites", 2 * 3, 2 * 2 + 1, 50e9),
        ("window", 2 * 3, 2 * 2 + 1, 1e8 / 10e-3),
    ],
)  # fmt: skip
def test_counts_and_bisection(name: str, switches: int, trunks: int, bisection_Bps: float) -> None:
    cluster = built(name)
    leaves = {leaf for of_node in cluster.switches.leaves for leaf in of_node}
    vertices = leaves | {end for link in cluster.trunks for end in (link.src, link.dst)}
    assert (len(vertices), len(cluster.trunks)) == (switches, 2 * trunks)
    assert cluster.bisection_Bps() == pytest.approx(bisection_Bps)


@pytest.mark.parametrize(
    ("radix", "asked", "told"),
    [
        (64, 1.0, "fat_tree, at most 2 tiers of 64 ports"),
        (64, 3.0, "fat_tree, at most 2 tiers of 64 ports, 3:1"),
        (64, 4.0, "fat_tree, at most 2 tiers of 64 ports, 4:1 (in whole ports 51:13, which is 3.92:1)"),
        (12, 1.4, "fat_tree, at most 2 tiers of 12 ports, 1.4:1"),
        (5, 3.0, "fat_tree, at most 2 tiers of 5 ports, 3:1 (in whole ports 3:2, which is 1.5:1)"),
    ],
)
def test_what_whole_ports_make_of_an_oversubscription_is_told(radix: int, asked: float, told: str) -> None:
    fabric = Fabric(kind="fat_tree", radix=radix, oversubscription=asked)
    assert describe_fabric(fabric) == told
    down = ports_down(fabric)
    assert down / (radix - down) <= asked < (down + 1) / max(radix - down - 1, 1e-9)


@pytest.mark.parametrize("oversubscription", [1, 2, 3, 6])
def test_an_oversubscribed_leaf_slows_what_crosses_it_by_its_share(oversubscription: int) -> None:
    """Two leaves of 48 NICs each. In an all-to-all of 96 GPUs a NIC sends 88/96 of a buffer, all but what stays in the
    node, and a leaf's uplinks 48 x 48/96 buffers: they decide where that over their bandwidth is more."""
    cluster = build_cluster(
        load_cluster(
            {
                "name": "dgx_a100",
                "fabric": {"kind": "fat_tree", "radix": 48 + 48 // oversubscription, "tiers": 2,
                           "oversubscription": oversubscription},
            },
            nodes=12,
        )
    )  # fmt: skip
    up = next(link for link in cluster.trunks if link.name == "leaf0.up:tx")
    assert up.bandwidth_Bps == (48 // oversubscription) * PORT_Bps
    costs, n = Costs.from_profile(load_profile("a100-sxm-80gb")), 96
    phase = plan("all_to_all", 2.0**34, range(n), cluster, costs).phases[0]
    loads = {cluster.links[i].name: load * phase.nbytes / 2.0**34 for i, load in phase.loads}
    assert loads["leaf0.up:tx"] == pytest.approx(48 * 48 / n)
    assert loads["node3.nic5:tx"] == pytest.approx(88 / n)
    least_s = (
        max(88 / n, 48 * 48 / n / (48 // oversubscription))
        * 2.0**34
        / (PORT_Bps * costs.transport("infiniband").efficiency)
    )
    seconds = idle_seconds(plan("all_to_all", 2.0**34, range(n), cluster, costs), cluster, costs)
    assert least_s <= seconds <= 1.1 * least_s


@pytest.mark.parametrize(("bandwidth_bps", "window_bytes"), [(400e9, None), (40e9, None), (400e9, 1e8), (400e9, 1e6)])
def test_a_wan_link_carries_its_window_per_round_trip(bandwidth_bps: float, window_bytes: float | None) -> None:
    """A message of S bytes takes S over the slowest of NIC, link and window / RTT, and 5 ms to get there."""
    sites = {"count": 2, "bandwidth_bps": bandwidth_bps, "latency_s": 5e-3, "window_bytes": window_bytes}
    cluster, costs = built("sites", sites=sites), Costs.from_profile(load_profile("a100-sxm-80gb"))
    line_Bps = min(PORT_Bps, bandwidth_bps / 8, (window_bytes or 1e18) / 10e-3)
    rate_Bps = line_Bps * costs.transport("infiniband").efficiency
    for nbytes in (8.0, 1e12):
        seconds = idle_seconds(plan("send", nbytes, (0, 32), cluster, costs), cluster, costs)
        assert seconds == pytest.approx(5e-3 + nbytes / rate_Bps, rel=0.03)
    near = idle_seconds(plan("send", 8.0, (0, 8), cluster, costs), cluster, costs)
    assert near < 1e-4


def test_rails_meet_where_the_fabric_says_so() -> None:
    """Without NVLink GPU 0 has to reach rail 5 over PCIe where rails do not meet, and leaves by its own NIC else."""
    bare = {"nvlink": {"kind": "none", "bandwidth_Bps": 0.0, "latency_s": 0.0}}
    for name, fabric in FABRICS_OF.items():
        cluster = build_cluster(load_cluster({"name": "dgx_a100", "node": bare, "fabric": fabric}, nodes=NODES))
        first_port = next(cluster.links[i].name for i in cluster.route(0, 8 * 7 + 5) if cluster.links[i].kind != "pcie")
        assert first_port == ("node0.nic5:tx" if name.startswith("rail_only") else "node0.nic0:tx"), name


#: Small clusters of every kind, in which jobs are also played without shortcuts.
SMALL = ("rail_only", "fat_tree", "dragonfly", "torus", "sites")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("section", [{"dp": 2, "tp": 2, "zero": 1}, {"pp": 2, "dp": 3}], ids=str)
def test_folding_is_exact_on_every_fabric(name: str, section: dict[str, Any]) -> None:
    cluster = {
        **CLUSTERS[name],
        "node": {
            **CLUSTERS[name]["node"],
            "gpus": {"type": "a100-sxm-80gb"} | {"count": CLUSTERS[name]["node"]["gpus"]["count"]},
        },
    }
    work = job(model__layers=2, training__global_batch=2 * section["dp"]) | {"parallelism": section, "cluster": cluster}
    short, plain = play(work), play(work, fold=False, coalesce=False)
    assert_same(short, plain)
    check(short.program, short.spans)


@pytest.mark.parametrize(
    ("fabric", "key", "words"),
    [
        ({"kind": "torus"}, "fabric.shape", "must be given"),
        ({"kind": "torus", "shape": [8]}, "fabric.shape", "2"),
        ({"kind": "torus", "shape": [4, 0]}, "fabric.shape[1]", ">= 1"),
        ({"kind": "torus", "shape": [4, 4]}, "nodes", "makes 16 nodes"),
        ({"kind": "torus", "shape": [4, 2], "radix": 40}, "fabric.radix", "torus has none"),
        ({"kind": "dragonfly", "tiers": 3}, "fabric.tiers", "dragonfly has none"),
        ({"kind": "dragonfly", "radix": 6}, "fabric.radix", ">= 7"),
        ({"kind": "dragonfly", "radix": 7}, "fabric.radix", "at most 9 nodes"),
        ({"kind": "fat_tree", "shape": [2, 4]}, "fabric.shape", "torus"),
        ({"kind": "fat_tree", "radix": 8, "tiers": 2}, "fabric.tiers", "at most 4 nodes"),
        ({"kind": "rail_only", "radix": 2, "tiers": 2}, "fabric.tiers", "at most 2 nodes"),
        ({"kind": "fat-tree"}, "fabric.kind", "fat_tree"),
        ({"kind": "hypercube"}, "fabric.kind", "torus"),
        ({"sites": {"count": 3, "bandwidth_bps": 1e9, "latency_s": 1e-3}}, "fabric.sites.count", "multiple of 3"),
        ({"sites": {"count": 1, "bandwidth_bps": 1e9, "latency_s": 1e-3}}, "fabric.sites.count", ">= 2"),
        ({"sites": {"count": 2, "bandwidth_bps": 1, "latency_s": 1e-3}}, "fabric.sites.bandwidth_bps", ">= 1,000"),
        (
            {"sites": {"count": 2, "bandwidth_bps": 1e9, "latency_s": 1e-3, "window_bytes": 0}},
            "fabric.sites.window_bytes",
            ">= 1",
        ),
        (
            {"kind": "rail_only", "sites": {"count": 2, "bandwidth_bps": 1e9, "latency_s": 0}},
            "fabric.sites",
            "fat_tree",
        ),
        ({"radix": 10**9}, "fabric.radix", "4,096"),
        ({"oversubscription": 1e300, "radix": 2, "tiers": 2}, "fabric.oversubscription", "<= 1"),
    ],
)
def test_a_bad_fabric_names_the_key(fabric: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        build_cluster(
            load_cluster(
                {
                    "name": "dgx_a100",
                    "fabric": fabric,
                    "nodes": NODES + 2 * ("radix" in fabric and fabric["radix"] == 7),
                }
            )
        )
    assert f"{key}: " in str(caught.value)
    assert words in str(caught.value)


def test_nodes_follow_from_the_shape_of_a_torus() -> None:
    assert load_cluster({"name": "dgx_a100", "fabric": {"kind": "torus", "shape": [2, 3, 4]}}).nodes == 24
    sites = {"count": 2, "bandwidth_bps": 1e9, "latency_s": 0.0}
    assert load_cluster({"name": "dgx_a100", "fabric": {"kind": "torus", "shape": [2, 3], "sites": sites}}).nodes == 12
