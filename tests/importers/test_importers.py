"""Topology files of other tools: what they say is what the cluster has, and what is wrong in them is named by line.

Files of our own are always read. Real ones, which are not ours to ship, are read where they are at hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.cli.app import main
from simulator.cluster import Cluster, build_cluster
from simulator.cluster.relations import device_names, relations
from simulator.config import load_workload, warnings
from simulator.config.cluster import load_cluster
from simulator.config.section import as_data
from simulator.errors import InputError
from simulator.importers import Imported, read_topology

FILES = Path(__file__).resolve().parents[3] / "shared/reference/files"

#: Two sockets. On the first a switch with two GPUs, a NIC of two ports and a drive; on the second a GPU and a NIC in
#: slots of their own, and a bridge with nothing behind it. Two of the three GPUs have three NVLinks.
XML = """<system version="1">
  <cpu numaid="1" affinity="ff00" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:b0:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16"/>
    <pci busid="0000:a0:00.0" class="0x030200" vendor="0x10de" device="0x2331" link_speed="16.0 GT/s PCIe" link_width="8">
      <gpu dev="2" sm="90" rank="2" gdr="1"/>
    </pci>
    <pci busid="0000:c0:00.0" class="0x020000" link_speed="5 GT/s" link_width="4">
      <nic><net name="mlx5_2" dev="2" speed="200000" latency="2.5"/></nic>
    </pci>
  </cpu>
  <cpu numaid="0" affinity="00000000,000000ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:12:00.0" class="0x030200" vendor="0x10de" device="0x2331" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="90" rank="1" gdr="1"><nvlink target="0000:11:00.0" count="3" tclass="0x030200"/></gpu>
      </pci>
      <pci busid="0000:11:00.0" class="0x030200" vendor="0x10de" device="0x2331" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1"><nvlink target="0000:12:00.0" count="3" tclass="0x030200"/></gpu>
      </pci>
      <pci busid="0000:13:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="200000"/><net name="mlx5_1" dev="1" speed="200000"/></nic>
      </pci>
      <pci busid="0000:14:00.0" class="0x010802" link_speed="16.0 GT/s PCIe" link_width="4"/>
    </pci>
  </cpu>
</system>
"""  # noqa: E501

MATRIX = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV12\tPXB\tSYS\tPIX\tSYS\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tPXB\tSYS\tPIX\tSYS\t0-31\t0\t\tN/A
GPU2\tPXB\tPXB\t X \tSYS\tPXB\tSYS\t0-31\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\tPHB\t32-63\t1\t\tN/A
NIC0\tPIX\tPIX\tPXB\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tSYS\tPHB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_0
"""


def read(tmp_path: Path, text: str, name: str = "topo.xml") -> tuple[Imported, Cluster]:
    path = tmp_path / name
    path.write_text(text)
    return read_topology(path), build_cluster(load_cluster(str(path)))


def places(imported: Imported) -> dict[str, Any]:
    tree: dict[str, Any] = imported.cluster["node"]["pcie"]["tree"]
    return tree


def test_what_is_plugged_into_what(tmp_path: Path) -> None:
    """By NUMA number, not by the order of the file; GPUs and NICs by their ``dev``; two ports share their card's link.
    A link of PCIe 2 is 0.5 GB/s a lane. Neither the drive nor the empty bridge is of use."""
    imported, _ = read(tmp_path, XML)
    assert places(imported) == {
        "gpu2": {"at": "cpu1", "generation": 4, "lanes": 8},
        "nic2": {"at": "cpu1", "bandwidth_Bps": 2e9},
        "pcie0": "cpu0",
        "gpu1": "pcie0",
        "gpu0": "pcie0",
        "pcie1": "pcie0",
        "nic0": "pcie1",
        "nic1": "pcie1",
    }
    assert imported.cluster["node"]["gpus"] == {"type": "h100-pcie-80gb", "count": 3}
    assert imported.cluster["node"]["pcie"]["generation"] == 5
    assert imported.left_out == ("PCI device of class 0x010802", "empty PCIe bridge")


