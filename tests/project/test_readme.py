"""README.md and docs/: commands and Python run, and print what is said that they print; pictures and links exist."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from simulator.cli.app import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Pages with commands to run.
PAGES = "\n".join([README, *(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))])
#: What sets up an environment; the wheel's test covers the packaging.
INSTALLS = {"pip install ."}


class Shown(NamedTuple):
    command: str
    output: list[str]


def blocks(*languages: str) -> list[str]:
    pattern = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
    return re.findall(pattern, PAGES, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[Shown]:
    """Every command, with the output that stands below it."""
    plain = [Shown(line, []) for block in blocks("bash", "sh", "shell") for line in block.splitlines() if line.strip()]
    shown: list[Shown] = []
    for block in blocks("console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                shown.append(Shown(line[2:], []))
            elif line.strip():
                shown[-1].output.append(line)
    return plain + shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the workload file that the README shows, under the name it gives."""
    path = tmp_path_factory.mktemp("readme")
    (block,) = blocks("yaml")
    name = re.match(r"# (\S+\.yaml):", block)
    assert name
    (path / name[1]).write_text(block, encoding="utf-8")
    return path


@pytest.mark.parametrize("shown", [c for c in commands() if c.command not in INSTALLS], ids=lambda shown: shown.command)
def test_every_command_runs_and_prints_what_is_shown(
    shown: Shown, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands run in this process, which has imported everything. The tests of the wheel start a process."""
    program, *arguments = shlex.split(shown.command)
    if [program, *arguments[:2]] == ["python", "-m", "simulator"]:
        program, arguments = "llmsim", arguments[2:]
    assert program == "llmsim", "a command that this test cannot run"
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 0, out + err
    printed = [" ".join(line.split()) for line in out.splitlines()]
    stale = [line for line in shown.output if " ".join(line.split()) not in printed]
    assert not stale, "a page shows what is no longer printed"


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_python_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippet.py").write_text(blocks("python")[number], encoding="utf-8")
    runpy.run_path("snippet.py", run_name="__main__")
    assert capsys.readouterr().out


def test_there_is_python() -> None:
    assert blocks("python")


def test_the_table_of_errors_is_what_was_recorded() -> None:
    recorded = pytest.importorskip("simulator.validation.errors").recorded()
    for suite, errors in recorded.items():
        sizes = [100 * abs(error) for error in errors.values()]
        row = f"| `{suite}` | {len(sizes)} | {sum(sizes) / len(sizes):.1f} % | {max(sizes):.1f} % |"
        assert row in README


def test_the_table_of_commands_is_complete() -> None:
    assert set(re.findall(r"^\| `llmsim (\w+)", README, flags=re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/accuracy.md", "docs/search.md", "docs/sweep.md"]
)
def test_links_into_the_project_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    missing = [
        target for target in targets if "://" not in target and not (ROOT / page).parent.joinpath(target).exists()
    ]
    assert not missing


def test_files_that_the_recipes_name_exist() -> None:
    """CONTRIBUTING.md names the file that each recipe touches."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = [
        name for name in re.findall(r"`((?:simulator|calibration|topologies)/[\w./]+)`", text) if name == name.lower()
    ]
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]


def test_pages_and_pictures_are_named_and_small() -> None:
    for picture in (ROOT / "docs").iterdir():
        assert picture.name in (PAGES if picture.suffix == ".png" else README)
        assert picture.stat().st_size < 200_000
