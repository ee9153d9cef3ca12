"""The wheel carries the shipped files, and finds them by name from anywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import simulator
from simulator.config import catalog
from simulator.engine.compiled.build import LIBRARY
from simulator.validation import read_rows
from tests.support.clean_install import check_wheel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_topologies_workloads_presets_and_profiles(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    for kind, folder in (
        ("workload", "simulator/shipped/workloads"),
        ("cluster", "simulator/shipped/topologies"),
        ("profile", "calibration/profiles"),
        ("stack", "calibration/stacks"),
    ):
        assert {f"{folder}/{name}.yaml" for name in catalog.names(kind)} <= held
    assert {"simulator/config/presets.yaml", "simulator/cli/app.py"} <= held
    assert not [name for name in held if name.startswith(("tests/", "notebooks/"))]
    suites = ROOT / "simulator" / "validation" / "data"
    assert {path.relative_to(ROOT).as_posix() for path in suites.iterdir()} <= held
    for row in read_rows(suites / "own-h200.csv"):
        assert Path(row["workload"]).resolve().relative_to(ROOT).as_posix() in held


def test_the_wheel_holds_the_event_loop_and_is_of_this_platform(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert f"simulator/engine/compiled/{LIBRARY}" in archive.namelist()
    python, abi, platform = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none")
    assert platform != "any"


def test_without_a_compiler_the_wheel_is_of_any_platform(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = {**os.environ, "CC": str(tmp_path / "nothing")}
    done = subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True, env=environment)
    assert "the compiled engine is left out" in done.stdout + done.stderr
    (built,) = tmp_path.glob("*.whl")
    assert built.stem.endswith("py3-none-any")
    with zipfile.ZipFile(built) as archive:
        assert f"simulator/engine/compiled/{LIBRARY}" not in archive.namelist()


def test_a_command_of_the_wheel_finds_its_files(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    # A path entry ahead of the checkout's: what is imported is the wheel.
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import simulator; print(simulator.__file__);"
        "from simulator.cli.app import main; main(['check', 'gpt175b_3d'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site") in done.stdout
    assert "192 x dgx_a100" in done.stdout


@pytest.mark.slow
def test_the_wheel_runs_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    assert check_wheel(wheel, tmp_path) == []


def test_versions_agree(wheel: Path) -> None:
    """The newest release of the changelog is the version of the package, which the wheel has from there; releases stand
    in order."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\]", text, flags=re.MULTILINE)
    numbers = [tuple(map(int, release)) for release in releases]
    assert numbers == sorted(set(numbers), reverse=True)
    assert ".".join(releases[0]) == simulator.__version__ == wheel.name.split("-")[1]


def test_the_container_has_a_python_and_a_command_of_the_project() -> None:
    """Ten lines, whose Python is new enough."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 10
    least = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    pythons = [tuple(map(int, version.split("."))) for version in re.findall(r"python:([\d.]+)-slim", "\n".join(lines))]
    assert pythons
    assert min(pythons) >= least
    (command,) = re.findall(r'^ENTRYPOINT \["(\S+)"\]$', "\n".join(lines), flags=re.MULTILINE)
    assert command in project["scripts"]
