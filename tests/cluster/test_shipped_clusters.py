"""Shipped clusters: what their makers say of them, counted by hand, and that they scale."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from simulator.cli.app import main
from simulator.cluster import build_cluster
from simulator.cluster.relations import DeviceRelations
from simulator.config import catalog, load_cluster
from simulator.errors import InputError
from tests.support.grids import one_in

#: Name -> GPUs, NVLinks (ports into switches or bundles between GPUs), bytes/s of NVLink that leave a GPU, NICs, GPUs
#: per NIC, bytes/s of NICs per GPU.
NVIDIA: dict[str, tuple[int, int, float, int, float, float]] = {
    "dgx1_v100": (8, 16, 150e9, 4, 2, 6.25e9),
    "dgx2_v100": (16, 16, 150e9, 8, 2, 6.25e9),
    "dgx_a100": (8, 8, 300e9, 8, 1, 25e9),
    "dgx_h100": (8, 8, 450e9, 8, 1, 50e9),
    "dgx_h200": (8, 8, 450e9, 8, 1, 50e9),
    "dgx_b200": (8, 8, 900e9, 8, 1, 50e9),
    "gb200_nvl72": (72, 72, 900e9, 72, 1, 50e9),
    "aws_p4d": (8, 8, 300e9, 4, 2, 6.25e9),
    "aws_p4de": (8, 8, 300e9, 4, 2, 6.25e9),
    "aws_p5": (8, 8, 450e9, 32, 1 / 4, 50e9),
    "aws_p5en": (8, 8, 450e9, 16, 1 / 2, 50e9),
    "azure_nd_a100_v4": (8, 8, 300e9, 8, 1, 25e9),
    "azure_nd_h100_v5": (8, 8, 450e9, 8, 1, 50e9),
    "grand_teton_h100": (8, 8, 450e9, 8, 1, 50e9),
    "oci_a100_40gb": (8, 8, 300e9, 8, 1, 25e9),
    "gcp_a3_mega": (8, 8, 450e9, 8, 1, 25e9),
    "gcp_a3_ultra": (8, 8, 450e9, 8, 1, 50e9),
    "gcp_a4": (8, 8, 900e9, 8, 1, 50e9),
}


@pytest.mark.parametrize("name", NVIDIA)
def test_a_node_has_what_its_maker_says(name: str) -> None:
    gpus, nvlinks, nvlink_Bps, nics, gpus_per_nic, per_gpu_Bps = NVIDIA[name]
    spec = load_cluster(name, nodes=2)
    built = build_cluster(spec)
    layout = built.layout_of(0)
    assert (len(layout.gpus), len(layout.nics), len(layout.gpus) / len(layout.nics)) == (gpus, nics, gpus_per_nic)
    of_nvlink = [edge for edge in layout.edges if edge.kind == "nvlink"]
    assert len(of_nvlink) == 2 * nvlinks
    for gpu in range(gpus):
        assert sum(edge.bandwidth_Bps for edge in of_nvlink if edge.src == f"gpu{gpu}") == pytest.approx(nvlink_Bps)
    ports = sum(layout.edges[port].bandwidth_Bps for port in layout.port_out.values())
    assert ports / gpus == pytest.approx(per_gpu_Bps)
    # One node sends to the other what its NICs carry.
    assert built.bisection_Bps() == pytest.approx(ports)
    served = [nic for own in layout.own_nics.values() for nic in own]
    assert {served.count(nic) for nic in layout.nics} == {max(gpus // nics, 1)}


def test_the_hybrid_cube_mesh() -> None:
    """Two fully joined quads, and a bundle from each GPU to its like in the other; six links of 25 GB/s each. Any other
    two GPUs, such as 0 and 5, have one between them."""
    built = build_cluster(load_cluster("dgx1_v100"))
    for quad in (range(4), range(4, 8)):
        assert all(len(built.route(a, b)) == 1 for a in quad for b in quad if a != b)
    assert all(len(built.route(a, a + 4)) == 1 for a in range(4))
    for a in range(4):
        for b in range(4, 8):
            route = [built.links[link] for link in built.route(a, b)]
            assert len(route) == (1 if b == a + 4 else 2)
            assert {link.kind for link in route} == {"nvlink"}
    # Halves of 4 GPUs: two bundles of two links and two of one join the quads.
    assert built.bisection_Bps() == pytest.approx((2 * 2 + 2 * 1) * 25e9)


def test_a_rack_of_gb200_is_one_nvlink_domain_of_18_trays() -> None:
    """Any two GPUs are two NVLinks apart. GPU g has the NIC of its own tray, and hosts of trays their own GPUs."""
    built = build_cluster(load_cluster("gb200_nvl72", nodes=2))
    assert built.bisection_Bps() == pytest.approx(72 * 50e9)
    for a, b in ((0, 1), (0, 71), (35, 36)):
        assert [built.links[link].kind for link in built.route(a, b)] == ["nvlink"] * 2
    assert [built.own_nics(gpu)[0] // 4 for gpu in range(72)] == [gpu // 4 for gpu in range(72)]
    gpus = {f"node0.gpu{gpu}" for gpu in range(72)}
    trays = {link.dst for link in built.links if link.src in gpus and link.kind == "pcie"}
    assert trays == {f"node0.cpu{tray}" for tray in range(18)}
    # 72 NICs over leaves of 32 ports down: three leaves a rack.
    assert len({leaf for of_node in built.switches.leaves for leaf in of_node}) == 6


#: Keys of what users choose or the file's first line says, and not of what a maker has built.
CHOSEN = {"nodes", "tiers", "oversubscription", "gpus"}


def untold(text: str) -> list[str]:
    """Lines of a cluster file with figures of hardware that no comment explains: on the line, or on the one before or
    after it in its section; of entries of a list or a tree, above the first of them."""
    lines = text.splitlines()
    depth = [len(line) - len(line.lstrip()) for line in lines]
    found = []
    for at, line in enumerate(lines):
        keys = re.findall(r"^(\w+): *\d|[{,] *(\w+): *\d", line.partition("#")[0].strip())
        if not {key for pair in keys for key in pair if key} or line.split(":")[0].strip() in CHOSEN:
            continue
        told = {at, *(near for near in (at - 1, at + 1) if near < len(lines) and depth[near] == depth[at])}
        if re.match(r"\s*(- |gpu\d|nic\d)", line):
            head = max(above for above in range(at) if depth[above] < depth[at])
            told |= {*range(head - 1, at)}
        if not any("#" in lines[where] for where in told):
            found.append(line)
    return found


@pytest.mark.parametrize("name", catalog.names("cluster"))
def test_every_figure_has_its_source_beside_it(name: str) -> None:
    """Each figure of hardware says where that is from, or that it is assumed."""
    text = catalog.find("cluster", name).read_text(encoding="utf-8")
    assert text.startswith("#")  # whose node it is, and of which GPUs
    assert untold(text) == []


def test_a_figure_without_a_source_is_found() -> None:
    """With all that explains its NICs and its bandwidth taken away."""
    text = catalog.find("cluster", "aws_p5").read_text(encoding="utf-8")
    bare = re.sub(r"(count: 32|latency_s: 15e-6|bandwidth_Bps: 450e9|kind: nvswitch|latency_s: 0.6e-6).*", r"\1", text)
    found = [line.split(":")[0].strip() for line in untold(bare)]
    assert found == ["bandwidth_Bps", "count", "bandwidth_bps", "latency_s"]


def test_a_cluster_without_a_profile_shows_its_links_and_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "later.yaml"
    path.write_text(catalog.find("cluster", "aws_p5").read_text().replace("h100-sxm-80gb", "x100-sxm-1tb"))
    for command, status in (
        (["topology", str(path)], 0),
        (["collective", "--cluster", str(path), "--op", "barrier"], 2),
    ):
        with pytest.raises(SystemExit) as caught:
            main(command)
        assert caught.value.code == status
        printed = capsys.readouterr()
        assert "x100-sxm-1tb" in (printed.err if status else printed.out)


def test_topologies_are_listed_by_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["list", "topologies", "--json", "-"])
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert {row["name"] for row in rows} == set(catalog.names("cluster"))
    gpus = [row["gpu"] for row in rows]
    assert gpus == sorted(gpus)


@pytest.mark.parametrize("name", ["dgx1_v100", "dgx2_v100", "dgx_a100", "dgx_h100", "dgx_h200", "dgx_b200"])
def test_the_halves_of_a_dgx_are_at_cpus_of_their_own(name: str) -> None:
    """As `nvidia-smi topo -m` shows it: a GPU is SYS from the cards of the other half, PHB from others of its own."""
    node = load_cluster(name).kinds[0]
    joined, gpus, nics = DeviceRelations(node), node.gpus.count, node.nics.count
    ways = {(g * 2 // gpus, k * 2 // nics): set[str]() for g in range(gpus) for k in range(nics)}
    for g in range(gpus):
        for k in range(nics):
            ways[g * 2 // gpus, k * 2 // nics].add(joined[f"gpu{g}", f"nic{k}"])
    assert ways == {(0, 0): {"PIX", "PHB"}, (1, 1): {"PIX", "PHB"}, (0, 1): {"SYS"}, (1, 0): {"SYS"}}


def test_eight_thousand_gpus_take_little() -> None:
    """A link is one small object: 1,024 DGX H100s are 1,024 x 79 links, and those of 256 leaves and 8 spine groups (a
    rail has 32 leaves of 32 nodes). Memory is measured on a quarter of them; 4 GiB would hold 50,000 bytes a link."""
    built = build_cluster(load_cluster("dgx_h100", nodes=1024))
    assert (len(built.gpus), len(built.links)) == (8192, 1024 * 79 + 2 * (256 + 8))
    assert len({id(layout) for layout in built.layouts}) == 1
    ends = [built.links[link].dst for link in built.route(0, 8191)]
    assert [end for end in ends if end.startswith(("spine", "core"))] == ["spine7"]
    assert built.bisection_Bps() == pytest.approx(4096 * 50e9)
    spec = load_cluster("dgx_h100", nodes=256)
    tracemalloc.start()
    links = len(build_cluster(spec).links)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1500 * links


@pytest.mark.parametrize("name", one_in(3, catalog.names("cluster")))
def test_a_part_of_a_shipped_node_is_a_node(name: str) -> None:
    """One GPU, two, or all but one: their places and links go with them. NVLink pairs are of even numbers or none."""
    whole = load_cluster(name).kinds[0]
    for count in {1, 2, max(whole.gpus.count - 1, 1)}:
        data = {"name": name, "nodes": 1, "node": {"gpus": {"count": count}}}
        if whole.nvlink.kind == "pairs" and count % 2 and count > 1:
            with pytest.raises(InputError, match=r"even number of GPUs(.|\n)*fix: +nvlink: "):
                load_cluster(data)
        else:
            built = build_cluster(load_cluster(data))
            assert len(built.gpus) == count
            assert len([1 for link in built.links if link.kind == "nvlink"]) <= 2 * len(
                [1 for link in build_cluster(load_cluster(name)).links if link.kind == "nvlink"]
            )
