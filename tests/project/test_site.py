"""The documentation site: generated pages are current, and the site is built with every link leading somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import simulator
from documentation.figures import FRAMEWORK_STEPS, error_figures, framework_figures, with_figures
from documentation.keys import keys_page
from documentation.pages import ROOT, generated
from documentation.tables import table
from simulator.cli.app import COMMANDS
from simulator.commands.schema import schema_of
from simulator.validation.errors import recorded


def test_generated_pages_are_current() -> None:
    """``python -m documentation`` writes stale pages anew."""
    stale = [path.name for path, text in generated().items() if path.read_text(encoding="utf-8") != text]
    assert not stale


def test_a_table_keeps_each_cell_on_its_line() -> None:
    assert table(("a", "b"), [("1 | 2", "x\ny")]) == "| a | b |\n| --- | --- |\n| 1 \\| 2 | x y |\n"


@pytest.mark.parametrize("kind", ["workload", "cluster"])
def test_every_section_that_a_key_leads_to_is_on_the_page(kind: str) -> None:
    page = keys_page(kind)
    sections = {name.lower() for name in re.findall(r"^## (\w+)$", page, flags=re.MULTILINE)}
    assert sections == set(re.findall(r"\]\(#(\w+)\)", page))


@pytest.mark.parametrize("section", ["Parallelism", "Overlap"])
def test_every_key_of_a_layout_is_on_the_page_of_layouts(section: str) -> None:
    page = (ROOT / "docs/reference/layouts.md").read_text(encoding="utf-8")
    before = "overlap." if section == "Overlap" else ""
    keys = [f"{before}{key}" for key in schema_of("workload")["$defs"][section]["properties"] if key != "overlap"]
    assert not [key for key in keys if f"`{key}" not in page]


def test_the_page_of_python_has_every_function_and_the_commands_without_one() -> None:
    page = (ROOT / "docs/how-to/python.md").read_text(encoding="utf-8")
    functions = set(simulator.__all__) & {*COMMANDS, "advise", "share"}
    assert set(re.findall(r"^\| `.+?` \| `simulator\.(\w+)\(", page, flags=re.MULTILINE)) == functions
    (without,) = re.findall(r"^(.*) have no function\.$", page, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", without)) == set(COMMANDS) - functions


def test_every_run_of_others_code_counts_in_one_row_of_a_framework() -> None:
    """The rows of frameworks sum to the suite, and those of Megatron-Core's parts to Megatron-Core."""
    rows = {name: int(figures["rows"]) for name, figures in framework_figures().items()}
    parts = {name: count for name, count in rows.items() if ", " in name}
    assert sum(rows.values()) - sum(parts.values()) == len(recorded()[FRAMEWORK_STEPS])
    assert sum(parts.values()) == rows["megatron_core_local"]


def test_figures_stand_below_the_heads_that_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table may leave columns out, and its words stay; a row of which nothing is recorded is an error."""
    head = "<!-- validation -->\n| suite | largest | what |\n| --- | --- | --- |\n"
    largest = error_figures(recorded()["megatron-2022"].values())["largest"]
    filled = with_figures(f"{head}| `megatron-2022` | old | words |\n")
    assert filled == f"{head}| `megatron-2022` | {largest} | words |\n"
    with pytest.raises(ValueError, match="nothing is recorded of no-such-suite"):
        with_figures(f"{head}| `no-such-suite` | old | words |\n")
    monkeypatch.setattr("documentation.figures.recorded", lambda: recorded() | {"megatron-2022": {}})
    with pytest.raises(ValueError, match="nothing is recorded of megatron-2022"):
        with_figures(f"{head}| `megatron-2022` | old | words |\n")


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strict build fails on links and anchors that lead nowhere. A file that a page links to is on the site."""
    pytest.importorskip("material")
    build, config = pytest.importorskip("mkdocs.commands.build"), pytest.importorskip("mkdocs.config")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert (tmp_path / "how-to" / "fit.html").exists()
    assert (tmp_path / "project" / "simulator" / "validation" / "data" / "own-h200.csv").exists()
