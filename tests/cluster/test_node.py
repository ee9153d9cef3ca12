"""The inside of odd nodes: trees of PCIe, sockets, any NVLinks, several NICs per GPU; rules R53 to R55."""

from __future__ import annotations

import json
from itertools import pairwise, permutations
from typing import Any

import pytest

from simulator.cli.app import main
from simulator.cluster import Cluster, build_cluster
from simulator.cluster.wires import nvlinks_of, tree_of
from simulator.config.cluster import load_cluster
from simulator.config.profile import load_profile
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.network.channels import channels
from simulator.network.collectives import bus_factor, idle_seconds, plan
from tests.support.clusters import CLUSTERS

GiB = 2**30


def node(count: int, **sections: Any) -> dict[str, Any]:
    return {"gpus": {"type": "a100-sxm-80gb", "count": count}, "pcie": {"generation": 4}, **sections}


def built(section: dict[str, Any], nodes: int = 1, **fabric: Any) -> Cluster:
    return build_cluster(load_cluster({"node": section, "nodes": nodes, "fabric": fabric}))


def names(cluster: Cluster, route: tuple[int, ...]) -> list[str]:
    return [cluster.links[i].name.removeprefix("node0.") for i in route]


def busbw(cluster: Cluster, ranks: list[int], nbytes: float = 16 * GiB, profile: str = "a100-sxm-80gb") -> float:
    """Of a ring all-reduce on the idle cluster, bytes/s."""
    costs = Costs.from_profile(load_profile(profile))
    chosen = plan("all_reduce", nbytes, ranks, cluster, costs, "ring")
    return nbytes / idle_seconds(chosen, cluster, costs) * bus_factor("all_reduce", len(ranks))


@pytest.mark.parametrize("name", CLUSTERS)
def test_short_forms_are_the_tree_that_they_stand_for(name: str) -> None:
    """Writing out what hangs where, and which GPUs are joined, changes no link and no route."""
    short = load_cluster(CLUSTERS[name])
    data = as_data(short, defaults=False)
    data["node"]["pcie"] = {"generation": 4, "p2p": short.node.pcie.p2p, "tree": dict(tree_of(short.node))}
    data["node"].get("nics", {}).pop("attach", None)
    if short.node.nvlink.kind in ("mesh", "pairs"):
        each = short.node.nvlink.bandwidth_Bps / (3 if short.node.nvlink.kind == "mesh" else 1)
        data["node"]["nvlink"] |= {"kind": "links", "bandwidth_Bps": each, "links": nvlinks_of(short.node)}
    one, other = build_cluster(short), build_cluster(validated(ClusterSpec, data))
    assert tuple(one.links) == tuple(other.links)
    for a, b in permutations(range(len(one.gpus)), 2):
        assert one.route(a, b) == other.route(a, b)


SOCKETS = {"count": 2, "bandwidth_Bps": 20e9, "latency_s": 1e-7}
#: A switch below a switch, a GPU alone in a slot of 8 lanes, NICs here and there.
DEEP = node(
    5,
    sockets=SOCKETS,
    pcie={
        "generation": 4,
        "tree": {
            "pcie0": "cpu0", "pcie1": "pcie0", "gpu0": "pcie1", "gpu1": "pcie1", "gpu2": "pcie0",
            "gpu3": {"at": "cpu0", "lanes": 8}, "gpu4": {"at": "cpu1", "generation": 3},
            "nic0": "pcie1", "nic1": "cpu1", "nic2": "cpu0",
        },
    },
    nics={"count": 3, "bandwidth_bps": 100e9},
)  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "route"),
    [
        (0, 1, ["gpu0.pcie:tx", "gpu1.pcie:rx"]),
        (0, 2, ["gpu0.pcie:tx", "pcie1.pcie:tx", "gpu2.pcie:rx"]),
        (0, 3, ["gpu0.pcie:tx", "pcie1.pcie:tx", "pcie0.host:tx", "gpu3.pcie:rx"]),
        (3, 4, ["gpu3.pcie:tx", "cpu0-cpu1:tx", "gpu4.pcie:rx"]),
        (4, 2, ["gpu4.pcie:tx", "cpu0-cpu1:rx", "pcie0.host:rx", "gpu2.pcie:rx"]),
    ],
)
def test_routes_in_a_deep_tree(a: int, b: int, route: list[str]) -> None:
    """To the lowest switch or socket above both, and from socket to socket where they have none in common."""
    cluster = built(DEEP)
    assert names(cluster, cluster.route(a, b)) == route