def test_links_speeds_and_affinity(tmp_path: Path) -> None:
    """Three NVLinks of 25 GB/s; NICs as the file has them; 22 GB/s, NCCL's figure between Sapphire Rapids, where a
    PCIe 3 x16 link counts 12 for 15.75. 0xff are CPUs 0 to 7."""
    imported, cluster = read(tmp_path, XML)
    node = imported.cluster["node"]
    assert node["nvlink"]["links"] == [{"gpus": [0, 1], "count": 3}]
    assert node["nics"] == {"count": 3, "bandwidth_bps": 200e9, "latency_s": pytest.approx(2.5e-6)}
    assert imported.cluster["fabric"]["transport"] == "infiniband"
    assert node["sockets"]["bandwidth_Bps"] == pytest.approx(22e9 * 15.754 / 12, rel=0.01)
    link = {link.name: link.bandwidth_Bps for link in cluster.links}
    assert link["node0.gpu0-gpu1.nvlink:tx"] == 75e9
    assert link["node0.nic2.pcie:tx"] == 2e9
    by_name = {device.name: device for device in imported.devices}
    assert [by_name[f"gpu{i}"].label[5:7] for i in range(3)] == ["11", "12", "a0"]
    assert [by_name[f"nic{i}"].label for i in range(3)] == ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert by_name["gpu0"].cpus == "0-7"
    assert by_name["gpu2"].cpus == by_name["nic2"].cpus == "8-15"


def test_a_nic_of_another_speed(tmp_path: Path) -> None:
    """The speed of most is that of the section; what differs is an override, of every node alike."""
    path = tmp_path / "topo.xml"
    path.write_text(XML.replace('name="mlx5_2" dev="2" speed="200000"', 'name="mlx5_2" dev="2" speed="25000"'))
    cluster = build_cluster(load_cluster(str(path), nodes=2))
    ports = {link.name: link.bandwidth_Bps for link in cluster.links if link.kind == "infiniband"}
    for node in (0, 1):
        assert [ports[f"node{node}.nic{k}:rx"] for k in range(3)] == [25e9, 25e9, 25e9 / 8]


def test_every_assumption_has_its_key(tmp_path: Path) -> None:
    imported, _ = read(tmp_path, XML)
    keys = [text.split(":")[0] for text in imported.assumed]
    assert keys == [
        "node.sockets.bandwidth_Bps", "node.sockets.latency_s", "node.nvlink.bandwidth_Bps", "node.nvlink.latency_s",
        "fabric.transport", "fabric",
    ]  # fmt: skip
    bare = (
        '<system><cpu numaid="0"><pci busid="0:1:0.0" class="0x03"/><pci busid="0:2:0.0" class="0x02"/></cpu></system>'
    )
    imported, _ = read(tmp_path, bare)
    keys = [text.split(":")[0] for text in imported.assumed]
    assert keys == [
        "node.pcie.tree", "node.gpus.type", "node.nvlink", "node.nics.bandwidth_bps", "fabric.transport",
        "node.nics.latency_s", "fabric",
    ]  # fmt: skip


