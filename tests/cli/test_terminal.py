"""Output that fits into terminals of any width."""

from __future__ import annotations

import json
import re

import pytest

from calibration import __main__ as calibration
from simulator.cli.app import COMMANDS
from simulator.network.collectives import OPERATIONS
from tests.support.commands import command
from tests.support.grids import one_in


@pytest.mark.parametrize("columns", one_in(2, [80, 100]))
def test_help_fits_into_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is longer than a line, no option is cut in two, no sentence short. Of `collective` every operation is
    followed by its algorithms, on as many lines as that takes."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in COMMANDS:
        for program in ([name, "--help"], ["--help"]):
            assert command(*program) == 0
            lines = capsys.readouterr().out.splitlines()
            assert max(map(len, lines)) <= columns
            assert not [line for line in lines if re.search(r" --[a-z-]*-$", line)]
            assert not [line for line in lines if line.endswith("...") and "[" not in line]
    assert command("collective", "--help") == 0
    shown = capsys.readouterr().out.split("Algorithms: ")[1].split()
    after = {name: shown[shown.index(name) + 1 :] for name in OPERATIONS}
    assert all(set(entry.algorithms) <= {one.rstrip(":") for one in after[name]} for name, entry in OPERATIONS.items())


@pytest.mark.parametrize("name", calibration.COMMANDS)
def test_help_of_calibration_fits_into_the_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        calibration.main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r" --[a-z-]*-$", line)]


@pytest.mark.parametrize("columns", [60, 90])
def test_messages_are_broken_between_words(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors, warnings and what `check` prints; what goes on stands under the first word behind the label. A pipe has
    each on one line, as it was."""
    wrong = ["check", "gpt175b_3d", "--set", "parallelism.tpp=2"]
    legal = ["check", "gpt22b_tp8", "--set", "training.recompute=selective", "--set", "model.attention=flash"]
    said: dict[int, list[str]] = {}
    for width in (columns, 0):
        monkeypatch.setenv("COLUMNS", str(width) if width else "")
        assert (command(*wrong), command(*legal)) == (2, 0)
        captured = capsys.readouterr()
        said[width] = captured.out.splitlines() + captured.err.splitlines()
    assert max(map(len, said[columns])) <= columns < max(map(len, said[0]))
    for label in ("  allowed: ", "  model         ", "warning: "):
        (start,) = [number for number, line in enumerate(said[columns]) if line.startswith(label)][:1]
        goes_on = said[columns][start + 1]
        assert len(goes_on) - len(goes_on.lstrip()) == (2 if label == "warning: " else len(label)), goes_on
    assert " ".join(" ".join(said[columns]).split()) == " ".join(" ".join(said[0]).split())


def test_what_is_printed_has_no_blanks_at_the_ends_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["run", "gpt22b_tp8"],
        ["run", "gpt22b_tp8", "gpt22b_tp8"],
        ["list", "gpus"],
        ["topology", "dgx_h100"],
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "4"],
        ["collective", "--cluster", "dgx_a100", "--op", "all_reduce", "--sizes", "1M:4M"],
        ["validate", "megatron-2022", "--row", "korthikanti-t5-001"],
    ):
        assert command(*arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines
        assert not [line for line in lines if line != line.rstrip()]


def test_links_between_gpus_have_their_own_name_in_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    for cluster, name in (("mi300x", "xgmi"), ("dgx_h100", "nvlink")):
        assert command("topology", cluster) == 0
        shown = {line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith(" node*.gpu")}
        assert command("topology", cluster, "--json", "-") == 0
        links = json.loads(capsys.readouterr().out)["links"]
        listed = {link["kind"] for link in links if link["name"].startswith("node0.gpu")}
        assert shown == listed == {name, "pcie"}


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_narrow_terminal_breaks_no_figure(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes of collectives stand whole in their lines, however narrow; a matrix of 16 devices (6 characters each) is
    shown where it fits, and said to be there where it does not."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert command("collective", "--cluster", "dgx_a100", "--op", "all_reduce", "--sizes", "1M:1G") == 0
    shown = capsys.readouterr().out
    for power in range(20, 31):
        assert f" {2**power:,} " in shown
    assert max(map(len, shown.splitlines())) <= columns
    assert command("topology", "dgx_h100") == 0
    shown = capsys.readouterr().out
    assert ("No room for how 16 devices are joined" in shown) is (columns < 120)
    assert ("gpu7  NV" in shown) is (columns == 120)
    assert command("topology", "dgx2_v100") == 0
    shown = " ".join(capsys.readouterr().out.split())
    said = "No room for how 24 devices are joined: a wide terminal shows it of up to 24."
    assert said in shown
    monkeypatch.setenv("COLUMNS", "900")
    assert command("topology", "gb200_nvl72") == 0
    assert "No room for how 144 devices" in capsys.readouterr().out


@pytest.mark.parametrize("name", calibration.COMMANDS)
def test_calibration_is_a_command_too(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help is that of `python -m calibration`, but for who is called; so is what it refuses."""
    assert command("calibrate", name, "--help") == 0
    shown = capsys.readouterr().out
    assert f"  llmsim calibrate {name} " in shown
    with pytest.raises(SystemExit):
        calibration.main([name, "--help"])
    usual = capsys.readouterr().out.replace("python -m calibration", "llmsim calibrate")
    assert "".join(shown.split()) == "".join(usual.split())
    assert command("calibrate", name, "--no-such-option") == 2
    assert "error: " in capsys.readouterr().err
