"""What a person sees: results on standard output, warnings and progress on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

T = TypeVar("T")
#: Characters per line where the output is no terminal and COLUMNS is not set: wide enough that no cell is cut.
PIPE_WIDTH = 1000
#: Cells longer than this and of several words may be folded.
_PROSE = 20


def console() -> Console:
    """Standard output. Text is printed as it is: names of the user may hold brackets."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> Table:
    """A table of ``rows``, whose keys are the columns; numbers stand on the right, decimal points below each other, and
    are never folded."""
    from rich import box
    from rich.table import Table

    result = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for name in rows[0] if rows else ():
        numeric = all(isinstance(row[name], int | float) for row in rows)
        if numeric:
            result.add_column(name.replace(" (", "\n("), justify="right", no_wrap=True)
        else:
            result.add_column(name, overflow="fold")
    decimals = {name: max(_decimals(row[name]) for row in rows) for name in (rows[0] if rows else ())}
    for row in rows:
        result.add_row(*(f"{v:,.{decimals[name]}f}" if isinstance(v, float) else _plain(v) for name, v in row.items()))
    return result


def wide_table(rows: Sequence[Mapping[str, Any]], width: int) -> tuple[Table, list[str]]:
    """A table in which only prose is folded, never a name or number, and the last columns, left out because they do not
    fit into ``width`` characters."""
    from rich import box
    from rich.table import Table

    cells = {name: [_plain(row[name]) for row in rows] for name in rows[0]}
    prose = {name: any(len(cell) > _PROSE and " " in cell for cell in texts) for name, texts in cells.items()}
    heads = {name: name if prose[name] else name.replace(" ", "\n") for name in cells}
    least = {
        name: _PROSE if prose[name] else max(map(len, [*texts, *heads[name].split("\n")]))
        for name, texts in cells.items()
    }
    shown = list(cells)
    while len(shown) > 1 and sum(least[name] + 2 for name in shown) > width:
        shown.pop()
    result = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in shown:
        numeric = all(cell[:1].isdecimal() or cell in ("", "-") for cell in cells[name]) and not prose[name]
        justify: Literal["left", "right"] = "right" if numeric else "left"
        result.add_column(heads[name], justify=justify, no_wrap=not prose[name], min_width=least[name])
    for row in zip(*(cells[name] for name in shown), strict=True):
        result.add_row(*row)
    return result, list(cells)[len(shown) :]


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _decimals(value: object) -> int:
    return len(str(value).partition(".")[2]) if isinstance(value, float) else 0


def warn(warnings: Iterable[str]) -> None:
    """Each warning as a line on standard error."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error while the block runs, on a terminal only; the block may say how far it is."""
    if not sys.stderr.isatty():
        yield lambda far: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)) as status:
        yield lambda far: status.update(Text(f"{what}: {far}"))


def one_by_one(rows: Sequence[T], far: Callable[[str], None]) -> Iterator[T]:
    """``rows`` one by one; ``far``, of `progress`, is told which of them is under way."""
    for number, row in enumerate(rows, 1):
        far(f"row {number:,} of {len(rows):,}")
        yield row
