"""Imported topologies in commands, what is assumed of them, and real files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.cli.app import main
from simulator.cluster import build_cluster
from simulator.cluster.relations import DeviceRelations, device_names
from simulator.config import load_workload, warnings
from simulator.config.cluster import load_cluster
from simulator.importers.reading import read_topology
from tests.support.topology_files import MATRIX, XML

FILES = Path(__file__).resolve().parents[3] / "shared/reference/files"


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


def _fully_joined(n: int, links_of: Callable[[int, int], bool] = lambda a, b: True) -> str:
    """NCCL's XML of ``n`` GPUs at one socket, an NVLink between every two for which ``links_of`` holds."""

    def gpu(i: int) -> str:
        peers = [j for j in range(n) if j != i and links_of(min(i, j), max(i, j))]
        links = "".join(f'<nvlink target="0:{j:x}:0.0" count="1" tclass="0x03"/>' for j in peers)
        return f'<pci busid="0:{i:x}:0.0" class="0x03"><gpu dev="{i}" sm="90">{links}</gpu></pci>'

    return f'<system><cpu numaid="0">{"".join(gpu(i) for i in range(n))}</cpu></system>'


def test_a_mesh_of_many_gpus_is_written_as_a_mesh(tmp_path: Path) -> None:
    """128 GPUs have 8,128 pairs, too many to be listed. One link of 25 GB/s to each of 127 others: 3,175 GB/s."""
    source, out = tmp_path / "topo.xml", tmp_path / "mine.yaml"
    source.write_text(_fully_joined(128))
    with pytest.raises(SystemExit) as caught:
        main(["import", str(source), "--out", str(out), "--quiet"])
    assert caught.value.code == 0
    nvlink = load_cluster(str(out)).node.nvlink
    assert (nvlink.kind, nvlink.bandwidth_Bps) == ("mesh", 127 * 25e9)


def test_a_mesh_is_the_cluster_that_its_links_one_by_one_are(tmp_path: Path) -> None:
    source = tmp_path / "topo.xml"
    source.write_text(_fully_joined(5))
    mesh = load_cluster(str(source))
    pairs = [{"gpus": [a, b]} for a in range(5) for b in range(a + 1, 5)]
    single = {"kind": "links", "bandwidth_Bps": 25e9, "links": pairs}
    listed = load_cluster({"name": str(source), "node": {"nvlink": single}})
    assert mesh.node.nvlink.kind == "mesh"
    assert list(build_cluster(mesh).links) == list(build_cluster(listed).links)


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """128 GPUs of which two are not joined: 8,127 pairs, each with seven keys and values."""
    source, out = tmp_path / "topo.xml", tmp_path / "mine.yaml"
    source.write_text(_fully_joined(128, lambda a, b: (a, b) != (0, 1)))
    with pytest.raises(SystemExit) as caught:
        main(["import", str(source), "--out", str(out)])
    assert caught.value.code == 2
    assert "has more than 50,000 keys and values" in capsys.readouterr().err
    assert not out.exists()


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
        (["topo.xml", "--out", "topo.xml"], "is a file that this command reads"),
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
    if node.nvlink.kind == "mesh":  # as fast as all links of a GPU; each is of two GPUs
        assert node.nvlink.bandwidth_Bps == 25e9 * 2 * nvlinks / gpus
    else:
        assert sum(bundle.count for bundle in node.nvlink.links) == nvlinks
    assert sum(place.startswith("pcie") for place in node.pcie.tree) == switches
    joined, order = DeviceRelations(node), ["PIX", "PXB", "PHB", "SYS"]
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
