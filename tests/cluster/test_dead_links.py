"""Dead links: traffic goes around them, and where no way is left an error says so."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import simulator
from simulator.cluster import Cluster, build_cluster
from simulator.config import load_cluster
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.fabrics import FABRICS
from simulator.network.collectives import idle_seconds, patterns, plan
from simulator.program import CollectiveKind
from tests.support.grids import grid
from tests.support.jobs import FAST_HOSTS, job


def cluster(*dead: str, **changes: Any) -> Cluster:
    overrides = [{"link": name, "missing": True} for name in dead]
    return build_cluster(load_cluster({"name": "dgx_h100", "nodes": 8, "overrides": overrides, **changes}))


def step_s(*overrides: dict[str, Any], **changes: Any) -> float:
    spec = {"name": "dgx_h100", "nodes": 4, "overrides": list(overrides), "node": FAST_HOSTS}
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
    (1, 1): three cables. The equally short way over (0, 3) and (1, 3) is not taken beside it: a detour is one way."""
    whole, cut = (cluster(*dead, fabric={"kind": "torus", "shape": [2, 4]}) for dead in ((), ("torus0.0.x",)))
    ends = next(link for link in whole.links if link.name == "torus0.0.x:tx")
    node_a, node_b = (
        next(node for node in range(8) if whole.switches.leaves[node][0] == switch) for switch in (ends.src, ends.dst)
    )
    assert len(whole.trunks_between(node_a, 0, node_b, 0)) == 1
    around = cut.trunks_between(node_a, 0, node_b, 0)
    assert [share for _, share in around] == [1.0] * 3
    assert not any(link.name.startswith("torus0.0.x") for link in cut.links)


def test_a_rail_that_is_cut_leaves_its_bytes_to_the_others() -> None:
    """Eight nodes of 8 cards on 8-port leaves: nodes 0 to 3 and 4 to 7 of a rail are on a leaf each. Without the first
    leaf's way up, rail 0 serves neighbours under it; nodes 0 and 4 meet on another rail."""
    cut = cluster("rail0.leaf0.up", fabric={"kind": "rail_fat_tree", "radix": 8, "tiers": 3})
    same, apart = (cut.nics_between(0, 0, node, 0)[0] for node in (1, 4))
    assert same == (0, 0)
    assert apart == (1, 1)


def test_gpus_without_nvlink_talk_over_pcie() -> None:
    """GPU 2 of a node lost its NVLink: its pairs take PCIe, all others stay. Switches cannot sum up bytes that never
    reach them, so that NVLink SHARP is none of the algorithms there."""
    cut = cluster("node1.gpu2.nvlink")
    layout = cut.layout_of(1)
    pairs = {(a, b) for a in range(8) for b in range(8) if a != b}
    assert {pair for pair in pairs if layout.joins(*pair)} == {(a, b) for a, b in pairs if 2 not in (a, b)}
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
    with pytest.raises(InputError) as refused:
        simulator.run(job(training__global_batch=32) | {"cluster": spec})
    fix = yaml.safe_load(str(refused.value.fix))
    assert fix == {"placement": [1, 2, 3]}
    rest = job(training__global_batch=24) | {"cluster": spec} | fix
    assert simulator.run(rest).spans.step_time_s > 0
    with pytest.raises(InputError, match=r"leave no network card to this node"):
        cluster("node1.nic*")


@pytest.mark.parametrize(
    ("dead", "left_out"),
    [
        (["node1.gpu2.pcie"], ["node1.gpu2"]),
        (["node*.gpu2.pcie"], ["node*.gpu2"]),
        (["node1.pcie1.host"], ["node1.gpu2", "node1.gpu3", "node1.nic2", "node1.nic3"]),
        (["node1.cpu0-cpu1"], [f"node1.{kind}{i}" for kind in ("gpu", "nic") for i in range(4, 8)]),
        (["node0.gpu2.pcie", "node1.gpu5.pcie"], ["node0.gpu2", "node1.gpu5"]),
    ],
)
def test_the_fix_leaves_out_at_once_all_that_is_cut_off_and_can_be_typed_in(
    dead: list[str], left_out: list[str]
) -> None:
    """Each PCIe switch of a node has two GPUs and two cards, each socket two switches. What hangs beneath a dead link
    is cut off; of two equal halves the second is. A job on the GPUs that are left runs: one sequence for each."""
    overrides = [{"link": name, "missing": True} for name in dead]
    spec = {"name": "dgx_h100", "nodes": 2, "overrides": overrides}
    with pytest.raises(InputError, match="dead links leave no way") as refused:
        build_cluster(load_cluster(spec))
    fix = yaml.safe_load(f"[{refused.value.fix}]")
    assert fix == [{name.partition(".")[2][:3]: name, "missing": True} for name in left_out]
    mended = spec | {"overrides": overrides + fix}
    n_gpus = len(build_cluster(load_cluster(mended)).gpus)
    gpus_out = sum(2 if "*" in name else 1 for name in left_out if "gpu" in name)
    assert n_gpus == 16 - gpus_out
    assert simulator.run(job(training__global_batch=n_gpus) | {"cluster": mended}).spans.step_time_s > 0