def test_nodes_may_be_keys() -> None:
    """Layouts are worked out once for nodes that are equal."""
    one, other = (load_cluster({"node": DEEP}).node for _ in range(2))
    assert one is not other
    assert {one: 1}[other] == 1


def test_links_of_a_tree_have_the_lanes_that_it_says() -> None:
    """16 lanes of PCIe 4 are 31.5 GB/s, 8 half of that, and 16 of PCIe 3 too."""
    link = {one.name: one.bandwidth_Bps for one in built(DEEP).links}
    assert link["node0.gpu0.pcie:tx"] == pytest.approx(31.508e9, rel=1e-4)
    assert link["node0.gpu3.pcie:rx"] == pytest.approx(link["node0.gpu0.pcie:tx"] / 2)
    assert link["node0.gpu4.pcie:rx"] == pytest.approx(link["node0.gpu0.pcie:tx"] / 2)
    assert link["node0.cpu0-cpu1:tx"] == 20e9


def test_gpus_take_the_nics_nearest_to_them() -> None:
    """NIC 0 is beside GPUs 0 and 1, and one switch from GPU 2, which has as many links to NIC 2, but by way of the CPU.
    GPU 3's socket has NIC 2, GPU 4's NIC 1."""
    assert list(built(DEEP).layout_of(0).own_nics.values()) == [(0,), (0,), (0,), (2,), (1,)]


def test_every_route_of_a_deep_tree_is_a_path() -> None:
    cluster = built(DEEP, nodes=2)
    for a, b in permutations(range(10), 2):
        crossed = [cluster.links[i] for i in cluster.route(a, b)]
        assert crossed[0].src == cluster.gpus[a].name
        assert crossed[-1].dst == cluster.gpus[b].name
        assert all(one.dst == two.src for one, two in pairwise(crossed))


def test_without_peer_to_peer_data_goes_by_way_of_a_socket() -> None:
    deep = {**DEEP, "pcie": {**DEEP["pcie"], "p2p": False}}
    cluster = built(deep)
    up, down = ["gpu0.pcie:tx", "pcie1.pcie:tx", "pcie0.host:tx"], ["pcie0.host:rx", "pcie1.pcie:rx", "gpu1.pcie:rx"]
    assert names(cluster, cluster.route(0, 1)) == up + down
    assert names(cluster, cluster.route(0, 4)) == [*up, "cpu0-cpu1:tx", "gpu4.pcie:rx"]


def test_each_socket_has_its_part_of_the_memory() -> None:
    """GPU 0 copies to the memory of its own socket, over half of the channels; the CPUs work on all of it."""
    cluster = built({**DEEP, "host_memory_bandwidth_Bps": 100e9})
    host, bandwidth = cluster.host(0), {link.name: link.bandwidth_Bps for link in cluster.links}
    there = names(cluster, cluster.route(0, host))
    assert there == ["gpu0.pcie:tx", "pcie1.pcie:tx", "pcie0.host:tx", "cpu0.memory", "memory"]
    assert names(cluster, cluster.route(host, 4)) == ["memory", "cpu1.memory", "gpu4.pcie:rx"]
    assert bandwidth["node0.cpu1.memory"] == 50e9
    assert bandwidth["node0.memory"] == 100e9


#: NVIDIA DGX-1 with V100: two meshes of four and links across; some are double (DGX-1 white paper, figure 4).
CUBE = [(0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2), (2, 6, 1), (3, 7, 1)]
CUBE += [(4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)]
HYBRID = node(
    8,
    nvlink={
        "kind": "links",
        "bandwidth_Bps": 25e9,
        "latency_s": 1e-6,
        "links": [{"gpus": [a, b], "count": count} for a, b, count in CUBE],
    },
)


def test_a_hybrid_cube_mesh() -> None:
    """Six links at every GPU. GPUs without a link of their own reach each other through one that has links to both, by
    the wider ones where there is a choice: 0 to 7 by 4 (2 and 2 links) rather than by 3 (2 and 1)."""
    ends = [gpu for a, b, count in CUBE for gpu in (a, b) for _ in range(count)]
    assert [ends.count(gpu) for gpu in range(8)] == [6] * 8
    cluster = built(HYBRID)
    for a, b in permutations(range(8), 2):
        joined = any({a, b} == {one, two} for one, two, _ in CUBE)
        assert len(cluster.route(a, b)) == (1 if joined else 2)
        assert cluster.layout_of(0).joins(a, b)
    assert names(cluster, cluster.route(0, 7)) == ["gpu0-gpu4.nvlink:tx", "gpu4-gpu7.nvlink:tx"]


