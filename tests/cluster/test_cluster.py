"""Clusters: how many links there are, what routes cross, what the fabric holds, and what overrides change."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from simulator.cli.app import main
from simulator.cluster import Cluster, build_cluster
from simulator.config import catalog
from simulator.config.cluster import load_cluster
from simulator.errors import InputError
from simulator.fabrics import FABRICS, Fabric, FabricKind, Ports, Switches
from tests.support.clusters import CLUSTERS, check_route
from tests.support.grids import grid

#: Those that do not stand alone.
SHIPPED = [name for name in catalog.names("cluster") if load_cluster(name).kinds[0].nics.count]


def cluster(name: str = "dgx_a100", nodes: int = 1, **changes: Any) -> Cluster:
    return build_cluster(load_cluster({"name": name, **changes}, nodes=nodes))


def names(built: Cluster, a: int, b: int, nic: int | None = None) -> list[str]:
    return [built.links[i].name for i in built.route(a, b, nic)]


@pytest.mark.parametrize(("name", "nodes"), grid(SHIPPED, [1, 2, 33, 100], every=6))
def test_routes_are_paths_of_the_graph(name: str, nodes: int) -> None:
    built = cluster(name, nodes)
    last = len(built.gpus) - 1
    for a, b in [(0, 1), (0, 7), (0, 8), (3, 13), (5, last), (last, 2), (last - 1, last)]:
        if max(a, b) > last or a == b:
            continue
        check_route(built, a, b)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_route_of_every_kind_of_cluster_is_a_path(name: str) -> None:
    """And the way back crosses as many links."""
    built = build_cluster(load_cluster(CLUSTERS[name]))
    for a, b in permutations(range(len(built.gpus)), 2):
        check_route(built, a, b)
        assert len(built.route(a, b)) == len(built.route(b, a))


@pytest.mark.parametrize(
    ("name", "ends", "route"),
    [
        ("mesh", (0, 3), ["gpu0-gpu3.nvlink:tx"]),
        ("pairs", (3, 2), ["gpu2-gpu3.nvlink:rx"]),
        ("pairs", (1, 2), ["gpu1.pcie:tx", "pcie0.host:tx", "pcie1.host:rx", "gpu2.pcie:rx"]),
        ("pcie", (0, 1), ["gpu0.pcie:tx", "gpu1.pcie:rx"]),
        ("pcie_no_p2p", (0, 1), ["gpu0.pcie:tx", "pcie0.host:tx", "pcie0.host:rx", "gpu1.pcie:rx"]),
        ("pcie_no_p2p", (0, 2), ["gpu0.pcie:tx", "pcie0.host:tx", "pcie1.host:rx", "gpu2.pcie:rx"]),
    ],
)
def test_routes_inside_nodes(name: str, ends: tuple[int, int], route: list[str]) -> None:
    """Over NVLink where there is one; else over the PCIe switch that two GPUs share, or up to the host and down: always
    so where GPUs do not copy to each other."""
    assert names(build_cluster(load_cluster(CLUSTERS[name])), *ends) == [f"node0.{link}" for link in route]


@pytest.mark.parametrize(
    ("name", "ends", "trunks"),
    [
        ("one_leaf", (0, 6), []),
        ("oversubscribed", (0, 3), []),
        ("oversubscribed", (0, 4), ["rail0.leaf0.up:tx", "rail0.leaf1.up:rx"]),
        ("three_tiers", (1, 5), ["rail1.leaf0.up:tx", "rail1.leaf1.up:rx"]),
        ("three_tiers", (0, 8), ["rail0.leaf0.up:tx", "spine0.up:tx", "spine1.up:rx", "rail0.leaf2.up:rx"]),
        # GPU 0 hands over to GPU 1, whose rail the receiver is on (PXN), so that rails stay apart.
        ("three_tiers", (0, 9), ["rail1.leaf0.up:tx", "spine2.up:tx", "spine3.up:rx", "rail1.leaf2.up:rx"]),
    ],
)
def test_routes_climb_no_higher_than_needed(name: str, ends: tuple[int, int], trunks: list[str]) -> None:
    built = build_cluster(load_cluster(CLUSTERS[name]))
    assert [link for link in names(built, *ends) if ".up:" in link] == trunks


def test_a_fabric_is_a_function_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """One switch for all NICs, as a user may add it: rails meet in it, so that every GPU keeps to its own NIC."""

    def one_switch(fabric: Fabric, ports: Ports) -> Switches:
        return Switches(tuple(("switch",) * len(nics) for nics in ports), (), 1)

    monkeypatch.setitem(FABRICS, "one_switch", FabricKind(one_switch))
    spec = load_cluster({"name": "dgx_a100", "node": {"nvlink": {"kind": "none", "bandwidth_Bps": 0.0}}}, nodes=2)
    spec = replace(spec, fabric=Fabric(kind="one_switch", transport=spec.fabric.transport))
    built = build_cluster(spec)
    check_route(built, 5, 8)
    assert [name for name in names(built, 5, 8) if name.endswith((".nic5:tx", ".nic0:rx"))] == [
        "node0.nic5:tx", "node1.nic0:rx",
    ]  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_a_route_back_crosses_the_other_directions(name: str) -> None:
    """Links are full duplex: between GPUs of one rail, or of one node, the way back is the way there, mirrored."""
    built = cluster(name, 80)
    n = load_cluster(name).gpus_per_node
    for a, b in [(0, 1), (2, n - 1), (0, n), (n - 3, n * 60 + n - 3), (n * 79 + n - 1, n - 1)]:
        there = [(built.links[i].src, built.links[i].dst) for i in built.route(a, b)]
        back = [(built.links[i].dst, built.links[i].src) for i in reversed(built.route(b, a))]
        bridged = name == "dgx1_v100" and len(there) == 2  # two ways with a GPU in between are as good
        assert len(there) == len(back) if bridged else there == back


def test_the_number_of_links_follows_from_the_parts() -> None:
    """A DGX A100 has 8 NVLink ports, 4 + 8 + 8 PCIe links (switches, GPUs, NICs), 8 NIC ports, drives and what joins
    its sockets, 38 in all, each with two directions, and the memory of host and of each socket, which are one link.
    Under one leaf per rail there is nothing else; with two pods of 20 nodes 16 leaves have uplinks."""
    assert len(cluster(nodes=1).links) == 2 * 38 + 3
    assert len(cluster(nodes=20).links) == 20 * 79
    assert len(cluster(nodes=40).links) == 40 * 79 + 2 * 16


def test_a_rail_of_a_node_is_its_own() -> None:
    """NIC i hangs on rail i: 8 rails x as many leaves as pods of 20 nodes, the nodes in order."""
    built = cluster(nodes=60)
    for node, rail in [(0, 0), (19, 3), (20, 3), (59, 7)]:
        port = next(link for link in built.links if link.name == f"node{node}.nic{rail}:tx")
        assert port.dst == f"rail{rail}.leaf{node // 20}"
        assert port.bandwidth_Bps == 25e9


def test_routes_between_nodes_stay_on_the_receivers_rail() -> None:
    built = cluster(nodes=2)
    assert names(built, 3, 11) == [
        "node0.gpu3.pcie:tx",
        "node0.nic3.pcie:rx",
        "node0.nic3:tx",
        "node1.nic3:rx",
        "node1.nic3.pcie:tx",
        "node1.gpu3.pcie:rx",
    ]
    # GPU 1 shares its PCIe switch with NIC 0; GPU 5 does not and goes over NVLink to GPU 0, which does.
    assert names(built, 1, 8)[:2] == ["node0.gpu1.pcie:tx", "node0.nic0.pcie:rx"]
    assert names(built, 5, 8)[:3] == ["node0.gpu5.nvlink:tx", "node0.gpu0.nvlink:rx", "node0.gpu0.pcie:tx"]


def test_without_nvlink_rails_meet_in_the_fabric_where_it_joins_them() -> None:
    """With a spine, GPU 5 leaves by its own NIC and changes rails above; without one it must reach NIC 0 over PCIe."""
    bare = {"nvlink": {"kind": "none", "bandwidth_Bps": 0.0, "latency_s": 0.0}}
    joined = cluster(nodes=40, node=bare)
    assert "node0.nic5:tx" in names(joined, 5, 8 * 39)
    assert "rail5.leaf0.up:tx" in names(joined, 5, 8 * 39)
    apart = cluster(nodes=2, node=bare)
    assert "node0.nic0:tx" in names(apart, 5, 8)
    assert "node0.pcie2.host:tx" in names(apart, 5, 8)


@pytest.mark.parametrize(
    ("nodes", "tiers", "links_between"),
    [(2, 1, 2), (20, 1, 2), (21, 2, 4), (100, 2, 4), (101, 3, 4)],
)
def test_tiers_grow_with_the_cluster(nodes: int, tiers: int, links_between: int) -> None:
    """40-port leaves hold 20 nodes; 40 leaves, which two tiers can join, are 5 pods of 8 rails: 100 nodes. A rail's
    leaves share a spine group (here up to 20 leaves), so that its traffic does not climb to the core."""
    built = cluster(nodes=nodes)
    assert built.switches.tiers == tiers
    ends = built.route(0, 8 * (nodes - 1))
    assert sum(built.links[i].kind == "infiniband" for i in ends) == links_between


@pytest.mark.parametrize(("fabric", "most"), [({"tiers": 1}, 40), ({"tiers": 2}, 100), ({"tiers": 3}, 2000)])
def test_a_fabric_refuses_what_it_cannot_hold(fabric: dict[str, Any], most: int) -> None:
    """R-port switches: R nodes in one tier; R leaves of R/2 nodes over 8 rails in two; R^2/2 leaves in three."""
    assert cluster(nodes=most, fabric=fabric).spec.nodes == most
    with pytest.raises(InputError, match="do not hold") as refusal:
        cluster(nodes=most + 1, fabric=fabric)
    assert f"at most {most} nodes" in str(refusal.value)


@pytest.mark.parametrize("nodes", [2, 20, 40, 100, 160])
def test_full_bisection_without_oversubscription(nodes: int) -> None:
    """A non-blocking tree carries all NICs of one half: nodes/2 x 8 x 25 GB/s."""
    assert cluster(nodes=nodes).bisection_Bps() == pytest.approx(nodes // 2 * 8 * 25e9)


def test_oversubscription_divides_the_uplinks() -> None:
    """3:1 on 40 ports: 30 down and 10 up. Two pods of 30 nodes: 8 leaves x 10 uplinks x 25 GB/s between them."""
    built = cluster(nodes=60, fabric={"oversubscription": 3})
    assert built.bisection_Bps() == pytest.approx(8 * 10 * 25e9)


def test_bisection_inside_a_node_is_nvlink() -> None:
    """Four GPUs send 300 GB/s each through the NVSwitch."""
    assert cluster().bisection_Bps() == pytest.approx(4 * 300e9)
    assert cluster(node={"gpus": {"count": 1}}).bisection_Bps() == 0


@pytest.mark.parametrize("count", [2, 4, 8])
def test_mesh_divides_a_gpus_nvlink_among_its_peers(count: int) -> None:
    built = cluster(node={"gpus": {"count": count}, "nvlink": {"kind": "mesh"}})
    for a in range(count):
        out = [link for link in built.links if link.kind == "nvlink" and link.src == f"node0.gpu{a}"]
        assert len(out) == count - 1
        assert sum(link.bandwidth_Bps for link in out) == pytest.approx(300e9)


def test_pairs_use_pcie_across_and_the_host_without_peer_to_peer() -> None:
    paired = cluster(node={"nvlink": {"kind": "pairs"}})
    assert names(paired, 2, 3) == ["node0.gpu2-gpu3.nvlink:tx"]
    assert names(paired, 1, 2) == [
        "node0.gpu1.pcie:tx", "node0.pcie0.host:tx", "node0.pcie1.host:rx", "node0.gpu2.pcie:rx",
    ]  # fmt: skip
    bare = {"nvlink": {"kind": "none", "bandwidth_Bps": 0.0, "latency_s": 0.0}}
    assert names(cluster(node=bare), 0, 1) == ["node0.gpu0.pcie:tx", "node0.gpu1.pcie:rx"]
    assert "node0.pcie0.host:tx" in names(cluster(node={**bare, "pcie": {"p2p": False}}), 0, 1)


@pytest.mark.parametrize(("count", "served"), [(8, [1] * 8), (4, [2] * 4), (1, [8])])
def test_gpus_spread_over_their_nearest_nics(count: int, served: list[int]) -> None:
    built = cluster(node={"nics": {"count": count}})
    counts = Counter(built.own_nics(gpu)[0] for gpu in range(8))
    assert [counts[nic] for nic in range(count)] == served


def test_overrides_change_what_they_name_and_nothing_else() -> None:
    changed = cluster(
        nodes=4,
        overrides=[{"link": "node3.nic2", "bandwidth_scale": 0.5}, {"gpu": "node1.gpu4", "speed_scale": 0.9}],
    )
    plain = cluster(nodes=4)
    differing = [(a.name, a.bandwidth_Bps) for a, b in zip(changed.links, plain.links, strict=True) if a != b]
    assert differing == [("node3.nic2:tx", 12.5e9), ("node3.nic2:rx", 12.5e9)]
    assert [gpu.name for gpu in changed.gpus if gpu.speed_scale != 1] == ["node1.gpu4"]
    one_way = cluster(nodes=4, overrides=[{"link": "node3.nic2:rx", "bandwidth_scale": 0.5}])
    assert [a.name for a, b in zip(one_way.links, plain.links, strict=True) if a != b] == ["node3.nic2:rx"]


def test_an_override_of_nothing_names_the_nearest_link() -> None:
    with pytest.raises(InputError) as refusal:
        cluster(nodes=2, overrides=[{"link": "node1.nc2", "bandwidth_scale": 0.5}])
    assert "overrides[0].link" in str(refusal.value)
    assert "node1.nic2" in str(refusal.value)


def test_the_graph_has_every_link_once_each_way() -> None:
    built = cluster(nodes=3)
    # The memory of 3 hosts and of their 6 sockets is read and written over one link.
    assert built.graph.number_of_edges() == len(built.links) + 3 + 6
    assert nx.is_strongly_connected(built.graph)
    assert all(built.graph.has_edge(link.dst, link.src) for link in built.links)


def test_the_topology_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "two.svg"
    for arguments in (["--json", "-"], ["--plot", str(picture)]):
        with pytest.raises(SystemExit) as caught:
            main(["topology", "dgx_a100", "--nodes", "40", *arguments])
        assert caught.value.code == 0
        out = capsys.readouterr().out
        if arguments[1] == "-":
            result = json.loads(out)
            assert len(result["gpus"]) == 320
            assert result["bisection_Bps"] == pytest.approx(20 * 8 * 25e9)
            built = cluster(nodes=40)
            assert [(link["name"], link["bandwidth_Bps"]) for link in result["links"]] == [
                (link.name, link.bandwidth_Bps) for link in built.links
            ]
        else:
            assert "320 GPUs" in out
            assert "rail*.leaf*.up" in out
    assert "NVSwitch" in picture.read_text()
