"""What a person sees: results on standard output, warnings and progress on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Characters per line where the output is no terminal: wide enough that no cell of a table is cut.
PIPE_WIDTH = 200


def console() -> Console:
    """Standard output. Text is printed as it is: names of the user may hold brackets."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> Table:
    """A table of ``rows``, whose keys are the columns; numbers stand on the right, decimal points below each other."""
    from rich import box
    from rich.table import Table

    result = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for name in rows[0] if rows else ():
        numeric = all(isinstance(row[name], int | float) for row in rows)
        result.add_column(name, justify="right" if numeric else "left", overflow="fold")
    decimals = {name: max(_decimals(row[name]) for row in rows) for name in (rows[0] if rows else ())}
    for row in rows:
        result.add_row(*(f"{v:,.{decimals[name]}f}" if isinstance(v, float) else _plain(v) for name, v in row.items()))
    return result


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _decimals(value: object) -> int:
    return len(str(value).partition(".")[2]) if isinstance(value, float) else 0


def warn(warnings: Iterable[str]) -> None:
    """Each warning as a line on standard error."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """A spinner on standard error while the block runs, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)):
        yield