@pytest.mark.parametrize(("per_gpu", "kind"), [(18, "nvswitch"), (6, "nvswitch")])
def test_nvlinks_to_a_switch(tmp_path: Path, per_gpu: int, kind: str) -> None:
    link = f'<nvlink target="ffffff:ffff:ff" count="{per_gpu}" tclass="0x068000"/>'
    gpus = "".join(
        f'<pci busid="0:{i}:0.0" class="0x03"><gpu dev="{i}" sm="90">{link}</gpu></pci>' for i in range(1, 5)
    )
    imported, cluster = read(tmp_path, f'<system><cpu numaid="0">{gpus}</cpu></system>')
    assert imported.cluster["node"]["nvlink"]["kind"] == kind
    assert cluster.links[0].bandwidth_Bps == per_gpu * 25e9


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("</system>", ""), 26, "no element found"),
        (("<system", "<graph"), 25, "mismatched tag, inside <graph> of line 1"),
        (('<system version="1">', '<!DOCTYPE x [<!ENTITY a "aaaa">]><system version="1">'), 1, "document type"),
        (("0000:12:00.0", "0000:11:00.0"), 16, "bus id of line 13"),
        (('target="0000:11:00.0" count="3"', 'target="0000:99:00.0" count="3"'), 14, "leads to no GPU"),
        (('target="0000:11:00.0" count="3"', 'target="0000:11:00.0" count="2"'), 17, "another number of links"),
        (('target="0000:11:00.0" count="3"', 'target="0000:11:00.0" count="-3"'), 14, "no such number"),
        (('target="0000:11:00.0" count="3"', 'target="0000:11:00.0" count="x"'), 14, "no whole number as count"),
        (('target="0000:11:00.0" ', ""), 14, "lacks target"),
        (('busid="0000:a0:00.0" ', ""), 4, "lacks busid"),
        (('numaid="1" ', ""), 2, "no whole number as numaid"),
        (("5 GT/s", "7 GT/s"), 7, "rate that is not known"),
        (('link_width="8"', 'link_width="7"'), 4, "odd number of lanes"),
        (('affinity="ff00"', 'affinity="0-7"'), 2, "no mask of CPUs"),
    ],
)
def test_what_is_wrong_in_an_xml_is_named_by_line(
    tmp_path: Path, change: tuple[str, str], line: int, words: str
) -> None:
    path = tmp_path / "bad.xml"
    path.write_text(XML.replace(*change, 1))
    with pytest.raises(InputError) as caught:
        read_topology(path)
    assert str(caught.value).startswith(f"{path}: line {line}")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("<graph/>", "line 1: <graph> is not the root"),
        ("<system/>", "holds no cpu"),
        ('<system><cpu numaid="0"/></system>', "holds no GPU"),
        ("<system>" + "<pci>" * 100, "nested more than 64 deep"),
        ("<system>" + "<pci/>" * 20_001, "more than 20,000 elements"),
        ("<system>" + " " * 11_000_000, "too large"),
        ("neither\n", "no topology that is known"),
        ("GPU1\tGPU0\n", "no topology that is known"),
        ("\tGPU0\tGPU2\n", "not numbered from 0"),
        ("\tGPU0\tNIC0\tNIC0\n", "a column twice"),
        ("\tGPU0\tGPU1\nGPU0\tX\tNV4\n", "line 2: ends before all GPUs"),
    ],
)
def test_what_is_no_topology_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.xml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_topology(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("wide", [False, True])
def test_a_matrix(tmp_path: Path, wide: bool) -> None:
    """Tabs as nvidia-smi prints them, or blanks as pages show them, with the escapes of a terminal in the header. GPUs
    0 and 1 are with NIC 0 at one switch, which is with GPU 2's below another; the other socket has the rest."""
    text = MATRIX.replace("\t", "    ") if wide else MATRIX.replace("GPU0\tGPU1", "\x1b[4mGPU0\tGPU1", 1)
    imported, cluster = read(tmp_path, text, "topo.txt")
    assert places(imported) == {
        "pcie0": "cpu0", "pcie1": "pcie0", "gpu0": "pcie1", "gpu1": "pcie1", "nic0": "pcie1", "pcie2": "pcie0",
        "gpu2": "pcie2", "gpu3": "cpu1", "nic1": "cpu1",
    }  # fmt: skip
    assert imported.cluster["node"]["nvlink"]["links"] == [{"gpus": [0, 1], "count": 12}]
    assert [device.label for device in imported.devices][4:] == ["mlx5_0", "mlx5_bond_0"]
    assert [device.cpus for device in imported.devices] == ["0-31"] * 3 + ["32-63", "0-31", "32-63"]
    assert list(cluster.layout_of(0).own_nics.values()) == [(0,), (0,), (0,), (1,)]


def test_devices_that_are_pxb_alone_have_a_switch_each(tmp_path: Path) -> None:
    """A quarter of a DGX A100: no two devices share a switch, all four are below one; and our own matrix of it."""
    names = ["GPU0", "GPU1", "NIC0", "NIC1"]
    cells = {(a, b): "X" if a == b else "NV12" if a[0] == b[0] == "G" else "PXB" for a in names for b in names}
    rows = ["\t".join([a, *(cells[a, b] for b in names), *["48-63\t3"] * (a[0] == "G")]) for a in names]
    header = "\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"])
    imported, cluster = read(tmp_path, "\n".join([header, *rows]), "topo.txt")
    tree = places(imported)
    assert {tree[tree[name.lower()]] for name in names} == {"pcie0"}
    joined = relations(cluster.spec.kinds[0])
    assert all(joined[a.lower(), b.lower()] == cell for (a, b), cell in cells.items() if cell != "X")


