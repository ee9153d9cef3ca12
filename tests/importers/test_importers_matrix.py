"""Matrices of ``nvidia-smi topo -m``."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.cluster.relations import DeviceRelations
from simulator.errors import InputError
from simulator.importers.reading import read_topology
from tests.support.topology_files import MATRIX, places, read


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
    joined = DeviceRelations(cluster.spec.kinds[0])
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
    [(8, 12, "nvswitch", 300e9), (8, 18, "nvswitch", 450e9), (16, 6, "nvswitch", 150e9), (4, 4, "mesh", 300e9)],
)
def test_equal_nvlinks_to_more_peers_than_a_gpu_has_links(
    tmp_path: Path, n: int, count: int, kind: str, bandwidth_Bps: float
) -> None:
    """8 GPUs with 12 links to each of 7 others would have 84: the 12 lead to NVSwitches. With 4 to each of 3, a GPU
    has 12, which is what an A100 has: a mesh of 12 links of 25 GB/s a GPU. None shows its PCIe: one socket is assumed
    for all."""
    rows = ["\t".join([f"GPU{i}", *("X" if i == j else f"NV{count}" for j in range(n))]) for i in range(n)]
    imported, _ = read(tmp_path, "\t" + "\t".join(f"GPU{i}" for i in range(n)) + "\n" + "\n".join(rows), "t.txt")
    nvlink = imported.cluster["node"]["nvlink"]
    assert (nvlink["kind"], nvlink["bandwidth_Bps"]) == (kind, bandwidth_Bps)
    assert "sockets" not in imported.cluster["node"]
    assert any(text.startswith(f"node.sockets: one of {n} GPUs") for text in imported.assumed)


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
