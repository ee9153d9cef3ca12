"""Docstrings, comments and names read well at first sight: no offence beyond those that are counted here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.prose import offences

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    path for parent in ("simulator", "calibration") for path in (ROOT / parent).iterdir() if list(path.glob("*.py"))
)


#: Offences that are still to be mended, by package. A number may fall, and never rise.
REMAINING: dict[str, int] = {
    "simulator": 10,
    "simulator.engine": 2,
    "simulator.frameworks": 3,
    "simulator.hardware": 1,
    "simulator.losses": 1,
    "simulator.lowering": 19,
    "simulator.models": 66,
    "simulator.output": 1,
    "simulator.program": 2,
}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: f"{path.parent.name}.{path.name}")
def test_texts_and_names_of_a_package(package: Path) -> None:
    listed = [str(offence) for path in sorted(package.rglob("*.py")) for offence in offences(path)]
    assert len(listed) <= REMAINING.get(f"{package.parent.name}.{package.name}", 0), "\n".join(listed)


@pytest.mark.parametrize("parent", ["simulator", "calibration"])
def test_texts_and_names_beside_the_packages(parent: str) -> None:
    listed = [str(offence) for path in sorted((ROOT / parent).glob("*.py")) for offence in offences(path)]
    assert len(listed) <= REMAINING.get(parent, 0), "\n".join(listed)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('"""That it takes to issue an op."""\n', "no subject"),
        (f'"""{"seconds " * 28}in all."""\n', "30 words"),
        ("# A rank keeps what it has until then.\n", "pronoun chain"),
        ("found = 1\n", "empty name"),
        ("def seconds(of_kernel: float) -> float: ...\n", "empty name"),
    ],
)
def test_each_offence_is_seen(source: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    assert [offence.reason for offence in offences(path)] == [reason]