def test_a_virtual_machine_of_one_numa_node(tmp_path: Path) -> None:
    """What the cells say counts: GPUs that are far apart are at sockets of their own, each with its NIC."""
    rows = ["GPU0\tX\tSYS\tPIX\tSYS\t0-63\t0", "GPU1\tSYS\tX\tSYS\tPIX\t0-63\t0"]
    rows += ["NIC0\tPIX\tSYS\tX\tSYS", "NIC1\tSYS\tPIX\tSYS\tX"]
    text = "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\n" + "\n".join(rows)
    imported, cluster = read(tmp_path, text, "topo.txt")
    assert imported.cluster["node"]["sockets"]["count"] == 2
    assert places(imported) == {
        "pcie0": "cpu0", "gpu0": "pcie0", "nic0": "pcie0", "pcie1": "cpu1", "gpu1": "pcie1", "nic1": "pcie1",
    }  # fmt: skip
    assert cluster.layouts[0].own_nics == {0: (0,), 1: (1,)}


@pytest.mark.parametrize(
    ("n", "count", "kind", "bandwidth_Bps"),
    [(8, 12, "nvswitch", 300e9), (8, 18, "nvswitch", 450e9), (16, 6, "nvswitch", 150e9), (4, 4, "links", 25e9)],
)
def test_equal_nvlinks_to_more_peers_than_a_gpu_has_links(
    tmp_path: Path, n: int, count: int, kind: str, bandwidth_Bps: float
) -> None:
    """8 GPUs with 12 links to each of 7 others would have 84: the 12 lead to NVSwitches. With 4 to each of 3, no GPU
    has more than 12, which is what an A100 has."""
    rows = ["\t".join([f"GPU{i}", *("X" if i == j else f"NV{count}" for j in range(n))]) for i in range(n)]
    imported, _ = read(tmp_path, "\t" + "\t".join(f"GPU{i}" for i in range(n)) + "\n" + "\n".join(rows), "t.txt")
    nvlink = imported.cluster["node"]["nvlink"]
    assert (nvlink["kind"], nvlink["bandwidth_Bps"]) == (kind, bandwidth_Bps)


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("NV12\tPXB", "NV12\tFOO"), 2, "GPU0 to GPU2: is no way to be joined"),
        (("PIX\tSYS\t0-31", "NV2\tSYS\t0-31"), 2, "GPU0 to NIC0: is no way"),
        (("GPU1\tNV12", "GPU1\tNV8"), 3, "GPU1 to GPU0 is NV8, but NV12 the other way"),
        (("GPU2\tPXB", "GPU2\tPIX"), 4, "GPU2 to GPU0 is PIX, but PXB"),
        (("GPU2\tPXB\tPXB\t X ", "GPU2\tPXB\tPXB\tPIX"), 4, "X is a device with itself"),
        (("GPU3\tSYS\tSYS\tSYS\t X \tSYS\tPHB\t32-63\t1\t\tN/A", "GPU3\tSYS"), 5, "GPU3 has 1 cells"),
        (("GPU3\tSYS", "GPU2\tSYS"), 5, "has a row already, line 4"),
        (("GPU3\tSYS", "GPU9\tSYS"), 5, "no row of this matrix"),
    ],
)
def test_what_is_wrong_in_a_matrix_is_named_by_line(
    tmp_path: Path, change: tuple[str, str], line: int, words: str
) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(MATRIX.replace(*change, 1))
    with pytest.raises(InputError) as caught:
        read_topology(path)
    assert str(caught.value).startswith(f"{path}: line {line}: ")
    assert words in str(caught.value)


