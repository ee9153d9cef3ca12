"""Topology files of other tools: what they say is what the cluster has, and what is wrong in them is named by line.

Files of our own are always read. Real ones, which are not ours to ship, are read where they are at hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.cluster import build_cluster
from simulator.config.cluster import load_cluster
from simulator.errors import InputError
from simulator.importers.reading import read_topology
from tests.support.topology_files import XML, places, read


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
