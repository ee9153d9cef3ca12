"""Tables that fit the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

Justify = Literal["left", "right"]
#: Name, justify, style.
Column = tuple[str, Justify] | tuple[str, Justify, str]
#: Cells of more characters are prose, which may be folded between words.
_PROSE = 20
#: Blanks between columns; both edges together take as many.
_GAP = 2


class FittedTable:
    """Table that cuts no cell.

    On a narrow terminal prose and names of columns are folded between words. Names and figures are not folded, but for
    names of half the terminal's width. The last columns are left out where they do not fit, and named below the table.
    A column without a name is a drawing of another one, and is left out silently.
    """

    def __init__(self, title: str, *columns: Column) -> None:
        self.title = title
        self._columns = [(name, justify, "".join(style)) for name, justify, *style in columns]
        self._rows: list[tuple[str, ...]] = []
        self._styles: list[str] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        assert len(cells) == len(self._columns)
        self._rows.append(cells)
        self._styles.append(style)

    @property
    def full_width(self) -> int:
        """Width of the whole table without folds, characters."""
        return sum(self._full(number) + _GAP for number in range(len(self._columns)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        widths = self._widths(options.max_width)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False)
        for (name, justify, style), width in zip(self._columns, widths, strict=False):
            table.add_column(Text(name), justify=justify, style=style, width=width, overflow="fold")
        for cells, row_style in zip(self._rows, self._styles, strict=True):
            table.add_row(*map(Text, cells[: len(widths)]), style=row_style)
        if self.title:
            yield Text(self.title, style="bold")
        yield table
        if left_out := [name for name, *_ in self._columns[len(widths) :] if name]:
            them = "it" if len(left_out) == 1 else "them"
            yield Text(f"No room for {', '.join(left_out)}: a wider terminal, or output into a file, shows {them}.\n")

    def _widths(self, most: int) -> list[int]:
        """Return the widths of the first columns, as many as fit into ``most`` characters."""
        least = [min(self._least(number), most // 2) for number in range(len(self._columns))]
        while len(least) > 1 and sum(least) + _GAP * len(least) > most:
            least.pop()
        widths = [self._full(number) for number in range(len(least))]
        while sum(widths) + _GAP * len(widths) > most:
            wider = [number for number, width in enumerate(widths) if width > least[number]]
            if not wider:
                break
            widths[max(wider, key=widths.__getitem__)] -= 1
        return widths

    def _cells(self, number: int) -> list[str]:
        return [cells[number] for cells in self._rows]

    def _full(self, number: int) -> int:
        return _longest([self._columns[number][0], *self._cells(number)])

    def _least(self, number: int) -> int:
        """Return the least width of a column that breaks no word, name or figure."""
        pieces = self._columns[number][0].split()
        for cell in self._cells(number):
            pieces += cell.split() if len(cell) > _PROSE else [cell]
        return _longest(pieces)


def _longest(texts: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, texts), default=0)
