"""Results on standard output for a person to read, warnings and progress on standard error."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from simulator.output.fitted_table import FittedTable

T = TypeVar("T")
#: Characters per line where the output is no terminal and COLUMNS is not set: wide enough that no cell is cut.
PIPE_WIDTH = 1000
#: What an indented line begins with, under which it does not go on.
_LABEL = re.compile(r"  [\w-]+:? +")
#: A number with at most a unit.
_FIGURE = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?( ?[^\d\s]+)?")


def console() -> Console:
    """Standard output. Text is printed as it is: names of the user may hold brackets."""
    from rich.console import Console

    return Console(width=_columns(sys.stdout) or PIPE_WIDTH, highlight=False, markup=False, emoji=False)


def show(*parts: RenderableType) -> None:
    """Print ``parts`` on standard output, and into pipes and files without the blanks with which rich fills up
    lines; on a terminal colours may end behind some."""
    out = console()
    with out.capture() as captured:
        for part in parts:
            out.print(part)
    print("\n".join(line.rstrip(" ") for line in captured.get().split("\n")), end="")


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> FittedTable:
    """A table of ``rows``, whose keys are the columns; figures stand on the right, decimal points below each other."""
    from simulator.output.fitted_table import FittedTable, Justify

    names = list(rows[0]) if rows else []
    columns = {name: _written([row[name] for row in rows]) for name in names}
    sides: dict[bool, Justify] = {True: "right", False: "left"}
    result = FittedTable(title, *((name, sides[_are_figures(cells)]) for name, cells in columns.items()))
    for cells in zip(*columns.values(), strict=True):
        result.add_row(*cells)
    return result


def _written(values: Sequence[object]) -> list[str]:
    decimals = max(len(str(value).partition(".")[2]) if isinstance(value, float) else 0 for value in values)
    return [
        f"{value:,.{decimals}f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
        for value in values
    ]


def _are_figures(cells: Sequence[str]) -> bool:
    """
    >>> _are_figures(["1.5 GB/s", "-"]), _are_figures(["+3.4%", ""]), _are_figures(["0-31"]), _are_figures(["-"])
    (True, True, False, False)
    """
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and all(_FIGURE.fullmatch(cell) for cell in filled)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print lines on standard output, or ``stream``, broken between words where a terminal is narrower.

    A standard error that cannot be written, as on a full disk, changes nothing of what a command does.
    """
    stream = stream or sys.stdout
    width = _columns(stream)
    with suppress(OSError) if stream is sys.stderr else nullcontext():
        print(text if width is None else "\n".join(_broken(line, width) for line in text.split("\n")), file=stream)


def _columns(stream: TextIO) -> int | None:
    """Characters per line of ``stream``: COLUMNS, unless it is 0 or no number; None where there is no terminal."""
    if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError):  # isatty is true, but there is no file
        return None


def _broken(line: str, width: int) -> str:
    """
    >>> print(_broken("  allowed: gpipe, 1f1b, zb_h1", 24))
      allowed: gpipe, 1f1b,
               zb_h1
    """
    label = _LABEL.match(line)
    indent = " " * (label.end() if label else 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def warn(warnings: Iterable[str]) -> None:
    """Each warning on standard error."""
    for warning in warnings:
        say(f"warning: {warning}", sys.stderr)


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


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[bool], None]]:
    """A bar with the time left on standard error while the block runs, on a terminal only.

    The block calls back for every part. Parts that were done before, and are not ``new``, say nothing of the time left.
    """
    if not sys.stderr.isatty():
        yield lambda new: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Left(TimeRemainingColumn):
        def render(self, task: Any) -> Text:
            return super().render(task) + Text(" left")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("in"),
        TimeElapsedColumn(),
        Left(),
    )
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600, transient=True) as bar:
        task, left = bar.add_task(what, total=total), total

        def done(new: bool) -> None:
            nonlocal left
            left -= 0 if new else 1
            bar.update(task, advance=1 if new else 0, total=left)

        yield done
