"""Rules that the files of the tests keep to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_helpers_stand_in_support(path: Path) -> None:
    """No file imports another's tests: what several share stands in tests/support."""
    assert not re.findall(r"(?m)^\s*(?:from|import) tests\.(?:\w+\.)*test_\w+", path.read_text(encoding="utf-8"))