def test_a_matrix_that_no_tree_has(tmp_path: Path) -> None:
    """A and B at one switch, B and C too, but A and C farther apart."""
    path = tmp_path / "bad.txt"
    path.write_text("\tGPU0\tGPU1\tGPU2\nGPU0\tX\tPIX\tSYS\nGPU1\tPIX\tX\tPIX\nGPU2\tSYS\tPIX\tX\n")
    with pytest.raises(InputError, match="line 2: GPU0 to GPU2 is SYS, but others join them more closely"):
        read_topology(path)


@pytest.mark.parametrize(("text", "name"), [(XML, "topo.xml"), (MATRIX, "topo.txt")])
def test_the_import_command(text: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The written file is the same cluster; what --set says is no longer assumed."""
    source, out = tmp_path / name, tmp_path / "mine.yaml"
    source.write_text(text)
    arguments = ["import", str(source), "--out", str(out), "--set", "node.nvlink.latency_s=1e-6"]
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "mlx5_0" in shown
    assert "node.nvlink.bandwidth_Bps" in shown
    assert "node.nvlink.latency_s" not in shown
    again = load_cluster(str(out))
    assert again.node.nvlink.latency_s == 1e-6
    changed = load_cluster({"name": str(source), "node": {"nvlink": {"latency_s": 1e-6}}})
    assert replace(again, name=changed.name) == changed
    with pytest.raises(SystemExit):
        main(["import", str(source), "--json", "-"])
    result = json.loads(capsys.readouterr().out)
    assert result["command"] == "import"
    assert [device["name"] for device in result["devices"]] == device_names(again.node)


def test_a_topology_stands_for_a_cluster_in_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what is assumed on standard error, and in the JSON."""
    source = tmp_path / "topo.xml"
    source.write_text(XML)
    with pytest.raises(SystemExit) as caught:
        main(["topology", str(source)])
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert "3 h100-pcie-80gb" in out
    assert "gpu2  SYS   SYS   X     SYS   SYS   PHB" in out
    assert "warning: assumed: node.sockets.latency_s" in err
    with pytest.raises(SystemExit):
        main(["topology", str(source), "--json", "-"])
    result = json.loads(capsys.readouterr().out)
    assert [text.split(":")[0] for text in result["warnings"]] == ["assumed"] * 6


def test_runs_say_what_is_assumed_of_their_cluster(tmp_path: Path) -> None:
    """A matrix tells neither PCIe's generation nor the speed of NICs: every run on it does, but for what the user says,
    whether as a key inside or as the whole section."""
    source = tmp_path / "node.txt"
    source.write_text(MATRIX)

    def assumed(**more: Any) -> set[str]:
        node = {"gpus": {"type": "a100-sxm-80gb"}, **more}
        workload = load_workload("gpt22b_tp8", {"parallelism.tp": 2, "cluster": {"name": str(source), "node": node}})
        found = [text.removeprefix("assumed: ") for text in warnings(workload) if text.startswith("assumed: ")]
        return {text.split(":")[0] for text in found}

    given = {text.split(":")[0] for text in read_topology(source).assumed} - {"node.gpus.type"}
    assert {"node.pcie.generation", "node.nics.bandwidth_bps", "node.nics.latency_s"} < given
    assert assumed() == given
    assert assumed(pcie={"generation": 5}) == given - {"node.pcie.generation"}
    nics = {"bandwidth_bps": 400e9, "latency_s": 2e-6}
    assert assumed(nics=nics) == given - {"node.nics.bandwidth_bps", "node.nics.latency_s"}
    assert warnings(load_workload("gpt22b_tp8")) == []
    with pytest.raises(SystemExit):  # and on the file that is made of it
        main(["import", str(source), "--out", str(tmp_path / "made.yaml"), "--set", "node.pcie.generation=5"])
    lines = (tmp_path / "made.yaml").read_text().split("assumed:\n")[1].splitlines()
    assert len(lines) == len(given)
    source = tmp_path / "made.yaml"
    assert assumed(nics=nics) == given - {"node.nics.bandwidth_bps", "node.nics.latency_s", "node.pcie.generation"}


@pytest.mark.parametrize("section", [True, False])
def test_what_is_said_of_a_section_or_inside_it_is_no_longer_assumed(section: bool, tmp_path: Path) -> None:
    """By import as by a workload: a whole section answers for its keys, a key inside for what is assumed of all."""
    source, made = tmp_path / "node.txt", tmp_path / "made.yaml"
    source.write_text(MATRIX)
    given = {text.split(":")[0] for text in read_topology(source).assumed}
    nics = {"bandwidth_bps": 400e9, "latency_s": 2e-6}
    count = read_topology(source).cluster["node"]["nics"]["count"]
    if section:
        changes = ["node.nics=" + json.dumps({"count": count, **nics}), "fabric={kind: fat_tree, transport: tcp}"]
    else:
        changes = [
            *(f"node.nics.{key}={value}" for key, value in nics.items()),
            "fabric.kind=fat_tree",
            "fabric.transport=tcp",
        ]
    with pytest.raises(SystemExit):
        main(["import", str(source), "--out", str(made), *(word for one in changes for word in ("--set", one))])
    left = given - {"node.nics.bandwidth_bps", "node.nics.latency_s", "fabric.kind", "fabric.transport"}
    assert {text.split(":")[0] for text in load_cluster(str(made)).assumed} == left < given
    over = {"name": str(source), "node": {"nics": nics}, "fabric": {"kind": "fat_tree", "transport": "tcp"}}
    assert {text.split(":")[0] for text in load_cluster(over).assumed} == left


def test_groups_take_a_node_away_with_what_was_assumed_of_it(tmp_path: Path) -> None:
    source = tmp_path / "node.txt"
    source.write_text(MATRIX)
    groups = [{"count": 2, "node": "dgx_a100"}]
    left = [text.split(":")[0] for text in load_cluster({"name": str(source), "groups": groups}).assumed]
    assert left == ["fabric.kind", "fabric.transport"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.xml"], "cannot be read"),
        (["topo.xml", "--set", "node.gpus.tpye=x"], "type instead of tpye"),
        (["topo.xml", "--set", "node.gpus.count=4"], "lacks gpu3"),
        (["topo.xml", "--out", "x.json"], "ends in .yaml"),
        (["topo.xml", "--out", "topo.xml"], "ends in .yaml"),
    ],
)
def test_import_refuses(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topo.xml").write_text(XML)
    with pytest.raises(SystemExit) as caught:
        main(["import", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


#: File -> GPUs, NICs, NVLinks, sockets, PCIe switches (bridges that lead to a GPU or NIC), and the NICs nearest to the
#: first and last GPU, all counted in the file by hand.
REAL: dict[str, tuple[int, int, int, int, int, list[str], list[str]]] = {
    # 2 cpu with 2 switches each, each of 2 GPUs and a NIC; the file has no NVLink.
    "nccl_xml/aws_p4d-24xl-topo.xml": (8, 4, 0, 2, 4, ["nic0"], ["nic3"]),
    # 4 cpu with a GPU each, at the CPU; one virtual NIC at the first. Each GPU's 12 NVLinks lead to itself in the file.
    "nccl_xml/azure_ncv4-topo.xml": (4, 1, 0, 4, 0, ["nic0"], ["nic0"]),
    # 4 cpu with a switch each, of 2 GPUs and 2 NICs. By bus id the first GPU (0001) is at the second cpu.
    "nccl_xml/azure_ndv4-topo.xml": (8, 8, 0, 4, 4, ["nic0", "nic1"], ["nic6", "nic7"]),
    # 2 cpu with 4 switches each, of a GPU and a NIC.
    "nccl_xml/azure_ndv5-topo.xml": (8, 8, 0, 2, 8, ["nic0"], ["nic7"]),
    # A GPU behind a bridge and a NIC at the first cpu, two GPUs behind bridges at the second.
    "nccl_xml/rccl_3p_pcie.xml": (3, 1, 0, 2, 3, ["nic0"], ["nic0"]),
    # A switch with 4 bridges, a GPU behind each, and a NIC; a ring of 4 xGMI links.
    "nccl_xml/rccl_4p1h.xml": (4, 1, 4, 1, 5, ["nic0"], ["nic0"]),
    # 8 GPUs behind a bridge each, 4 per cpu; 6 xGMI links each, 24 in all; 2 NICs at the first cpu, one at the second.
    "nccl_xml/rccl_8p6l_3nic.xml": (8, 3, 24, 2, 8, ["nic0", "nic1"], ["nic2"]),
    # Two switches with 4 bridges each, a GPU behind each, and a NIC; one cpu.
    "nccl_xml/rccl_8p_pcie_2nic.xml": (8, 2, 0, 1, 10, ["nic0"], ["nic1"]),
    # 4 pairs of 12 links.
    "nvidia_smi_topo/issue_nccl-tests_178_a100_nv12_pairs.txt": (8, 0, 48, 2, 0, [], []),
    # 6 pairs of 2 links, one NUMA node, the NIC by way of it.
    "nvidia_smi_topo/issue_nccl-tests_68_v100_4gpu_nv2.txt": (4, 1, 12, 1, 0, ["nic0"], ["nic0"]),
    # 6 pairs of 4 links; 4 NUMA nodes; GPUs 1 and 2 have a NIC at their switch, GPUs 0 and 3 have both NICs far away.
    "nvidia_smi_topo/issue_nccl_595_a100_4gpu_2nic.txt": (4, 2, 24, 4, 2, ["nic0", "nic1"], ["nic0", "nic1"]),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files(name: str) -> None:
    path = FILES / name
    if not path.is_file():
        pytest.skip("files of other projects are not at hand")
    gpus, nics, nvlinks, sockets, switches, first, last = REAL[name]
    imported = read_topology(path)
    node = load_cluster(str(path)).node
    build_cluster(load_cluster(str(path), nodes=2 if nics else 1))
    assert (node.gpus.count, node.nics.count, node.sockets.count) == (gpus, nics, sockets)
    assert sum(bundle.count for bundle in node.nvlink.links) == nvlinks
    assert sum(place.startswith("pcie") for place in node.pcie.tree) == switches
    joined, order = relations(node), ["PIX", "PXB", "PHB", "SYS"]
    for gpu, nearest in ((0, first), (gpus - 1, last)):
        ways = {f"nic{k}": order.index(joined[f"gpu{gpu}", f"nic{k}"]) for k in range(nics)}
        assert [nic for nic, way in ways.items() if way == min(ways.values())] == nearest
    assert len(imported.devices) == gpus + nics
    assert all(device.cpus for device in imported.devices)


@pytest.mark.parametrize(
    ("name", "device", "cpus"),
    [
        ("nccl_xml/aws_p4d-24xl-topo.xml", "gpu4", "24-47,72-95"),
        ("nccl_xml/azure_ndv4-topo.xml", "gpu0", "24-47"),
        ("nccl_xml/azure_ndv5-topo.xml", "nic7", "48-95"),
        ("nccl_xml/rccl_8p_pcie_2nic.xml", "gpu7", "0-7,16-23"),
        ("nvidia_smi_topo/issue_nccl_595_a100_4gpu_2nic.txt", "nic1", "48-63,112-127"),
    ],
)
def test_affinity_of_real_files(name: str, device: str, cpus: str) -> None:
    """Masks by hand: 000000ff,ffff0000,00ffffff has bits 0 to 23 in its last word, 48 to 63 in the middle, 64 to 71 in
    the first; its complement over 96 CPUs is the other socket's."""
    if not (FILES / name).is_file():
        pytest.skip("files of other projects are not at hand")
    by_name = {one.name: one for one in read_topology(FILES / name).devices}
    assert by_name[device].cpus == cpus


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
