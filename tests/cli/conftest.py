"""Fixtures of the tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.commands import LEGAL


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """A file of a legal job."""
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(LEGAL))
    return path
