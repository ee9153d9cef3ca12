"""Limits that keep files and functions small enough to fit in the head."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for folder in ("simulator", "calibration", "benchmarks", "documentation")
    for path in (ROOT / folder).rglob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 400, 60


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    paths = [*FILES, *TESTS]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert not {name: length for name, length in lengths.items() if length > FILE_LINES}


@cache
def definitions() -> dict[str, tuple[ast.Module, list[ast.FunctionDef | ast.ClassDef]]]:
    """Return by path the tree of a file, and its functions and classes."""
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    return {path: (tree, defined_in(tree)) for path, tree in trees.items()}


def defined_in(tree: ast.Module) -> list[ast.FunctionDef | ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def test_no_function_is_longer_than_a_page() -> None:
    lengths = {
        f"{path}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, (_, nodes) in definitions().items()
        for node in nodes
        if isinstance(node, ast.FunctionDef)
    }
    assert not {name: length for name, length in lengths.items() if length > FUNCTION_LINES}


def types(tree: ast.Module, nodes: Iterable[ast.FunctionDef | ast.ClassDef]) -> set[str]:
    """Return the names of classes anywhere, and of types that are given a name at the top or in a branch there."""
    names = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    branches = [node for node in tree.body if isinstance(node, ast.If)]
    for node in [*tree.body, *(inner for branch in branches for inner in (*branch.body, *branch.orelse))]:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            names |= {name} if re.fullmatch(r"_?[A-Z][a-z][A-Za-z]*", name) else set()
    return names


def test_no_name_of_a_type_is_used_twice() -> None:
    names = Counter(name for tree, nodes in definitions().values() for name in types(tree, nodes))
    assert not [name for name, count in names.items() if count > 1]


def test_aliases_are_types_and_constants_are_none() -> None:
    source = "Pair = tuple[int, int]\nLIMIT_s = Most_Bps = 1\nif LIMIT_s:\n    Name = str\nclass Node: ..."
    tree = ast.parse(source)
    assert types(tree, defined_in(tree)) == {"Pair", "Name", "Node"}


@pytest.mark.parametrize("lines", [FILE_LINES, FUNCTION_LINES])
def test_limits_are_those_of_the_contributing_guide(lines: int) -> None:
    assert f"{lines} lines" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_complexity_is_limited_by_ruff_as_the_contributing_guide_says() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    assert "C90" in lint["select"]
    assert f"a complexity of {lint['mccabe']['max-complexity']}" in (ROOT / "CONTRIBUTING.md").read_text(
        encoding="utf-8"
    )
