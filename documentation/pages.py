"""All generated text by the file that holds it."""

from __future__ import annotations

from pathlib import Path

from documentation.commands import commands_page
from documentation.figures import with_figures
from documentation.keys import keys_page

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
#: Files with tables of recorded errors or steps.
WITH_FIGURES = tuple(
    ROOT / page for page in ("README.md", "docs/accuracy.md", "docs/frameworks.md", "docs/how-to/experts.md")
)


def generated() -> dict[Path, str]:
    """Return what each generated file should hold."""
    return {
        REFERENCE / "commands.md": commands_page(),
        REFERENCE / "workload.md": keys_page("workload"),
        REFERENCE / "cluster.md": keys_page("cluster"),
        **{path: with_figures(path.read_text(encoding="utf-8")) for path in WITH_FIGURES},
    }
