"""Outputs of commands on a machine, alone and beside its topology. Those here are written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.config import catalog
from simulator.config.cluster import load_cluster
from simulator.errors import InputError
from simulator.importers.imported import Imported
from simulator.importers.machines import MACHINES, ShippedMachine
from simulator.importers.pci_ids import GPU_TYPES, PRODUCTS, WITHOUT_PROFILE
from simulator.importers.reading import read_machine
from tests.support.machine_dumps import H100, RTX3090, RTX4090, card, query

JOBS = """\
             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)
                 7     batch my job 2    alice  R       0:35      4 node[1-4]
                 8     batch     next      bob PD       0:00      9 (Nodes required for job are DOWN)
"""
#: Two GPUs joined by 18 links, and three cards.
MATRIX = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tNIC2\tCPU Affinity
GPU0\t X \tNV18\tPIX\tSYS\tNODE\t0-31
GPU1\tNV18\t X \tSYS\tPIX\tSYS\t32-63
NIC0\tPIX\tSYS\t X \tSYS\tNODE
NIC1\tSYS\tPIX\tSYS\t X \tSYS
NIC2\tNODE\tSYS\tNODE\tSYS\t X

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
  NIC2: mlx5_2
"""


def read(folder: Path, *texts: str) -> Imported:
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"dump{number}.txt")
        paths[-1].write_text(text)
    return read_machine(paths)


def keys(imported: Imported) -> set[str]:
    return {text.split(":")[0] for text in imported.assumed}


def test_gpus_alone_are_completed_from_a_shipped_machine(tmp_path: Path) -> None:
    """The link is that of the slot, generation 3 with 8 lanes, whatever it is at while idle."""
    imported = read(tmp_path, query(RTX4090, RTX4090, generation=3))
    assert imported.cluster["like"] == "workstation_2gpu"
    node = load_cluster(str(tmp_path / "dump0.txt")).node_at(0)
    assert (node.gpus.type, node.gpus.count, node.pcie.generation, node.pcie.lanes) == ("rtx-4090-24gb", 2, 3, 8)
    assert keys(imported) == {"node.nvlink", "node.pcie"}


def test_a_generation_that_no_file_says_is_that_of_the_shipped_machine(tmp_path: Path) -> None:
    """A DGX H100 has generation 5, and nothing is told; of a machine that no shipped one completes 4 is assumed."""
    said = "Max                       : 4"
    for devices, generation in (([H100] * 8, 5), ([RTX4090, RTX3090], 4)):
        imported = read(tmp_path, query(*devices).replace(said, said.replace("4", "N/A")))
        pcie = load_cluster(imported.cluster).node_at(0).pcie
        assert (pcie.generation, pcie.lanes) == (generation, 8)
        assert ("node.pcie.generation" in keys(imported)) == (generation == 4)


def test_a_lower_power_limit_is_told(tmp_path: Path) -> None:
    (text,) = read(tmp_path, query(RTX4090, RTX4090, limit_W=300)).left_out
    assert "300 W, 450 W by default" in text
    assert "(2 times)" in text
    assert not read(tmp_path, query(RTX4090)).left_out


def test_gpus_of_two_types_are_listed_in_order(tmp_path: Path) -> None:
    node = load_cluster(read(tmp_path, query(RTX3090, RTX4090, RTX4090)).cluster).node_at(0)
    assert node.gpus.by_number == ("rtx-3090-24gb", "rtx-4090-24gb", "rtx-4090-24gb")