@pytest.mark.parametrize("length", [3, 4, 6])
def test_nvlink_leads_through_one_gpu_at_most(length: int) -> None:
    """In a chain of GPUs neighbours are joined, and those next to them; others use PCIe, as NCCL does."""
    links = [{"gpus": [i, i + 1]} for i in range(length - 1)]
    cluster = built(node(length, nvlink={"kind": "links", "bandwidth_Bps": 50e9, "links": links, "name": "xgmi"}))
    for a, b in permutations(range(length), 2):
        kinds = {cluster.links[i].kind for i in cluster.route(a, b)}
        assert kinds == ({"nvlink"} if abs(a - b) <= 2 else {"pcie"})
    assert names(cluster, cluster.route(1, 0)) == ["gpu0-gpu1.xgmi:rx"]


def test_several_nics_per_gpu_are_shared_out() -> None:
    """32 NICs, 8 beside every two GPUs: four each, and all different (AWS p5)."""
    nics = {"count": 32, "bandwidth_bps": 100e9}
    layout = built(node(8, nics=nics, pcie={"generation": 5, "gpus_per_switch": 2})).layout_of(0)
    assert [len(own) for own in layout.own_nics.values()] == [4] * 8
    assert sorted(nic for own in layout.own_nics.values() for nic in own) == list(range(32))


@pytest.mark.parametrize("op", ["all_to_all", "send", "all_gather", "all_reduce"])
def test_many_narrow_nics_are_worth_few_wide_ones(op: str) -> None:
    """32 NICs of 100 Gb/s, four per GPU, against 8 of 400: transfers of all kinds use all that a GPU has."""
    costs = Costs.from_profile(load_profile("a100-sxm-80gb"))
    seconds = []
    for count, bps in ((8, 400e9), (32, 100e9)):
        cards = {"count": count, "bandwidth_bps": bps, "latency_s": 1e-6}
        pcie = {"generation": 5, "gpus_per_switch": 2}
        wide = {"kind": "nvswitch", "bandwidth_Bps": 450e9, "latency_s": 6e-7}
        cluster = built(node(8, nics=cards, nvlink=wide, pcie=pcie), nodes=2)
        ranks = [0, 8] if op == "send" else list(range(16))
        seconds.append(idle_seconds(plan(op, 4 * GiB, ranks, cluster, costs), cluster, costs))
    assert seconds[1] == pytest.approx(seconds[0], rel=0.02)


def test_shares_of_nics_add_up() -> None:
    """A GPU with four NICs sends a quarter by each; what leaves it, and what arrives, is all of it."""
    cards = {"count": 4, "bandwidth_bps": 100e9, "latency_s": 1e-6}
    cluster = built(node(1, nics=cards), nodes=2)
    shares = {cluster.links[link].name: share for link, share in cluster.spread(0, 1)}
    assert [shares[f"node0.nic{k}:tx"] for k in range(4)] == [0.25] * 4
    assert [shares[f"node1.nic{k}:rx"] for k in range(4)] == [0.25] * 4
    assert shares["node0.gpu0.pcie:tx"] == shares["node1.gpu0.pcie:rx"] == 1


@pytest.mark.parametrize(("nics", "factor"), [(8, 1), (4, 2), (2, 4)])
def test_r53_sharing_a_nic_halves_the_bandwidth_between_nodes(nics: int, factor: int) -> None:
    """A ring over two nodes uses every NIC; half as many carry half."""
    wide = {"kind": "nvswitch", "bandwidth_Bps": 300e9, "latency_s": 6e-7}

    def cluster(count: int) -> Cluster:
        cards = {"count": count, "bandwidth_bps": 200e9, "latency_s": 1e-6}
        return built(node(8, nics=cards, nvlink=wide, pcie={"generation": 4, "gpus_per_switch": 2}), nodes=2)

    ranks = list(range(16))
    assert busbw(cluster(8), ranks) / busbw(cluster(nics), ranks) == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize(
    ("nics", "bps", "expected"), [(1, 400e9, 49e9), (4, 400e9, 54e9), (4, 100e9, 49e9), (2, 100e9, 24.5e9)]
)
def test_r54_one_pcie_link_before_four_nics(nics: int, bps: float, expected: float) -> None:
    """A GPU's PCIe 5 x16 link carries 63 GB/s less headers, about 54: four NICs of 50 GB/s cannot get more through it,
    and four of 12.5 GB/s, or one of 50, are the bottleneck themselves."""
    cards = {"count": nics, "bandwidth_bps": bps, "latency_s": 1e-6}
    section = node(1, nics=cards, pcie={"generation": 5})
    assert busbw(built(section, nodes=2), [0, 1]) == pytest.approx(expected, rel=0.05)


