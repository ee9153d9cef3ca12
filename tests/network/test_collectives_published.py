"""Collectives near published measurements, and the command that shows them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from simulator.cli.app import main
from simulator.cluster import Cluster, build_cluster
from simulator.config.cluster import load_cluster
from simulator.config.stack import load_stack
from simulator.costs import Costs
from simulator.network.collectives import (
    OPERATIONS,
    bus_factor,
    idle_seconds,
    plan,
)
from simulator.program import CollectiveKind
from simulator.units import GB, GiB, MiB, us
from tests.support.collectives import A100, H100, NODE, TWO


def busbw(op: str, size: float, ranks: Sequence[int], cluster: Cluster, costs: Costs, algorithm: str = "auto") -> float:
    operation = plan(op, size, ranks, cluster, costs, algorithm)
    return size / idle_seconds(operation, cluster, costs) * bus_factor(op, len(ranks)) / GB


@pytest.mark.parametrize(
    ("op", "n", "size", "published"),
    [
        ("all_reduce", 8, 16 * GiB, 234.9),  # stas00/ml-engineering, network/README.md
        ("all_reduce", 8, GiB, 229.4),  # VIA-Research/vTrain, trace/a100
        ("all_reduce", 2, GiB, 197.3),
        ("all_reduce", 4, 512 * MiB, 216.7),  # ai-dynamo/aiconfigurator, a100_sxm, NCCL 2.27.3
        ("all_gather", 8, 512 * MiB, 205.3),
        ("reduce_scatter", 8, 512 * MiB, 212.8),
        ("all_to_all", 8, 512 * MiB, 203.1),
        ("all_reduce", 8, 64 * MiB, 171.5),  # stas00/ml-engineering; an older NCCL than was fitted
    ],
)
def test_a100_nvlink_is_near_published_measurements(op: str, n: int, size: float, published: float) -> None:
    assert busbw(op, size, range(n), NODE, A100) == pytest.approx(published, rel=0.12 if size == 64 * MiB else 0.08)


def test_infiniband_is_near_published_measurements() -> None:
    """One HDR NIC: 24 GB/s (NVIDIA/nccl issue 1048), and 19 us for 8 bytes (nccl-tests issue 150). NDR: 46 to 48 GB/s a
    NIC (nccl-tests issue 290)."""
    assert busbw("all_reduce", 4 * GiB, [0, 8], TWO, A100, "ring") == pytest.approx(24, rel=0.01)
    assert idle_seconds(plan("all_reduce", 8, [0, 8], TWO, A100), TWO, A100) == pytest.approx(19 * us, rel=0.03)
    two = build_cluster(load_cluster("dgx_h100"), 2)
    assert busbw("all_reduce", 16 * GiB, range(16), two, H100, "ring") / 8 == pytest.approx(47, rel=0.01)


def command(*arguments: str) -> int:
    """The exit status of one command."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_table_of_nccl_tests(capsys: pytest.CaptureFixture[str]) -> None:
    """algbw is size over time, busbw 2 (n-1)/n of that for an all-reduce; rows double from 8 bytes to 16 GiB."""
    assert (
        command(
            "collective",
            "--cluster",
            "dgx_a100",
            "--nodes",
            "2",
            "--op",
            "all_reduce",
            "--sizes",
            "8:16G",
            "--json",
            "-",
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert [row["size_bytes"] for row in result["rows"]] == [2**exponent for exponent in range(3, 35)]
    for row in result["rows"]:
        assert set(row) == {"size_bytes", "algorithm", "protocol", "channels", "time_s", "algbw_Bps", "busbw_Bps"}
        assert row["algbw_Bps"] * row["time_s"] == pytest.approx(row["size_bytes"])
        assert row["busbw_Bps"] == pytest.approx(row["algbw_Bps"] * 30 / 16)
    assert command("collective", "--cluster", "dgx_a100", "--op", "all_gather", "--ranks", "0-3", "--sizes", "1G") == 0
    shown = capsys.readouterr().out
    assert "1,073,741,824" in shown
    assert "all_gather of 4 GPUs on 1 x dgx_a100" in shown


def origins(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, list[dict[str, str | None]]]:
    """Return what ``collective`` says of an all-reduce's constants: under its table, and in its JSON."""
    words = ["collective", "--op", "all_reduce", "--sizes", "1G", *arguments]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        assert command(*words, "--json", file.name) == 0
        links = json.loads(Path(file.name).read_text(encoding="utf-8"))["links"]
    lines = capsys.readouterr().out.splitlines()
    return next(line for line in lines if line.startswith("Constants of links")), links


def test_the_table_says_what_the_constants_of_its_links_rest_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The table names links that are crossed and no others.

    They are those of a GPU that was measured, of one that is completed from another's profile, and of a stack, whose
    source is its own.
    """
    line, links = origins(capsys, "--cluster", "dgx_h100")
    assert line == "Constants of links on h100-sxm-80gb: nvlink measured."
    assert [(link["link"], link["kind"], link["like"]) for link in links] == [("nvlink", "measured", None)]
    line, links = origins(capsys, "--cluster", "gb200_nvl72", "--nodes", "2")
    assert line == (
        "Constants of links on gb200-186gb: nvlink published, pcie assumed, infiniband assumed; "
        "what its profile lacks is as on h100-sxm-80gb."
    )
    assert {(link["gpu"], link["like"]) for link in links} == {("gb200-186gb", "h100-sxm-80gb")}
    assert "Azure" in str(links[0]["source"])
    assert str(links[1]["source"]).startswith("profile h100-sxm-80gb of")
    line, (link,) = origins(capsys, "--cluster", "gb200_nvl72", "--stack", "gb200-coreweave")
    assert line == "Constants of links on gb200-186gb: nvlink published."
    assert (link["like"], link["source"]) == (None, load_stack("gb200-coreweave").source)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--op", "redoce"], "unknown operation"),
        (["--op", "all_gather", "--algorithm", "tree"], "auto, ring, nvls"),
        (["--op", "all_reduce", "--sizes", "16:8"], "--sizes"),
        (["--op", "all_reduce", "--sizes", "0"], "--sizes"),
        (["--op", "all_reduce", "--sizes", "8:64:1"], "--sizes"),
        (["--op", "all_reduce", "--ranks", "0,99"], "--ranks"),
        (["--op", "all_reduce", "--ranks", "3"], "at least two"),
        (["--op", "barrier", "--sizes", "8"], "no size"),
        (["--op", "all_reduce", "--calibration", "nothing"], "nothing"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("collective", "--cluster", "dgx_a100", *arguments) == 2
    output = capsys.readouterr()
    assert told in output.err
    assert not output.out


def test_programs_know_the_same_operations() -> None:
    """A program may not import the network; its list of collectives is the registry's, less the transfer."""
    assert set(CollectiveKind) == set(OPERATIONS) - {"send"}
