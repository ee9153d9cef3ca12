"""The picture of a cluster: what is drawn, what is summed up, and where it is narrow."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.cluster import Cluster, build_cluster
from simulator.config import catalog
from simulator.config.cluster import load_cluster
from simulator.output.topology import draw_topology
from simulator.output.topology_style import RED
from tests.support.clusters import CLUSTERS
from tests.support.grids import one_in


def cluster(name: str = "dgx_a100", nodes: int = 1, **changes: Any) -> Cluster:
    return build_cluster(load_cluster({"name": name, **changes}, nodes=nodes))


def texts(built: Cluster) -> list[str]:
    figure = draw_topology(built)
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return found + [axes.get_title(loc="left") for axes in figure.axes]


def marked(built: Cluster) -> list[int]:
    """How many links of the narrowest cut are marked in each panel."""
    from matplotlib.colors import to_hex

    panels = []
    for axes in draw_topology(built).axes:
        lines = [to_hex(line.get_color()) for line in axes.lines]
        lines += [to_hex(patch.get_edgecolor()) for patch in axes.patches]
        panels.append(lines.count(RED.lower()))
    return panels


@pytest.mark.parametrize("name", one_in(2, CLUSTERS))
def test_every_kind_of_cluster_is_drawn_whole(name: str) -> None:
    """A box for every GPU and NIC of the node, and for every node of so small a cluster, but for groups of nodes."""
    built = build_cluster(load_cluster(CLUSTERS[name]))
    drawn = texts(built)
    layout = built.layouts[0]
    assert [f"GPU\n{gpu}" in drawn for gpu in layout.gpus] == [True] * len(layout.gpus)
    assert [f"NIC\n{nic}" in drawn for nic in layout.nics] == [True] * len(layout.nics)
    if built.n_nodes > 1 and name != "dragonfly":
        assert sum(text.startswith("node ") for text in drawn) == built.n_nodes


@pytest.mark.parametrize("name", one_in(6, catalog.names("cluster")))
def test_shipped_clusters_are_drawn(name: str) -> None:
    nodes = 2 if load_cluster(name).kinds[0].nics.count and name != "workstation_3gpu" else 1
    assert any(text.startswith("Inside a node") for text in texts(cluster(name, nodes)))


@pytest.mark.parametrize("nodes", [100, 1024])
def test_large_clusters_are_summed_up(nodes: int) -> None:
    """However many nodes there are, a person can count the boxes; nodes and leaves add up to all there are."""
    built = cluster("dgx_h100", nodes)
    drawn = texts(built)
    assert len(drawn) < 120
    counted = [int(text.split()[0].replace(",", "")) for text in drawn if "nodes\nof 8 GPUs" in text]
    assert sum(counted) == nodes


def test_bottlenecks_are_marked() -> None:
    """Of two leaves per rail, 3:1 oversubscribed, one side's 8 uplinks; without oversubscription the NICs are narrower.
    In a node with two sockets and PCIe alone: what joins the sockets."""
    assert marked(cluster(nodes=60, fabric={"oversubscription": 3})) == [0, 8]
    assert marked(cluster(nodes=60)) == [0, 0]
    assert marked(cluster("pcie_l40s")) == [1]
    assert marked(cluster("mi300x")) == [0]


def test_the_legend_names_the_narrowest_cut_where_one_is_marked() -> None:
    for built in (cluster(nodes=60, fabric={"oversubscription": 3}), cluster(nodes=60), cluster("mi300x")):
        legend = [text.get_text() for text in draw_topology(built).legends[0].get_texts()]
        assert ("narrowest cut between two halves" in legend) is any(marked(built))


def test_what_a_tier_carries_is_written_beside_it() -> None:
    """60 nodes x 8 x 25 GB/s are 12 TB/s; 40-port leaves at 3:1 have 10 uplinks, 16 of them 4 TB/s."""
    drawn = texts(cluster(nodes=60, fabric={"oversubscription": 3}))
    assert "12 TB/s\nfrom all NICs" in drawn
    assert "4 TB/s upwards\n3:1" in drawn


def test_what_differs_is_told() -> None:
    """A node that lacks a GPU is drawn apart; other differences stand below."""
    changes = [
        {"gpu": "node1.gpu3", "missing": True},
        {"link": "node0.nic2", "bandwidth_scale": 0.5},
        {"gpu": "node2.gpu0", "speed_scale": 0.9, "host_speed": 0.6},
    ]
    built = cluster(nodes=4, overrides=changes)
    assert "1 of 4 nodes, such as node 1: 7 a100-sxm-80gb" in "\n".join(texts(built))
    legend = draw_topology(built).legends[0].get_title().get_text()
    assert legend.split("; ") == [
        "node1.gpu3 is missing",
        "node0.nic2: bandwidth 0.5 times what it would be",
        "node2.gpu0: speed 0.9, host's speed 0.6 times what it would be",
    ]


def test_a_big_node_is_cut() -> None:
    """72 GPUs and 72 NICs: switches of 8 are drawn until there are 40 boxes, the rest is counted."""
    node = {
        "gpus": {"type": "x", "count": 72},
        "pcie": {"generation": 5, "gpus_per_switch": 4},
        "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 900e9},
        "nics": {"count": 72, "bandwidth_bps": 400e9},
    }
    drawn = texts(build_cluster(load_cluster({"node": node})))
    assert "GPU\n19" in drawn
    assert "GPU\n20" not in drawn
    assert any("and 104 more" in text for text in drawn)


NODE = {
    "gpus": {"type": "x", "count": 2},
    "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 450e9},
    "pcie": {"generation": 5},
    "nics": {"count": 2, "bandwidth_bps": 400e9},
}


@pytest.mark.parametrize(("shape", "cut"), [([4, 6], 12), ([2, 3, 4], 1), ([4, 2, 2], 2)])
def test_a_torus_is_a_grid(shape: list[int], cut: int) -> None:
    """A box per node. Halves of a ring of four are joined by two links of each of the six columns; planes are joined by
    one line, or two where they are a ring of four."""
    built = build_cluster(load_cluster({"node": NODE, "fabric": {"kind": "torus", "shape": shape}}))
    drawn = texts(built)
    assert sum(text.startswith("node ") for text in drawn) == built.n_nodes
    assert sum(text.startswith("plane ") for text in drawn) == (shape[0] if len(shape) == 3 else 0)
    assert marked(built)[1] == cut


@pytest.mark.parametrize(("nodes", "radix"), [(24, 12), (512, 24)])
def test_groups_of_a_dragonfly_are_boxes(nodes: int, radix: int) -> None:
    """Their nodes add up."""
    built = build_cluster(load_cluster({"node": NODE, "nodes": nodes, "fabric": {"kind": "dragonfly", "radix": radix}}))
    groups = [text for text in texts(built) if text.startswith("group")]
    assert sum(int(text.split("\n")[1].split()[0]) for text in groups if "nodes" in text) == nodes
    assert len(groups) > 1


def test_sites_stand_side_by_side() -> None:
    """The WAN link is the narrowest cut, and no tier of either site is narrower than the one below."""
    sites = {"count": 2, "bandwidth_bps": 800e9, "latency_s": 5e-3}
    built = cluster("dgx_h100", 64, fabric={"sites": sites})
    assert marked(built) == [0, 1]
    drawn = texts(built)
    assert "WAN 100 GB/s each" in drawn
    assert not any(":1" in text for text in drawn)
