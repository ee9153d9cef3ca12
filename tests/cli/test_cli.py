"""The command line's frame: exit status, messages, output files, and no traceback ever."""

from __future__ import annotations

from pathlib import Path

import pytest

import simulator
from simulator.cli.app import COMMANDS
from simulator.cli.options import parse_ranks
from simulator.errors import InputError
from tests.support.commands import command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "absent.yaml"], "no such file"),
        (["check", "gpt175b"], "workload gpt175b_3d"),
        (["check"], "WORKLOAD"),
        (["check", "gpt175b_3d", "--set", "parallelism.tp"], "KEY=VALUE"),
        (["check", "gpt175b_3d", "--set", "parallelism.tpp=2"], "tp instead of tpp"),
        (["check", "gpt175b_3d", "--set", "parallelism.pp=[1"], "--set parallelism.pp"),
        (["check", "gpt175b_3d", "--json", "/nowhere/x.json"], "mkdir -p /nowhere"),
        (["check", "gpt175b_3d", "--json", "/tmp"], "is a directory"),
        (["run", "gpt175b_3d", "--json", f"{__file__}/x.json"], "test_cli.py is a file, and no directory"),
        (["run", "gpt175b_3d", "--trace-dir", f"{__file__}/x"], "test_cli.py is a file, and no directory"),
        (["check", "gpt175b_3d", "--set", "calibration=h100-sxm-80gb"], "--set: calibration: "),
        (
            ["collective", "--cluster", "dgx_a100", "--op", "all_reduce", "--calibration", "h100-sxm-80gb"],
            "another GPU",
        ),
        (["run", "gpt175b_3d", "--gantt", "x.bmp"], "ends in .png, a name that ends in .svg"),
        (["run", "gpt175b_3d", "--gantt", ".png"], "a name that ends in .png"),
        (["run", "gpt175b_3d", "--memory", "x.bmp"], "ends in .png, a name that ends in .svg"),
        (["topology", "dgx_a100", "--plot", "-"], "needs a file"),
        (["topology", "dgx_a100", "--nodes", "0"], "--nodes: nodes: "),
        (["run", "gpt175b_3d", "--json", "."], "needs the name of a file"),
        (["run", "gpt175b_3d", "--json", ""], "error: --json: has no value\n  fix:     --json FILE, or leave it out"),
        (["run", "gpt175b_3d", "--trace-dir", ""], "--trace-dir: has no value"),
        (["run", "gpt175b_3d", "--chakra="], "--chakra: has no value"),
        (["run", "gpt175b_3d", "--json", "a.json", "--json=b.json"], "--json: is given twice\n  found:   'b.json'"),
        (["trace", "show", "x", "--step", "1", "--step", "2"], "--step: is given twice"),
        (["run", "gpt175b_3d", "--json", "x" * 5000], "--json: cannot be a file: File name too long"),
        (["run", "gpt175b_3d", "--trace", "x/" * 2500], "--trace: cannot be a file: File name too long"),
        (["run", "x" * 5000], "cannot be a file: File name too long"),
        (["run", "~nosuchuser/x.yaml"], "cannot be a file: Could not determine home directory"),
        (["topology", "~nosuchuser/x.yaml"], "cannot be a file"),
        (["check", "gpt175b_3d", "--set", "calibration=~nosuchuser/x.yaml"], "--set: calibration: cannot be a file"),
        (["check", "gpt175b_3d", "--set", "cluster=~nosuchuser/x.yaml"], "--set: cluster: cannot be a file"),
        (["check", "gpt175b_3d", "--set", "model={hf_config: ~nosuchuser/x}"], "--set: model.hf_config: cannot be"),
        (["run", "gpt175b_3d", "--trace", "x.PNG"], "--trace: has the ending of another kind of file"),
        (["run", "gpt175b_3d", "--json", "x.html"], "allowed: .json, or an ending of your own"),
        (["search", "gpt22b_tp8", "--gpus", "8", "--out", "x.csv"], "allowed: .db, or an ending of your own"),
        (["plan", "gpt22b_tp8", "--gpus", "8", "--out", "x.yaml"], "allowed: .db, or an ending of your own"),
        (["run", "gpt175b_3d", "--trace", "-"], "needs a file"),
        (["run", "gpt175b_3d", "--trace-ranks", "all"], "--trace FILE"),
        (["run", "gpt175b_3d", "--trace", "t.json", "--trace-ranks", "0-9999"], "0 to 1535"),
        (["run", "gpt175b_3d", "--trace", "t.json", "--trace-ranks", "3-1"], "0-7,16"),
        (["run", "gpt175b_3d", "--trace", "same.json", "--json", "same.json"], "is the file of"),
        (["run", "gpt175b_3d", "gpt22b_tp8", "--trace", "t.json"], "shows one workload"),
        (["run", "gpt175b_3d", "--kineto", "x.json"], "--kineto"),
        (["run", "gpt175b_3d", "--trace-dir", "missing/traces"], "mkdir -p missing"),
        (["run", "gpt175b_3d", "gpt22b_tp8", "--trace-dir", "."], "shows one workload"),
        (["runn"], "run"),
        (["list", "modelz"], "fix:     models"),
        (["check", "gpt175b_3d", "--set", "parallelism.schedule=1b1f"], "fix:     schedule: 1f1b"),
        (["check", "--schema", "cluste"], "allowed: workload, cluster"),
        ([], "Commands"),
    ],
)
def test_bad_input_is_status_2_with_one_message(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == 2
    out, err = capsys.readouterr()
    assert words in out + err
    assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\x89PNG\x00", b"a: [", b"a: 1\na: 2", b"- 1", b"model: {layers: 1}"])
def test_a_bad_file_is_status_2_and_is_named(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    for name in ("check", "run"):
        assert command(name, path) == 2
        assert str(path) in capsys.readouterr().err


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert command(name, "--help") == 0
        assert f"llmsim {name} " in capsys.readouterr().out


def test_control_characters_are_shown_and_not_sent(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", workload, "--set", "a\x1b[31m=1") == 2
    assert "a\\x1b[31m" in capsys.readouterr().err


def test_ranks() -> None:
    assert parse_ranks("5, 0-2,1", 6, "--ranks") == [0, 1, 2, 5]
    assert parse_ranks("all", 4, "--ranks") == [0, 1, 2, 3]
    for text in ("", "1,", "-1", "a", "1-", "0-6", "2-1", "9" * 30):
        with pytest.raises(InputError, match="--ranks"):
            parse_ranks(text, 6, "--ranks")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out == f"llmsim {simulator.__version__}, compiled engine\n"
