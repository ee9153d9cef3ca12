"""The documentation site: generated pages are current, and the site is built with every link leading somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from documentation.keys import keys_page
from documentation.pages import ROOT, generated
from documentation.tables import table


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


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strict build fails on links and anchors that lead nowhere. A file that a page links to is on the site."""
    pytest.importorskip("material")
    build, config = pytest.importorskip("mkdocs.commands.build"), pytest.importorskip("mkdocs.config")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert (tmp_path / "how-to" / "fit.html").exists()
    assert (tmp_path / "project" / "simulator" / "validation" / "data" / "own-h200.csv").exists()
