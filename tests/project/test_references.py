"""Names of this project's modules, and of what is in them, that docstrings, comments and documents mention."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("simulator", "tests", "calibration", "documentation", "docs")
REFERENCE = re.compile(r"`((?:simulator|tests|calibration|documentation)(?:\.\w+)+)`")


def exists(name: str) -> bool:
    """Return whether ``name`` is a module, or a chain of attributes of one; fields of a class are attributes."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        module = ".".join(words[:length])
        try:
            if find_spec(module) is None:
                continue
            if length == len(words):  # some modules need packages that tests do without
                return True
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for word in words[length:]:
            if not hasattr(found, word):
                return word in getattr(found, "__annotations__", {})
            found = getattr(found, word)
        return True
    return False


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_mentioned_is_there(folder: str) -> None:
    files = [path for kind in ("py", "c", "h", "md") for path in sorted((ROOT / folder).rglob(f"*.{kind}"))]
    assert files
    mentioned = {(path, name) for path in files for name in REFERENCE.findall(path.read_text(encoding="utf-8"))}
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(mentioned) if not exists(name)] == []


def test_what_is_not_there_is_found() -> None:
    assert exists("simulator.engine.placement.RankKind.speed_scale")
    assert not exists("simulator.engine.placement.RankKind.weight")
    assert not exists("simulator.cluster.cluster.Gpu")