def test_one_slower_slot_is_told_and_slows_no_other_gpu(tmp_path: Path) -> None:
    """The fourth GPU is in a slot of generation 3: all have generation 4, as most do, and it is named."""
    text = query(*[RTX4090] * 4)
    odd = text.rindex("Max                       : 4")
    machine = read(tmp_path, text[:odd] + text[odd:].replace(": 4", ": 3", 1))
    node = load_cluster(machine.cluster).node_at(0)
    assert (node.pcie.generation, node.pcie.lanes) == (4, 8)
    (told,) = [text for text in machine.assumed if "GPU 3" in text]
    assert told.startswith("node.pcie: generation 4 x 8 lanes, as most; GPU 3 has generation 3 x 8")
    overrides = [{"link": "node0.gpu3.pcie", "bandwidth_scale": 0.5}]
    load_cluster({**machine.cluster, "overrides": overrides})  # as it is told


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ([RTX4090, RTX3090], "as no shipped cluster has GPUs of several types"),
        (["0x1EB810DE"] * 2, "as shipped clusters have at most 1 GPU of type t4-16gb in a node, and this has 2"),
        (["0x232110DE"], "as no shipped cluster has GPUs of type h100-nvl-94gb"),
    ],
)
def test_why_no_shipped_machine_completes_gpus_is_true(devices: list[str], why: str, tmp_path: Path) -> None:
    assert f"node.nvlink: none, {why}" in read(tmp_path, query(*devices)).assumed


def test_a_device_that_is_not_known_goes_by_its_product_name(tmp_path: Path) -> None:
    text = query("0x123410DE").replace("NVIDIA Something", "NVIDIA H100 80GB HBM3")
    assert read(tmp_path, text).cluster["node"]["gpus"]["type"] == "h100-sxm-80gb"
    assert set(PRODUCTS.values()) <= {*catalog.names("profile"), *WITHOUT_PROFILE}


def test_an_unknown_gpu_is_asked_for(tmp_path: Path) -> None:
    (text,) = [text for text in read(tmp_path, query("0xFFFF10DE")).assumed if text.startswith("node.gpus.type")]
    assert "NVIDIA Something (0xFFFF10DE) is not known here" in text


def test_cards_and_jobs_beside_gpus(tmp_path: Path) -> None:
    """One of three cards is down and one slower: four nodes with one card of 400 Gb/s each. The job that waits for nine
    nodes does not count, nor do the blanks in the name of the other."""
    cards = card("mlx5_0") + card("mlx5_1", state="Down") + card("mlx5_2", rate=100, layer="Ethernet")
    imported = read(tmp_path, query(*[H100] * 8), cards, JOBS)
    cluster = load_cluster(imported.cluster)
    nics = cluster.node_at(0).nics
    assert (cluster.n_nodes, nics.count, nics.bandwidth_bps) == (4, 1, 400e9)
    assert cluster.fabric.transport == "infiniband"
    assert cluster.node_at(0).nvlink.kind == "nvswitch"
    assert [text.split(":")[0] for text in imported.left_out] == ["mlx5_1", "mlx5_2", "job 8, which does not run"]


def test_a_matrix_takes_its_gaps_from_the_others(tmp_path: Path) -> None:
    """The slow card of the matrix goes, with its row. Nothing that the files say is assumed any more."""
    cards = card("mlx5_0", layer="Ethernet") + card("mlx5_1", layer="Ethernet") + card("mlx5_2", rate=25)
    alone, imported = read(tmp_path, MATRIX), read(tmp_path, MATRIX, query(H100, H100, generation=5), cards, JOBS)
    cluster = load_cluster(imported.cluster)
    node = cluster.node_at(0)
    assert (cluster.n_nodes, node.gpus.type, node.pcie.generation) == (4, "h100-sxm-80gb", 5)
    assert (node.nics.count, node.nics.bandwidth_bps, cluster.fabric.transport) == (2, 400e9, "roce")
    assert imported.cluster["node"]["pcie"]["tree"] == {"pcie0": "cpu0", "gpu0": "pcie0", "nic0": "pcie0"} | {
        "pcie1": "cpu1",
        "gpu1": "pcie1",
        "nic1": "pcie1",
    }
    answered = {"node.gpus.type", "node.pcie.generation", "node.nics.bandwidth_bps", "fabric.transport"}
    assert keys(alone) - keys(imported) == answered
    assert keys(imported) < keys(alone)


