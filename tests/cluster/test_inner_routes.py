"""Routes inside a node: as a search from every vertex finds them, and no more searches than switches need."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx
import pytest

from simulator.cluster import inner_routes
from simulator.cluster.inner_routes import InnerRoutes
from simulator.cluster.node import lay_out
from simulator.cluster.wires import Edge, duplex, inner_edges
from simulator.config import catalog, load_cluster
from simulator.config.validation import validated
from simulator.hardware.node import NodeSpec

SHIPPED = catalog.names("cluster")


@pytest.mark.parametrize("name", SHIPPED)
def test_routes_are_those_of_a_search_over_all_vertices(name: str) -> None:
    """Every two vertices of a shipped node have a route of as few links as networkx finds.

    Each link begins where the last one ends. Vertices that no links join have no route."""
    edges = inner_edges(load_cluster(name).kinds[0])
    for kind in ("nvlink", "pcie"):
        routes = InnerRoutes(edges, kind)
        graph = nx.DiGraph((edge.src, edge.dst) for edge in edges if edge.kind == kind)
        fewest = dict(nx.all_pairs_shortest_path_length(graph))
        for a in graph:
            for b in graph:
                route = routes.between(a, b)
                assert (route is None) == (b not in fewest[a])
                if route is not None:
                    ends = [a, *[edges[link].dst for link in route]]
                    assert [*[edges[link].src for link in route], b] == ends
                    assert len(route) == fewest[a][b]


def test_of_routes_with_equally_few_links_the_fastest_is_taken() -> None:
    """Leaf a hangs on s, leaf b on t. Between s and t lie u, with links of 1 byte/s, and v, with links of 2 bytes/s."""
    pairs = [("a", "s", 1.0), ("s", "u", 1.0), ("s", "v", 2.0), ("u", "t", 1.0), ("v", "t", 2.0), ("t", "b", 1.0)]
    edges: list[Edge] = []
    for one, other, bandwidth_Bps in pairs:
        edges += duplex(f"{one}{other}", "pcie", one, other, bandwidth_Bps, 0.0)
    route = InnerRoutes(edges, "pcie").between("a", "b")
    assert route is not None
    assert [edges[link].name for link in route] == ["as:tx", "sv:tx", "vt:tx", "tb:tx"]


def test_a_node_of_576_gpus_searches_once_for_each_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """576 GPUs and cards hang on 72 PCIe switches, eight each, under one socket. Cards are dealt by distance, for which
    one GPU of each switch is looked at: 72 searches over switches and socket. NVLink takes the one search from the
    NVSwitches. GPU 9 has the second card of the second switch, card 9, for itself."""
    searches: list[str] = []
    search = inner_routes._cheapest_paths

    def counted(leaving: Mapping[str, Mapping[str, float]], start: str) -> dict[str, tuple[str, ...]]:
        searches.append(start)
        return search(leaving, start)

    monkeypatch.setattr(inner_routes, "_cheapest_paths", counted)
    section = {
        "gpus": {"type": "h100-sxm-80gb", "count": 576},
        "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 450e9},
        "pcie": {"generation": 5, "gpus_per_switch": 8},
        "nics": {"count": 576, "bandwidth_bps": 400e9},
    }
    layout = lay_out(validated(NodeSpec, section), "infiniband")
    assert layout.own_nics[9] == (9,)
    assert [layout.edges[link].name for link in layout.out(9, 9)] == ["gpu9.pcie:tx", "nic9.pcie:rx", "nic9:tx"]
    assert layout.joins_all
    assert sorted(searches) == sorted([*[f"pcie{switch}" for switch in range(72)], "nvswitch"])


@pytest.mark.parametrize("name", SHIPPED)
def test_links_between_gpus_are_those_of_all_pairs(name: str) -> None:
    """The links of one route for each way that GPUs are plugged in are the links of the routes of all pairs."""
    layout = lay_out(load_cluster(name).kinds[0], "infiniband")
    pairs = [(a, b) for a in layout.gpus for b in layout.gpus if a != b]
    assert layout.links_between_gpus == sorted({link for pair in pairs for link in layout.between[pair]})
    assert layout.joins_all == all(layout.joins(*pair) for pair in pairs)