@pytest.mark.parametrize("dead", ["node1.gpu*.pcie", "node1.pcie*.host"])
def test_where_leaving_out_parts_leaves_no_node_there_is_no_fix(dead: str) -> None:
    """Without PCIe no GPU reaches a card; with its switches cut off from the sockets no GPU reaches the memory."""
    with pytest.raises(InputError, match="dead links leave no way") as refused:
        cluster(dead)
    assert refused.value.fix is None


def test_a_detour_in_a_dragonfly_is_one_way() -> None:
    """All 32 routers of a group are joined to each other, so that 30 ways of two cables lead around a dead one. Sixteen
    cards of a router would have 30 cables in place of one if they took all these."""
    cut = cluster("group0.router0-router1", fabric={"kind": "dragonfly"})
    ends = ("group0.router0", "group0.router1")
    node_a, node_b = (next(n for n in range(8) if cut.switches.leaves[n][0] == router) for router in ends)
    around = cut.trunks_between(node_a, 0, node_b, 0)
    assert [share for _, share in around] == [1.0] * 2


FABRICS_TO_CUT: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "rail_fat_tree": (8, {"radix": 8, "tiers": 3}, ["rail0.leaf0.up", "rail7.leaf1.up", "spine2.up"]),
    "rail_only": (8, {"radix": 8, "tiers": 3}, ["rail0.leaf0.up", "rail5.leaf1.up"]),
    "fat_tree": (4, {"radix": 32}, []),
    "dragonfly": (4, {}, ["group0.router0-router1", "group0.router0-router2", "group0.router5-router9"]),
    "torus": (
        16,
        {"shape": [4, 4]},
        ["torus0.0.x", "torus0.0.y", "torus0.3.y", "torus1.2.x", "torus3.2.y", "torus3.3.y"],
    ),
    "switch_tree": (4, {"switches": {"s0": {}, "s1": {"at": "s0", "nodes": 2}, "s2": {"at": "s0", "nodes": 2}}}, []),
}


def test_every_fabric_is_cut() -> None:
    assert FABRICS_TO_CUT.keys() == FABRICS.keys()


def fabric_without(kind: str, *dead: str) -> dict[str, Any]:
    nodes, changes, _ = FABRICS_TO_CUT[kind]
    size = {} if kind == "torus" else {"nodes": nodes}
    overrides = [{"link": name, "missing": True} for name in dead]
    return {"name": "dgx_h100", "fabric": {"kind": kind, **changes}, "overrides": overrides, **size}


def links_to_cut(kind: str) -> list[str]:
    """A card, its PCIe link and NVLink in every fabric, and trunks where others lead on."""
    return [*FABRICS_TO_CUT[kind][2], "node1.nic2", "node0.nic0.pcie", "node1.gpu2.nvlink"]


@pytest.mark.parametrize(("kind", "parallelism"), grid(FABRICS_TO_CUT, [{}, {"zero": 3}], every=3))
def test_a_dead_link_never_makes_a_step_shorter(kind: str, parallelism: dict[str, Any]) -> None:
    """A dead link carries nothing, and the others are no faster. The model is wide, so that its bytes take longer
    than its products. All GPUs are one group: of several at once a slow one may leave the links to others in turn."""
    model = {"layers": 2, "hidden": 4096, "heads": 32, "vocab": 1024}
    work = job(model=model, training__global_batch=FABRICS_TO_CUT[kind][0] * 8, parallelism=parallelism)

    def step_s(*dead: str) -> float:
        return simulator.run(work | {"cluster": fabric_without(kind, *dead)}).spans.step_time_s

    whole_s = step_s()
    for link in links_to_cut(kind):
        assert step_s(link) >= whole_s * (1 - 1e-9), link


@pytest.mark.parametrize(("kind", "op"), grid(FABRICS_TO_CUT, ["all_reduce", "all_gather"], every=2))
def test_a_dead_link_never_makes_a_collective_faster(kind: str, op: CollectiveKind) -> None:
    """The groups are all GPUs, each second one, one of each node, and two far apart."""
    whole, costs = build_cluster(load_cluster(fabric_without(kind))), Costs.ideal()
    count = len(whole.gpus)
    groups = [range(count), range(0, count, 2), range(2, count, 8), [0, count // 2]]

    def seconds(built: Cluster) -> list[float]:
        return [idle_seconds(plan(op, 1e8, group, built, costs), built, costs) for group in groups]

    whole_s = seconds(whole)
    for link in links_to_cut(kind):
        for cut_s, least_s in zip(
            seconds(build_cluster(load_cluster(fabric_without(kind, link)))), whole_s, strict=True
        ):
            assert cut_s >= least_s * (1 - 1e-9), link


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
    """A file, a mapping, and a file that starts from such a file give the same cluster. A circle is refused."""
    written = {"name": "dgx_h100", "fabric": {"kind": "dragonfly"}, "nodes": 4}
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump(written))
    second.write_text(yaml.safe_dump({"name": "first.yaml", "nodes": 4}))
    assert load_cluster(first) == load_cluster(second) == load_cluster(written)
    first.write_text(yaml.safe_dump({"name": "second.yaml"}))
    with pytest.raises(InputError, match="starts from itself"):
        load_cluster(first)