def test_a_link_of_blackwell_is_twice_as_fast(tmp_path: Path) -> None:
    """18 NVLinks of 25 GB/s between any two GPUs, but 50 GB/s each between two B200 (0x2901)."""
    speeds = [
        read(tmp_path, MATRIX, query(device, device)).cluster["node"]["nvlink"]["bandwidth_Bps"]
        for device in (H100, "0x290110DE")
    ]
    assert speeds == [25e9, 50e9]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([card("mlx5_0")], "says nothing of GPUs"),
        ([query(RTX4090, attached=2)], "ends before all attached GPUs"),
        ([query(RTX4090, RTX3090, RTX4090)], "do not follow each other"),
        ([query(RTX4090), query(RTX4090)], "is of nvidia-smi -q, as is"),
        ([MATRIX, MATRIX], "is a topology, as is"),
        ([MATRIX, query(H100)], "has another number of GPUs"),
        ([MATRIX, card("mlx5_0")], "has another number of network cards"),
        ([query(RTX4090), card("a", state="Down")], "no port that is Active"),
        ([query(RTX4090), card("a", layer="Other")], "line 4: a port of a has no link layer"),
        ([query(RTX4090), card("a", rate=0)], "line 4: a port of a has no rate"),
        ([query(RTX4090), JOBS], "no file says what joins them"),
        (
            [query(H100), JOBS.replace("PD", "R ").replace("(Nodes required for job are DOWN)", "node[5-13]")],
            "must hold one running job",
        ),
        ([query(H100), JOBS.splitlines()[0]], "must hold one running job"),
        (
            [query(H100), f"{JOBS.splitlines()[0]}\n1 gpu x me R 1:00 99999999999 n[1-9]"],
            "NODES: is no number of nodes",
        ),
        (["SwitchName=s0 Nodes=n[0-1]", query(H100)], "is of the network alone"),
        (["hello"], "is no topology that is known here"),
    ],
)
def test_what_contradicts_itself_is_refused(texts: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, *texts)


@pytest.mark.parametrize(
    "machine",
    [pytest.param(one, id=one.name) for one in {one.name: one for row in MACHINES.values() for one in row}.values()],
)
def test_the_table_of_machines_says_what_the_shipped_files_do(machine: ShippedMachine) -> None:
    node = load_cluster(machine.name).node_at(0)
    has: tuple[Any, ...] = (node.gpus.count, bool(node.pcie.tree), node.nics.count > 0)
    assert has == (machine.gpus, machine.tree, machine.network)


def test_machines_are_of_types_that_have_a_profile() -> None:
    assert MACHINES.keys() <= {*catalog.names("profile")}
    for kind, machines in MACHINES.items():
        for machine in machines:
            load_cluster({"like": machine.name, "node": {"gpus": {"type": kind}}})


@pytest.mark.parametrize("nodes", ["\u00b2", "9" * 5000])
def test_what_no_number_can_be_is_no_running_job(nodes: str, tmp_path: Path) -> None:
    """A superscript is a digit to Python, and 5,000 digits are more than it reads."""
    with pytest.raises(InputError, match="must hold one running job"):
        read(tmp_path, JOBS.replace("      4 node", f" {nodes} node"))


def test_types_by_pci_device_have_a_profile_or_are_listed_without() -> None:
    assert {*GPU_TYPES.values()} - {*catalog.names("profile")} == WITHOUT_PROFILE


@pytest.mark.parametrize(
    ("device", "told"),
    [("0x20F110DE", ["node.gpus.type: a100-pcie-40gb"]), (RTX4090, []), ("0x294110DE", []), ("0x31C210DE", [])],
)
def test_a_gpu_without_a_profile_is_told_once(device: str, told: list[str], tmp_path: Path) -> None:
    """Two GPUs of an A100 PCIe 40 GB, alone and beside their topology; an RTX 4090, a GB200 and a GB300 have one."""
    for texts in ([query(device, device)], [query(device, device), MATRIX]):
        assumed = read(tmp_path, *texts).assumed
        assert [text.split(",")[0] for text in assumed if text.startswith("node.gpus.type")] == told