def test_r55_nvlink_in_pairs_and_pcie_between_them() -> None:
    """github.com/NVIDIA/nccl-tests, issue 178: 2 GPUs of a pair 208 GB/s, 3 GPUs 20. A ring of three crosses PCIe
    twice, and each of those hops is the bottleneck: 26.3 GB/s less headers. All 8: the link between the sockets, 13.1
    less headers."""
    paired = load_cluster({"name": "pcie_a100_nvlink_pairs"})
    cluster = build_cluster(paired)
    assert busbw(cluster, [0, 1]) == pytest.approx(208e9, rel=0.15)
    assert busbw(cluster, [0, 1, 2]) == pytest.approx(20e9, rel=0.15)
    assert busbw(cluster, [1, 2]) == pytest.approx(busbw(cluster, [0, 1, 2]), rel=0.02)
    assert busbw(cluster, list(range(8))) == pytest.approx(0.86 * 13.1e9, rel=0.02)


def test_r55_as_a_user_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    """By the profile of the machine's own cards."""
    arguments = [
        "collective",
        "--cluster",
        "pcie_a100_nvlink_pairs",
        "--op",
        "all_reduce",
        "--sizes",
        "4G",
        "--json",
        "-",
    ]
    found = []
    for ranks in ("0,1", "0-2"):
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--ranks", ranks])
        assert caught.value.code == 0
        found.append(json.loads(capsys.readouterr().out)["rows"][0]["busbw_Bps"])
    assert found == [pytest.approx(208e9, rel=0.15), pytest.approx(20e9, rel=0.15)]


def tree(**places: Any) -> dict[str, Any]:
    return node(2, pcie={"generation": 4, "tree": {"gpu0": "cpu0", "gpu1": "cpu0", **places}})


PER_SWITCH = {"generation": 4, "gpus_per_switch": 1, "tree": {"gpu0": "cpu0", "gpu1": "cpu0"}}


