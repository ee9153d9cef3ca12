"""``trace show``, ``compare`` and ``replay``: what they print and write, and how bad input ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import command
from tests.support.kineto import KinetoWriter, save_step


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return save_step(tmp_path)


def test_show_prints_tables_and_writes_files(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, out = tmp_path / "streams.png", tmp_path / "out.json"
    assert command("trace", "show", *files, "--gantt", picture, "--json", out, "--top", 2) == 0
    printed = capsys.readouterr().out
    assert "Where the GPU's time goes" in printed
    assert "comes last" in printed
    assert picture.read_bytes()[:4] == b"\x89PNG"
    result = json.loads(out.read_text())
    assert (result["command"], result["warnings"], len(result["kernels"])) == ("trace show", [], 2)
    assert [rank["step_s"] for rank in result["ranks"]] == pytest.approx([8.92e-3] * 2)


def test_compare_takes_a_workload_or_a_trace(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("trace", "compare", *files, "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in result["classes"]} == {"matmul", "attention", "memory", "optimizer", "communication"}
    small = ("--set", "model.layers=2", "--set", "training.recompute=none")
    assert command("trace", "compare", "llama3_8b_dgx_h100", files[0].parent, *small) == 0
    shown, said = capsys.readouterr()
    assert "llama3_8b_dgx_h100 (simulated)" in shown
    assert "layers or micro-batches differ" in said
    assert "launches of" in shown
    assert command("trace", "compare", *files, "--set", "model.layers=2") == 2


def test_replay_prints_what_a_change_brings(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A class and another cluster at once: the all-reduce takes three times as long as what the cluster makes of it."""
    links = ("--recorded-cluster", "dgx_h100", "--cluster", "dgx_h100")
    assert command("trace", "replay", *files, "--json", "-", "--scale", "communication=3", *links) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["error"] == pytest.approx(0, abs=1e-9)
    assert result["changed"]["step_s"] == pytest.approx(8.92e-3 + 2e-3)
    faster = ("--recorded-cluster", "dgx_h100", "--set", "node.nvlink.bandwidth_Bps=900e9")
    assert command("trace", "replay", *files, "--json", "-", *faster) == 0
    twice_s = json.loads(capsys.readouterr().out)["changed"]["step_s"]
    assert 8.92e-3 - 0.5e-3 < twice_s < 8.92e-3  # at most half of the all-reduce's 1 ms
    assert command("trace", "replay", *files) == 0
    assert "changed" not in capsys.readouterr().out


def test_options_without_an_effect_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A class without kernels is named, as is hiding communication where there is none. A host that the trace does not
    show cannot be changed."""
    trace = KinetoWriter()
    trace.kernel("k", 7, 0, 10, 1)
    file = trace.save(tmp_path / "trace.json")
    assert command("trace", "replay", file, "--scale", "hand-over=5", "--overlap", "full") == 0
    told = capsys.readouterr()
    assert "--scale hand-over has no effect: no kernel is of this class" in told.err
    assert "--overlap full has no effect: no kernel communicates" in told.err
    assert command("trace", "replay", file, "--host", "2") == 2
    assert "--host: the trace does not tell which call launched which kernel" in capsys.readouterr().err


def test_rows_have_a_unit_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel of 2 ms in a step of 3 s is no 0.00 s; what stays as it was has neither -0.0 nor -0.00 %."""
    trace = KinetoWriter()
    for name, start, length in (("gemm", 0, 3_000_000), ("copy", 3_000_000, 2000), ("nccl", 3_002_000, 100)):
        trace.kernel(name, 7, start, length, 1)
    file = trace.save(tmp_path / "trace.json")
    assert command("trace", "compare", file, file) == 0
    compared = capsys.readouterr().out
    assert command("trace", "replay", file, "--scale", "memory=1") == 0
    replayed = capsys.readouterr().out
    for printed in (compared, replayed):
        assert "2.00 ms" in printed
        assert "3.00 s" in printed
        assert "100.00 us" in printed
        assert "-0.0" not in printed


def test_the_page_names_the_keys_of_the_output(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of the JSON output, and of the sides of a comparison and a replay, is in the command's row."""
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/traces.md").read_text()
    for action in ("show", "compare", "replay"):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{action}` |")]
        assert command("trace", action, *files, "--json", "-") == 0
        result = json.loads(capsys.readouterr().out)
        sides = [*result.get("sides", []), *result.get("ranks", []), result.get("played")]
        keys = {key for part in (result, *sides) if isinstance(part, dict) for key in part}
        told = set(re.findall(r"`(\w+)`", row))
        assert keys - told - {"schema_version", "command", "warnings"} == set(), action


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scale", "matmuls=2"], "--scale: is no class of kernels"),
        (["--scale", "matmul=-1"], "--scale matmul: is no factor"),
        (["--scale", "matmul"], "--scale: is not KEY=VALUE"),
        (["--rank", "7=2"], "--rank: is no rank of the trace"),
        (["--rank", "one=2"], "--rank: is no rank"),
        (["--scale", "gemm=2"], "--scale matmul=2"),
        (["--scale", "mtmul=2"], "--scale matmul=2"),
        (["--scale", "matmul=2", "--scale", "matmul=3"], "--scale matmul: is given twice"),
        (["--rank", "0=2", "--rank", "00=3"], "--rank 0: is given twice"),
        (["--host", "nan"], "--host: is no factor"),
        (["--overlap", "some"], "--overlap: is no way to overlap"),
        (["--cluster", "dgx_h100"], "--cluster: needs --recorded-cluster"),
        (["--set", "nodes=4"], "--set: needs --recorded-cluster"),
        (["--recorded-cluster", "dgx_h100"], "--recorded-cluster: needs --cluster or --set"),
        (["--recorded-cluster", "dgx_h100", "--set", "node.nic.count=4"], "node.nic"),
        (["--recorded-cluster", "dgx_h9", "--cluster", "dgx_h100"], "--recorded-cluster: no cluster file of this name"),
        (["--recorded-cluster", "dgx_h100", "--cluster", "dgx_h9"], "--cluster: name: no cluster file of this name"),
        (
            ["--recorded-cluster", "dgx_h100", "--cluster", "one_gpu"],
            "--cluster: has 1 GPU and no network cards, and the trace 2 ranks",
        ),
        (["--recorded-gpu", "h100-sxm-80gb"], "--recorded-gpu: has no meaning without --gpu"),
        (["--gpu", "h9000"], "--gpu: no profile file of this name"),
        (["--gpu", "h200-sxm-141gb", "--recorded-gpu", "h9"], "--recorded-gpu: no profile file of this name"),
        (["--step", "9"], "--step: there is no such step"),
    ],
)
def test_bad_options_end_in_a_sentence(
    files: list[Path], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("trace", "replay", *files, *options) == 2
    assert message in capsys.readouterr().err


def test_bad_files_end_in_a_sentence(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(files[0].read_bytes()[:-200])
    for action in (["show"], ["replay"], ["compare", str(files[1])]):
        assert command("trace", *action, cut) == 2
        assert "cut.json.gz: is cut off or damaged" in capsys.readouterr().err
    assert command("trace", "show", files[0], "--json", files[0]) == 2
    assert "is a file that this command reads" in capsys.readouterr().err
