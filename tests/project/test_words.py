"""Docstrings, comments and names read well at first sight: no offence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.prose import offences

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    path for parent in ("simulator", "calibration") for path in (ROOT / parent).iterdir() if list(path.rglob("*.py"))
)


#: Names that stay: an argument of `InputError` is called as its message prints it, beside "allowed" and "fix".
PRINTED = {("simulator/errors.py", "found")}


def listed(paths: Iterable[Path]) -> list[str]:
    """Return the offences of files, but for names in `PRINTED`."""
    return [
        str(offence)
        for path in sorted(paths)
        for offence in offences(path)
        if (str(path.relative_to(ROOT)), offence.text) not in PRINTED
    ]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: f"{path.parent.name}.{path.name}")
def test_texts_and_names_of_a_package(package: Path) -> None:
    assert not listed(package.rglob("*.py"))


@pytest.mark.parametrize("parent", ["simulator", "calibration", "benchmarks", "documentation"])
def test_texts_and_names_beside_the_packages(parent: str) -> None:
    assert not listed((ROOT / parent).glob("*.py"))


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