def joined(*links: Any, kind: str = "links") -> dict[str, Any]:
    return node(2, nvlink={"kind": kind, "bandwidth_Bps": 25e9, "links": list(links)})


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        (tree(gpu1="cpu1"), "node.pcie.tree.gpu1.at", "no switch of this tree"),
        (tree(gpu1="pci0", pcie0="cpu0"), "node.pcie.tree.gpu1.at", "at: pcie0"),
        (tree(gpu2="cpu0"), "node.pcie.tree.gpu2", "gpu0 to gpu1"),
        (tree(nic0="cpu0"), "node.pcie.tree.nic0", "nics.count is 0"),
        (tree(gpu01="cpu0"), "node.pcie.tree.gpu01", "no name"),
        (tree(switch0="cpu0"), "node.pcie.tree.switch0", "no name"),
        (tree(gpu1="gpu0"), "node.pcie.tree.gpu1.at", "no switch of this tree"),
        (tree(pcie0="pcie1", pcie1="pcie0"), "node.pcie.tree.pcie0.at", "pcie0 in pcie1 in pcie0"),
        (tree(pcie0="cpu0"), "node.pcie.tree.pcie0", "nothing plugged in"),
        (tree(gpu1={"at": "cpu0", "lanes": 3}), "node.pcie.tree.gpu1.lanes", "1, 2, 4, 8, 16"),
        (tree(gpu1={"at": "cpu0", "lane": 8}), "node.pcie.tree.gpu1.lane", "lanes instead of lane"),
        (tree(gpu1={"lanes": 8}), "node.pcie.tree.gpu1.at", "required"),
        (tree(gpu1={"at": "cpu0", "bandwidth_Bps": -1}), "node.pcie.tree.gpu1.bandwidth_Bps", ">= 1,000"),
        (tree(gpu1={"at": "cpu0", "bandwidth_Bps": 1e9, "lanes": 8}), "node.pcie.tree.gpu1.bandwidth_Bps", "twice"),
        (tree(gpu1=7), "node.pcie.tree.gpu1.at", "allowed: text"),
        (node(2, pcie={"generation": 4, "tree": {"gpu0": "cpu0"}}), "node.pcie.tree", "lacks gpu1"),
        (node(2, pcie=PER_SWITCH), "node.pcie.gpus_per_switch", "leave pcie.gpus_per_switch out"),
        (node(2, sockets={"count": 2}), "node.sockets.bandwidth_Bps", "must be given"),
        (node(2, sockets={"count": 2, "bandwidth_Bps": 1}), "node.sockets.bandwidth_Bps", "too slow"),
        (node(2, sockets={"bandwidth_Bps": 1e10}), "node.sockets.bandwidth_Bps", "there is one"),
        (node(2, sockets={"count": 65, "bandwidth_Bps": 1e10}), "node.sockets.count", "<= 64"),
        (joined(), "node.nvlink.links", "must be given"),
        (joined({"gpus": [0, 2]}), "node.nvlink.links[0].gpus", "0 to 1"),
        (joined({"gpus": [-1, 0]}), "node.nvlink.links[0].gpus", "0 to 1"),
        (joined({"gpus": [1, 1]}), "node.nvlink.links[0].gpus", "itself"),
        (joined({"gpus": [0, 1]}, {"gpus": [1, 0]}), "node.nvlink.links[1].gpus", "links[0] joins them"),
        (joined({"gpus": [0, 1], "count": 0}), "node.nvlink.links[0].count", ">= 1"),
        (joined({"gpus": [0]}), "node.nvlink.links[0].gpus", "2"),
        (joined({"gpus": [0, 1]}, kind="mesh"), "node.nvlink.links", "kind: links"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_node_is_named(section: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_cluster({"node": section})
    assert f"{key}: " in str(caught.value)
    assert words in str(caught.value)


def allowed(order: tuple[int, ...], joined: set[frozenset[int]]) -> bool:
    return all(frozenset(pair) in joined for pair in zip(order, (*order[1:], order[0]), strict=True))


@pytest.mark.parametrize("group", [tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2), (7, 3, 2, 6, 5, 1, 0, 4)])
def test_rings_follow_nvlinks(group: tuple[int, ...]) -> None:
    """In the hybrid cube mesh: every hop of every ring is along links of its own, and together no link has more rings
    in either direction than it has NVLinks. All 8 GPUs: three rings, each both ways, use all six links of every GPU."""
    cluster = built(HYBRID)
    strung = channels(cluster, group)
    joined = {frozenset((a, b)): count for a, b, count in CUBE}
    used: dict[tuple[int, int], int] = {}
    for channel in strung:
        (order,) = channel.nodes
        assert sorted(order) == sorted(group)
        assert allowed(order, set(joined))
        for pair in zip(order, (*order[1:], order[0]), strict=True):
            used[pair] = used.get(pair, 0) + 1
    assert all(count <= joined[frozenset(pair)] for pair, count in used.items())
    assert len(strung) == {8: 6, 4: 4, 3: 2}[len(group)]


def test_a_ring_around_a_square_of_links() -> None:
    """Four GPUs whose links make a ring, not in their order (0 - 1 - 3 - 2 - 0): one link each way at full speed, where
    rank order would cross one link twice. 46 GB/s, less what the profile says of NVLinks."""
    square = [{"gpus": list(pair)} for pair in ((0, 1), (1, 3), (2, 3), (0, 2))]
    section = node(4, nvlink={"kind": "links", "bandwidth_Bps": 46e9, "latency_s": 1e-6, "links": square})
    reachable_Bps = Costs.from_profile(load_profile("a100-sxm-80gb")).reachable_Bps("nvlink", 46e9)
    # Two rings, each of half the message, one each way: both directions of every link are full.
    assert busbw(built(section), [0, 1, 2, 3]) == pytest.approx(2 * reachable_Bps, rel=0.15)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0, 2, 1, 3], [3, 0, 2, 1]])
def test_pairs_stay_side_by_side_whatever_the_order_of_ranks(ranks: list[int]) -> None:
    """Only two of the four hops leave a pair, so that each GPU's PCIe link is crossed once."""
    cluster = build_cluster(load_cluster(CLUSTERS["pairs"]))
    (channel,) = channels(cluster, tuple(ranks))
    (order,) = channel.nodes
    hops = [cluster.links[cluster.route(a, b)[0]].kind for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    assert sorted(hops) == ["nvlink", "nvlink", "pcie", "pcie"]


@pytest.mark.parametrize("nics", [1, 2, 4, 8])
def test_between_nodes_the_way_through_a_node_follows_its_nvlinks(nics: int) -> None:
    section = {**HYBRID, "nics": {"count": nics, "bandwidth_bps": 100e9, "latency_s": 1e-6}}
    section["pcie"] = {"generation": 3, "gpus_per_switch": 2}
    cluster = built(section, nodes=2)
    joined = {frozenset((a, b)) for a, b, _ in CUBE}
    for channel in channels(cluster, tuple(range(16))):
        for order in channel.nodes:
            assert all(frozenset((a % 8, b % 8)) in joined for a, b in pairwise(order))
