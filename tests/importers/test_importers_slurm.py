"""Slurm's topology.conf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.cli.app import main
from simulator.cluster import build_cluster
from simulator.config.cluster import load_cluster
from simulator.config.section import as_data
from simulator.errors import InputError
from simulator.importers.reading import read_topology
from tests.support.topology_files import XML

CONF = """# racks
SwitchName=s0 Nodes=tux[0-3,12] LinkSpeed=900
switchname=s[1] \\
   nodes=a[1-2]b[01-02],login   # continued
SwitchName=top Switches=s[0-1]
"""


def test_slurms_tree_of_switches(tmp_path: Path) -> None:
    """tux0 to tux3 and tux12 under s0; a1b01, a1b02, a2b01, a2b02 and login under s1; both under top. A leaf's link
    upwards carries what its nodes' NICs do: 5 nodes x 8 x 50 GB/s."""
    path = tmp_path / "topology.conf"
    path.write_text(CONF)
    imported = read_topology(path)
    assert imported.hosts == (
        "tux0", "tux1", "tux2", "tux3", "tux12", "a1b01", "a1b02", "a2b01", "a2b02", "login",
    )  # fmt: skip
    node = load_cluster("dgx_h100").node
    assert node is not None
    cluster = build_cluster(load_cluster({**imported.cluster, "node": as_data(node, defaults=False)}))
    assert cluster.switches.leaves[4] == ("s0",) * 8
    assert cluster.switches.leaves[5] == ("s1",) * 8
    assert [(trunk.lower, trunk.upper, trunk.bandwidth_Bps) for trunk in cluster.switches.trunks] == [
        ("s0", "top", 5 * 8 * 50e9), ("s1", "top", 5 * 8 * 50e9),
    ]  # fmt: skip
    names = [cluster.links[i].name for i in cluster.route(0, 5 * 8)]
    assert [name for name in names if ".up" in name] == ["s0.up:tx", "s1.up:rx"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("SwitchName=s0 Nodes=a\nSwitchName=s0 Nodes=b\n", 2, "s0 has a line already, line 1"),
        ("SwitchName=s0 Nodes=a\nSwitchName=t Switches=s0,s2\n", 2, "no line has this switch"),
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=a\n", 2, "a is under s0 too"),
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=b\n", 2, "not joined to the other switches"),
        ("SwitchName=s0 Switches=s1\nSwitchName=s1 Switches=s0\n", 1, "s0 hangs under itself"),
        ("SwitchName=s0 Nodes=a\nSwitchName=t Switches=s0\nSwitchName=u Switches=s0\n", 3, "s0 is under t too"),
        ("SwitchName=s0\n", 1, "either Nodes or Switches"),
        ("SwitchName=s0 Nodes=a[0-\n", 1, "no list of names"),
        ("SwitchName=s0 Nodes=a[3-1]\n", 1, "no range of numbers"),
        ("SwitchName=s0 Nodes=a[0-99999999]\n", 1, "no range of numbers"),
        ("SwitchName=s0 Nodes=a[0-999][0-999]\n", 1, "too many names"),
        ("SwitchName=s0 Node=a\n", 1, "Nodes"),
        ("SwitchName=s0 Nodes=\n", 1, "no KEY=VALUE"),
        ("SwitchName=s0 Nodes=a Nodes=b\n", 1, "has Nodes twice"),
        ("SwitchName=s0 Nodes=a\nNodes=b\n", 2, "lacks SwitchName"),
        ("BlockName=b0 Nodes=a[0-3]\n", 1, "topology/block"),
    ],
)
def test_what_is_wrong_in_a_conf_is_named_by_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_topology(path)
    assert str(caught.value).startswith(f"{path}: line {line}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fabric", "words"),
    [
        ({"kind": "switch_tree"}, "fabric.switches: must be given"),
        ({"switches": {"a": {}}}, "fabric.switches: rail_fat_tree has none"),
        ({"kind": "switch_tree", "tiers": 3, "switches": {"a": {"nodes": 2}}}, "fabric.tiers: switch_tree has none"),
        ({"kind": "switch_tree", "switches": {"a": {"nodes": 1}}}, "fabric.switches: hold fewer nodes"),
        ({"kind": "switch_tree", "switches": {"a": {"nodes": 2, "at": "b"}}}, "fabric.switches.a.at: is no switch"),
        (
            {"kind": "switch_tree", "switches": {"a": {"nodes": 2}, "b": {"at": "c"}, "c": {"at": "b"}}},
            "fabric.switches.b.at: hangs under itself",
        ),
        (
            {"kind": "switch_tree", "switches": {"a": {"nodes": 2}, "b": {"at": "x"}}},
            "fabric.switches.b.at: is no switch",
        ),
        ({"kind": "switch_tree", "switches": {"a": {"nodes": -2}}}, "fabric.switches.a.nodes: is out of range"),
        ({"kind": "switch_tree", "switches": {"a": {"node": 2}}}, "fabric.switches.a.node: unknown key"),
    ],
)
def test_a_bad_tree_of_switches_names_the_key(fabric: dict[str, Any], words: str) -> None:
    node = {
        "gpus": {"type": "x", "count": 1},
        "pcie": {"generation": 5},
        "nics": {"count": 1, "bandwidth_bps": 1e9},
    }
    with pytest.raises(InputError) as caught:
        build_cluster(load_cluster({"node": node, "fabric": fabric}, nodes=2))
    assert words in str(caught.value)


def test_import_of_a_fabric_asks_whose_nodes_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a shipped cluster, or from a machine's own topology."""
    monkeypatch.chdir(tmp_path)
    Path("topology.conf").write_text(CONF)
    Path("topo.xml").write_text(XML)
    for arguments, status, words in (
        (["topology.conf"], 2, "--node dgx_h100"),
        (["topo.xml", "--node", "dgx_h100"], 2, "leave --node out"),
        (["topology.conf", "--node", "dgx_h10"], 2, "--node: "),
        (["topology.conf", "--node", "dgx_h100"], 0, "node5 to node9"),
        (["topology.conf", "--node", "topo.xml", "--out", "both.yaml"], 0, "written: both.yaml"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["import", *arguments])
        assert caught.value.code == status
        captured = capsys.readouterr()
        assert words in captured.out + captured.err
    assert load_cluster("both.yaml").n_gpus == 10 * 3
