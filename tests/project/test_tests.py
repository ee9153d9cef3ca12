"""Rules that the files of the tests keep to."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_helpers_stand_in_support() -> None:
    """No file imports another's tests: what several share stands in tests/support."""
    imports = re.compile(r"(?m)^\s*(?:from|import) tests\.(?:\w+\.)*test_\w+")
    paths = sorted(TESTS.rglob("*.py"))
    assert len(paths) > 100
    assert not [str(path) for path in paths if imports.search(path.read_text(encoding="utf-8"))]
