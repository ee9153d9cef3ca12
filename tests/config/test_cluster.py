"""The cluster file: references, overrides of a shipped file, and what contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from simulator.config import catalog, load_cluster
from simulator.errors import InputError


def cluster(**changes: Any) -> dict[str, Any]:
    """A small legal cluster, with the dotted keys in ``changes`` (dots written __) put in."""
    node: dict[str, Any] = {
        "gpus": {"type": "a100-sxm-80gb", "count": 4},
        "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 300e9, "latency_s": 1e-6},
        "pcie": {"generation": 4, "lanes": 16, "gpus_per_switch": 2},
        "nics": {"count": 4, "bandwidth_bps": 200e9, "latency_s": 1e-6},
    }
    data: dict[str, Any] = {"name": "small", "node": node}
    for path, value in changes.items():
        *sections, last = path.split("__")
        section = data
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return data


@pytest.mark.parametrize("name", catalog.names("cluster"))
def test_shipped_clusters_load_and_scale(name: str) -> None:
    """A machine without a network card stands alone."""
    spec = load_cluster(name)
    assert spec.nodes == (2 if name == "dgx_h100_tcp" else 1)
    if not spec.kinds[0].nics.count:
        with pytest.raises(InputError, match="several nodes need network cards"):
            load_cluster(name, nodes=2)
        return
    assert load_cluster(name, nodes=16).n_gpus == 16 * load_cluster(name).gpus_per_node
    assert load_cluster({"name": name, "nodes": 3}).nodes == 3


def test_keys_beside_a_shipped_name_replace_those_of_its_file() -> None:
    plain = load_cluster("dgx_a100")
    slow = load_cluster({"name": "dgx_a100", "node": {"nvlink": {"bandwidth_Bps": 150e9}}, "price_per_gpu_hour": 2})
    assert slow.node.nvlink.bandwidth_Bps == 150e9
    assert slow.node.nvlink.latency_s == plain.node.nvlink.latency_s
    assert slow.node.nics == plain.node.nics
    assert slow.price_per_gpu_hour == 2.0


def test_a_path_is_found_beside_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("node: {gpus: {type: x, count: 2}, pcie: {generation: 5}}\n")
    spec = load_cluster("mine.yaml", base=tmp_path)
    assert (spec.name, spec.n_gpus, spec.node.nvlink.kind, spec.node.nics.count) == ("mine", 2, "none", 0)


def test_an_inline_cluster_needs_no_name() -> None:
    data = cluster()
    del data["name"]
    assert load_cluster(data).name == "inline"


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"node__nvlink__bandwidth_Bps": -1.0}, "node.nvlink.bandwidth_Bps", "out of range"),
        ({"node__nvlink__bandwidth_Bps": 0}, "node.nvlink.bandwidth_Bps", "must be given for nvswitch"),
        ({"node__nvlink__kind": "none"}, "node.nvlink.bandwidth_Bps", "kind is none"),
        ({"node__nvlink__bandwidth_Bps": float("nan")}, "node.nvlink.bandwidth_Bps", "finite"),
        ({"node__nvlink__bandwidth_Bps": True}, "node.nvlink.bandwidth_Bps", "must be a number"),
        ({"node__nvlink__kind": "nvswich"}, "node.nvlink.kind", "kind: nvswitch"),
        ({"node__nvlink__kind": "pairs", "node__gpus__count": 3}, "node.gpus.count", "even"),
        ({"node__nics__bandwidth_bps": 0}, "node.nics.bandwidth_bps", "must be given"),
        ({"node__nics": {"count": 0}, "nodes": 2}, "node.nics.count", "network cards"),
        ({"node__gpus__count": 0}, "node.gpus.count", "out of range"),
        ({"node__pcie__generation": 9}, "node.pcie.generation", "<= 6"),
        ({"node__pcie__lanes": 12}, "node.pcie.lanes", "4, 8, 16"),
        ({"fabric__kind": "hypercube"}, "fabric.kind", "rail_fat_tree"),
        ({"fabric__oversubscription": 0.5}, "fabric.oversubscription", ">= 1"),
        ({"nodes": 10**12}, "nodes", "<= 1,000,000"),
        ({"nodes": 10**6}, "nodes", "at most 1,000,000 GPUs"),
        ({"price_per_gpu_hour": -1}, "price_per_gpu_hour", ">= 0"),
        ({"groups": [{"count": 2, "node": "dgx_h100"}]}, "node", "either node or groups"),
        ({"node__gpu": {}}, "node.gpu", "gpus instead of gpu"),
        ({"overrides": [{"gpu": "node0.gpu4", "speed_scale": 0.5}]}, "overrides[0].gpu", "gpu0 to gpu3"),
        ({"overrides": [{"gpu": "node1.gpu0", "speed_scale": 0.5}]}, "overrides[0].gpu", "node0 to node0"),
        ({"overrides": [{"gpu": "gpu0", "speed_scale": 0.5}]}, "overrides[0].gpu", "node<i>.gpu<j>"),
        ({"overrides": [{"link": "node0.nic0", "bandwidth_scale": 0}]}, "overrides[0].bandwidth_scale", ">= "),
        ({"overrides": [{"link": "node0.nic0", "speed_scale": 1}]}, "overrides[0].speed_scale", "unknown key"),
        ({"overrides": {"link": "node0.nic0"}}, "overrides", "a list"),
    ],
)
def test_a_bad_cluster_names_the_key(changes: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_cluster(cluster(**changes))
    assert f"{key}: " in str(caught.value)
    assert words in str(caught.value)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        load_cluster(cluster(node__gpus__count="four", fabric__tiers=7, node__nics__attach="usb"))
    assert [line.split(":")[0] for line in str(caught.value).splitlines() if not line.startswith(" ")] == [
        "node.gpus.count",
        "node.nics.attach",
        "fabric.tiers",
    ]


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="cluster dgx_a100"):
        load_cluster("dgx-a100")
    with pytest.raises(InputError, match="dgx_h100"):
        load_cluster({"name": "dgx_h10", "nodes": 2})


def test_another_kind_of_fabric_keeps_what_all_kinds_have(tmp_path: Path) -> None:
    """Only keys that a kind has for itself go."""
    fabric = {"kind": "fat_tree", "transport": "infiniband", "sharp": True, "tiers": 3}
    file = tmp_path / "sharp.yaml"
    file.write_text(yaml.safe_dump(cluster(nodes=4, fabric=fabric)))
    for kind, tiers in (("fat_tree", 3), ("dragonfly", 2)):
        spec = load_cluster({"name": str(file), "fabric": {"kind": kind}})
        assert (spec.fabric.kind, spec.fabric.sharp, spec.fabric.tiers) == (kind, True, tiers)


@pytest.mark.parametrize(("section", "count", "left"), [("nics", 1, (8, 1)), ("gpus", 6, (6, 4))])
def test_fewer_parts_than_a_shipped_tree_has_leave_it(section: str, count: int, left: tuple[int, int]) -> None:
    """The tree of pcie_l40s has 8 GPUs and 4 NICs; those beyond a smaller count leave their places."""
    node = load_cluster({"name": "pcie_l40s", "node": {section: {"count": count}}}).node
    assert node is not None
    names = list(node.pcie.tree)
    assert (sum(name.startswith("gpu") for name in names), sum(name.startswith("nic") for name in names)) == left


def test_a_part_that_is_typed_in_beyond_the_count_is_still_refused() -> None:
    with pytest.raises(InputError, match="nic1: does not exist"):
        load_cluster({"name": "pcie_l40s", "node": {"nics": {"count": 1}, "pcie": {"tree": {"nic1": "pcie1"}}}})


def test_nvlinks_of_a_gpu_that_has_none_are_warned_of() -> None:
    """A machine with NVSwitches whose GPUs are replaced keeps its links, and says so."""
    node = {"gpus": {"type": "rtx-4090-24gb"}}
    (warning,) = load_cluster({"like": "dgx_h100", "node": node}).warnings
    assert "node.nvlink: nvswitch, but a rtx-4090-24gb has no NVLink" in warning
    assert not load_cluster({"like": "dgx_h100", "node": {**node, "nvlink": {"kind": "none"}}}).warnings
    assert not load_cluster("dgx_h100").warnings


def test_latencies_that_nobody_gives_are_said_to_be_zero(tmp_path: Path) -> None:
    """A warning names each link of the cluster that lacks one. Any file or mapping may give it, and may give 0."""
    node = {
        "gpus": {"type": "h100-sxm-80gb", "count": 8},
        "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 450e9},
        "pcie": {"generation": 5},
        "nics": {"count": 8, "bandwidth_bps": 400e9, "latency_s": 0.0},
    }
    whole = {"name": "mine", "node": node, "fabric": {"kind": "rail_fat_tree"}}
    assert load_cluster(whole).warnings == ["assumed: node.nvlink.latency_s: 0 s, as nobody gives one"]
    groups = {"name": "mine", "groups": [{"count": 2, "node": node}], "fabric": {"kind": "rail_fat_tree"}}
    assert load_cluster(groups).warnings == ["assumed: groups[0].node.nvlink.latency_s: 0 s, as nobody gives one"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(whole))
    over = {"name": str(path), "node": {"nvlink": {"latency_s": 1e-6}}}
    assert load_cluster(over).warnings == []
    assert load_cluster({"name": "x", "like": str(path)}).warnings == load_cluster(whole).warnings
    alone = {"gpus": node["gpus"], "pcie": node["pcie"]}
    assert load_cluster({"name": "alone", "node": alone}).warnings == []
    assert not [name for name in catalog.names("cluster") if load_cluster(name).warnings]
