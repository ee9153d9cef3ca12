"""Files of the command line that are links to themselves, or have no end."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.cli import app


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command that ends with exit status 2 says."""
    with pytest.raises(SystemExit) as done:
        app.main(arguments)
    assert done.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    path = tmp_path / "loop.csv"
    path.symlink_to(path)
    return path


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_an_output_that_links_to_itself_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "loop.json"
    path.symlink_to(path)
    assert "is a symbolic link to itself" in _refused(["run", "gpt3_175b_256", option, str(path)], capsys)
    assert path.is_symlink()


def test_a_schedule_that_links_to_itself_is_refused(loop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a symbolic link to itself" in _refused(["schedule", str(loop)], capsys)


def test_a_table_that_links_to_itself_is_refused(loop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "symbolic link" in _refused(["validate", "--rows", str(loop)], capsys)


def test_a_table_without_an_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """/dev/zero never ends: no more than 10 MB of it are read, as of every input."""
    assert "is too large for an input file" in _refused(["validate", "--rows", "/dev/zero"], capsys)


def test_a_schedule_without_an_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "endless.csv"
    path.symlink_to("/dev/zero")
    assert "is too large for an input file" in _refused(["schedule", str(path)], capsys)
