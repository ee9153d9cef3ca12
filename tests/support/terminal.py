"""Texts as a terminal shows them."""

from __future__ import annotations

import io

from rich.console import Console


def printed(renderable: object, width: int = 100) -> str:
    """Return the text of a table or panel on a terminal of ``width`` columns."""
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
