"""Who imports whom: the table in DESIGN.md, held against the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "simulator"
#: What every package may import without the table saying so.
FREE = {
    "units",
    "quantities",
    "bounds",
    "errors",
    "encodings",
    "garbage",
    "input_files",
    "arrays",
    "recent",
    "same_objects",
}
#: Third-party package -> the packages here that may import it.
ONLY = {
    "simpy": {"engine", "network"},
    "pydantic": {"config"},
    "matplotlib": {"output"},
    "networkx": {"cluster", "network", "engine", "output"},
    "bokeh": {"output"},
    "jinja2": {"output"},
    "perfetto": {"output"},
    "google": {"traces"},
    "typer": {"cli"},
    "ray": {"sweeping"},
}


def table() -> dict[str, set[str]]:
    """Package -> what it may import, in the order of the rows."""
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    may: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`.*?) \|.*\| (.*?) \|$", text, flags=re.MULTILINE):
        names = re.findall(r"`([\w.]+)`", row[0])
        words = {word.strip(" `") for word in row[1].split(",")}
        allowed = set(may) if words == {"everything above"} else words - {"nothing"}
        may |= dict.fromkeys(names, allowed)
    return may


MAY = table()


def package_of(module: str) -> str:
    """The row that a module of `simulator` belongs to; the package itself hands out what `api` has."""
    parts = module.split(".")[1:]
    if ".".join(parts[:2]) in MAY:
        return ".".join(parts[:2])
    return parts[0] if parts else "api"


def imports(path: Path, *, annotations: bool = False) -> tuple[str, ...]:
    """Modules that a file imports, anywhere in it; those for ``annotations`` alone only where asked for."""
    anyway, for_annotations = imports_by_use(path)
    return anyway + (for_annotations if annotations else ())


@cache
def imports_by_use(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules that a file imports in any case, and for annotations alone."""
    uses: tuple[list[str], list[str]] = [], []
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        typed = isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
        uses[typed].extend(name for node in ast.walk(statement) for name in names_of(node, path))
    return tuple(uses[False]), tuple(uses[True])


def names_of(node: ast.AST, path: Path) -> Iterator[str]:
    """Modules that one statement of the file at ``path`` imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, f"{path}: a relative import"
        for alias in node.names:
            inside = ROOT.joinpath(*f"{node.module}.{alias.name}".split("."))
            is_module = inside.is_dir() or inside.with_suffix(".py").is_file()
            yield f"{node.module}.{alias.name}" if is_module else str(node.module)


@cache
def sources() -> dict[Path, str]:
    """File -> its package; the two files that only hand over (`__init__`, `__main__`) are left out."""
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or "__" not in path.name]
    return {path: package_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in files}


def test_the_table_knows_every_package_and_nothing_else() -> None:
    assert set(sources().values()) == set(MAY)


def test_a_package_imports_only_what_stands_above_it() -> None:
    rows = list(MAY)
    for name, allowed in MAY.items():
        assert allowed <= set(rows[: rows.index(name)]), f"{name} is above what it imports"


@pytest.mark.parametrize("package", MAY)
def test_packages_import_what_the_table_says(package: str) -> None:
    imported_from = {
        imported: path
        for path, owner in sources().items()
        if owner == package
        for module in imports(path)
        if module.split(".")[0] == "simulator" and (imported := package_of(module)) != package
    }
    forbidden = {imported: str(path) for imported, path in imported_from.items() if imported not in MAY[package] | FREE}
    assert not forbidden


@pytest.mark.parametrize("library", ONLY)
def test_libraries_stay_where_they_belong(library: str) -> None:
    users = {
        owner for path, owner in sources().items() if any(module.split(".")[0] == library for module in imports(path))
    }
    assert users <= ONLY[library]


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Modules that import each other, directly or not: strongly connected components of several modules."""
    edges = [(module, imported) for module, all_imported in graph.items() for imported in all_imported]
    return [circle for circle in nx.strongly_connected_components(nx.DiGraph(edges)) if len(circle) > 1]


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Imports for annotations count, and those inside functions: who reads one file of a circle has to read all."""
    folders = (PACKAGE, *(ROOT / name for name in ("calibration", "benchmarks", "documentation")))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {name: set(imports(path, annotations=True)) & paths.keys() - {name} for name, path in paths.items()}
    assert not circles(graph)


def test_a_circle_of_three_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [{"a", "b", "c"}]
