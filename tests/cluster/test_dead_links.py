"""Dead links: traffic goes around them, and where no way is left an error says so."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import simulator
from simulator.cluster import Cluster, build_cluster
from simulator.config import load_cluster
from simulator.errors import InputError
from simulator.network.collectives import patterns
from tests.support.jobs import job


def cluster(*dead: str, **changes: Any) -> Cluster:
    overrides = [{"link": name, "missing": True} for name in dead]
    return build_cluster(load_cluster({"name": "dgx_h100", "nodes": 8, "overrides": overrides, **changes}))


def step_s(*overrides: dict[str, Any], **changes: Any) -> float:
    spec = {"name": "dgx_h100", "nodes": 4, "overrides": list(overrides)}
    return simulator.run(
        job(training__global_batch=32, parallelism__tp=2, **changes) | {"cluster": spec}
    ).spans.step_time_s


def test_a_dead_port_is_a_missing_card() -> None:
    """Without its cable, or without its PCIe link, a card carries nothing, just as if it were not there."""
    missing = step_s({"nic": "node1.nic2", "missing": True})
    assert missing > step_s()
    for link in ("node1.nic2", "node1.nic2.pcie"):
        assert step_s({"link": link, "missing": True}) == missing


def test_traffic_of_a_torus_goes_around_a_dead_cable() -> None:
    """Nodes (0, 0) and (1, 0) of 2 x 4 are neighbours. Without the cable between them the way leads over (0, 1) and
    (1, 1), or over (0, 3) and (1, 3): three cables, half of the bytes on each way."""
    whole, cut = (cluster(*dead, fabric={"kind": "torus", "shape": [2, 4]}) for dead in ((), ("torus0.0.x",)))
    ends = next(link for link in whole.links if link.name == "torus0.0.x:tx")
    node_a, node_b = (
        next(node for node in range(8) if whole.switches.leaves[node][0] == switch) for switch in (ends.src, ends.dst)
    )
    assert len(whole.trunks_between(node_a, 0, node_b, 0)) == 1
    around = cut.trunks_between(node_a, 0, node_b, 0)
    assert [share for _, share in around] == [0.5] * 6
    assert not any(link.name.startswith("torus0.0.x") for link in cut.links)


def test_a_rail_that_is_cut_leaves_its_bytes_to_the_others() -> None:
    """Eight nodes of 8 cards on 8-port leaves: nodes 0 to 3 and 4 to 7 of a rail are on a leaf each. Without the first
    leaf's way up, rail 0 serves neighbours under it; nodes 0 and 4 meet on another rail."""
    cut = cluster("rail0.leaf0.up", fabric={"kind": "rail_fat_tree", "radix": 8, "tiers": 3})
    same, apart = (cut.nics_between(0, 0, node, 0)[0] for node in (1, 4))
    assert same == (0, 0)
    assert apart == (1, 1)


def test_gpus_without_nvlink_talk_over_pcie() -> None:
    """GPU 2 of a node lost its NVLink: its pairs take PCIe, all others stay. Switches cannot sum up what it does not
    hand them, so that NVLink SHARP is none of the algorithms there."""
    cut = cluster("node1.gpu2.nvlink")
    layout = cut.layout_of(1)
    pairs = {(a, b) for a in range(8) for b in range(8) if a != b}
    assert layout.nvlink == {(a, b) for a, b in pairs if 2 not in (a, b)}
    assert {layout.edges[link].kind for link in layout.between[2, 3]} == {"pcie"}
    algorithms = [{one.algorithm for one in patterns("all_reduce", cut.gpus_of(node), cut)} for node in (0, 1)]
    assert "nvls" in algorithms[0]
    assert "nvls" not in algorithms[1]


def test_where_no_way_is_left_an_error_names_the_nodes() -> None:
    """Each node of a fat tree with 16 ports a leaf, 8 of them down, has a leaf of its own. A job that leaves the cut
    node out runs."""
    fabric = {"kind": "fat_tree", "radix": 16}
    spec = {"name": "dgx_h100", "nodes": 4, "fabric": fabric, "overrides": [{"link": "leaf0.up", "missing": True}]}
    with pytest.raises(InputError, match=r"cluster\.overrides: dead links leave no way from node\d to node\d"):
        simulator.run(job(training__global_batch=32) | {"cluster": spec})
    rest = job(training__global_batch=24) | {"cluster": spec, "placement": [1, 2, 3]}
    assert simulator.run(rest).spans.step_time_s > 0
    with pytest.raises(InputError, match=r"no way from gpu2 to nic0(.|\n)*gpu2, missing: true"):
        cluster("node1.gpu2.pcie")
    with pytest.raises(InputError, match=r"leave no network card to this node"):
        cluster("node1.nic*")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"link": "node0.nic77", "missing": True}, "this link does not exist(.|\n)*node0.nic7"),
        ({"link": "node0.nic7:tx", "missing": True}, "dead both ways(.|\n)*fix: +node0.nic7"),
        ({"link": "node0.nic7", "missing": True, "bandwidth_scale": 0.5}, "one of the two"),
        ({"link": "node0.nic7"}, "one of the two"),
        ({"link": "node0.memory", "missing": True}, "no node runs without it"),
    ],
)
def test_what_cannot_be_dead_is_refused(override: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_cluster(load_cluster({"name": "dgx_h100", "nodes": 2, "overrides": [override]}))


def test_a_file_may_start_from_a_shipped_cluster_as_a_workload_may(tmp_path: Path) -> None:
    """As a file of its own, as a mapping, and as a file that starts from such a file; a circle is refused."""
    written = {"name": "dgx_h100", "fabric": {"kind": "dragonfly"}, "nodes": 4}
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump(written))
    second.write_text(yaml.safe_dump({"name": "first.yaml", "nodes": 4}))
    assert load_cluster(first) == load_cluster(second) == load_cluster(written)
    first.write_text(yaml.safe_dump({"name": "second.yaml"}))
    with pytest.raises(InputError, match="starts from itself"):
        load_cluster(first)
