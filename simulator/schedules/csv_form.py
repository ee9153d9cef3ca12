"""A schedule as CSV in the text form of ``torch.distributed.pipelining``: a row per rank, an action per cell.

Cells: ``2F0``, ``2B0``, ``2I0``, ``2W0``; ``(2F4;5B1)OVERLAP_F_B`` for passes that overlap as one; ``2SEND_F0``,
``3RECV_F0``, ``3SEND_B0``, ``2RECV_B0`` where communication is written too; nothing where a rank idles.

PyTorch 2.5 wrote ``2B0`` for the input gradient and ``2BW0`` for the whole backward pass; such files are read too.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from simulator.schedules.actions import Action, Cell, Order, Post, Schedule, Slot, requires
from simulator.units import counted

_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_POST = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


def to_csv(rows: Sequence[Sequence[Cell]], *, joined: bool = False) -> str:
    """``rows`` as CSV; with ``joined`` slots of several actions are one cell. `from_csv` gives it back."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([list(_cells(row, joined)) for row in rows])
    return out.getvalue()


def _cells(row: Iterable[Cell], joined: bool) -> Iterable[str]:
    for cell in row:
        if isinstance(cell, Post):
            yield str(cell)
        elif joined and len(cell) > 1:
            yield f"({';'.join(map(str, cell))})OVERLAP_F_B"
        else:
            yield from map(str, cell)


def _size_in_words(p: int, m: int, v: int) -> str:
    return f"{counted(p, 'pipeline rank')} of {counted(v, 'chunk')} and {counted(m, 'micro-batch', 'es')}"


def from_csv(text: str, name: str) -> Schedule:
    """Return the schedule that ``text`` writes down, for its one p, m and v. Raises ValueError on what cannot be
    read, and where passes are missing, twice there or on two ranks; not on an order that deadlocks."""
    rows = [
        [cell for at, entry in enumerate(line, start=1) if (cell := _parse(entry.strip(), row, at)) is not None]
        for row, line in enumerate(_lines(_in_letters_of_today(text)), start=1)
        if line
    ]
    order: Order = [[cell for cell in row if not isinstance(cell, Post)] for row in rows]
    rank_of = _placement(order)
    n_stages, microbatches, copies = _complete(order)
    p = len(order)
    if n_stages % p:
        raise ValueError(f"{n_stages} stages do not divide over {p} ranks (rows)")
    size = (p, microbatches, n_stages // p)
    posted = any(isinstance(cell, Post) for row in rows for cell in row)
    if posted:
        _paired(rows, order, rank_of, n_stages)

    def check(p: int, m: int, v: int) -> str | None:
        if (p, m, v) == size:
            return None
        return f"is of {_size_in_words(*size)}, not of {_size_in_words(p, m, v)}"

    return Schedule(
        name=name,
        paper="read from a file",
        order=lambda p, m, v: order,
        bubble=lambda p, m, v, f, i, w: None,
        peak=lambda p, m, v, rank: None,
        check=check,
        rank_of=lambda stage, p: rank_of.get(stage, stage % p),
        posts_ahead=True,
        chunks=size[2],
        splits=any(action.kind == "W" for slots in order for slot in slots for action in slot),
        joined=any(len(slot) > 1 for slots in order for slot in slots),
        copies=copies,
        size=size,
        rows=tuple(map(tuple, rows)) if posted else None,
    )


def _lines(text: str) -> list[list[str]]:
    """Return the cells of every row. Raises ValueError where a quote is left open, or a cell is too long."""
    rows = csv.reader(io.StringIO(text), strict=True)
    lines: list[list[str]] = []
    try:
        lines.extend(rows)
    except csv.Error as error:
        raise ValueError(f"row {len(lines) + 1}: cannot be read as CSV: {error}") from None
    return lines


def _in_letters_of_today(text: str) -> str:
    """Return ``text`` with I and B for PyTorch 2.5's B and BW (``_ComputationType`` of its ``schedules.py``).

    A file of today that has weight gradients has input gradients too, and none has BW.
    """
    kinds = set(re.findall(r"\d([A-Z]+)\d", text))
    if "I" in kinds or not kinds & {"W", "BW"}:
        return text
    return re.sub(r"(\d)BW(\d)", r"\1B\2", re.sub(r"(\d)B(\d)", r"\1I\2", text))


def _parse(text: str, row: int, at: int) -> Cell | None:
    if not text:
        return None
    try:
        if match := _OVERLAP.fullmatch(text):
            return tuple(Action.parse(part.strip()) for part in match[1].split(";"))
        if match := _POST.fullmatch(text):
            return Post(int(match[1]), match[2], match[3], int(match[4]))
        return (Action.parse(text),)
    except ValueError:
        raise ValueError(
            f"row {row}, cell {at}: cannot use {text!r}; a cell is such as 2F0, 2B0, 2I0, 2W0, (2F4;5B1)OVERLAP_F_B, "
            "2SEND_F0, 3RECV_F0, or empty"
        ) from None


def _placement(order: Order) -> dict[int, int]:
    """Stage -> rank."""
    rank_of: dict[int, int] = {}
    for rank, slots in enumerate(order):
        for action in _flat(slots):
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} is on rank {rank_of[action.stage]} and on rank {rank}: {action}"
                )
    if not rank_of:
        raise ValueError("has no actions")
    if missing := set(range(max(rank_of) + 1)) - set(rank_of):
        raise ValueError(f"stage {min(missing)} has no actions, stage {max(rank_of)} has")
    return rank_of


def _complete(order: Order) -> tuple[int, int, int]:
    """Stages of the model, micro-batches, copies of the model; every pass has to be there once."""
    kinds: dict[tuple[int, int], str] = {}
    for action in (action for slots in order for action in _flat(slots)):
        key = (action.stage, action.microbatch)
        kinds[key] = "".join(sorted(kinds.get(key, "") + action.kind))
    n_stages, microbatches = (max(numbers) + 1 for numbers in zip(*kinds, strict=True))
    half = n_stages // 2
    first, second = ({mb for stage, mb in kinds if (stage >= half) is upper} for upper in (False, True))
    copies = 2 if n_stages > 1 and n_stages % 2 == 0 and not first & second else 1
    for stage in range(n_stages):
        for mb in range(microbatches) if copies == 1 else sorted(first if stage < half else second):
            if kinds.get((stage, mb), "") not in ("BF", "FIW"):
                present = ", ".join(f"{stage}{kind}{mb}" for kind in kinds.get((stage, mb), "")) or "nothing"
                needs = "need one F and either one B or one I and one W"
                raise ValueError(f"stage {stage} and micro-batch {mb} {needs}; there is {present}")
    return n_stages // copies, microbatches, copies


def _paired(rows: Sequence[Sequence[Cell]], order: Order, rank_of: dict[int, int], n_stages: int) -> None:
    """Every result that another rank needs has to be sent and received once, and nothing else."""
    present = {action for slots in order for action in _flat(slots)}
    wanted: dict[Post, int] = {}
    for action in sorted(present):
        for source in (source for need in requires(action, n_stages) for source in need if source in present):
            if rank_of[source.stage] != rank_of[action.stage]:
                wanted[Post.from_source(source, source.stage, "SEND")] = rank_of[source.stage]
                wanted[Post.from_source(source, action.stage, "RECV")] = rank_of[action.stage]
    for rank, row in enumerate(rows):
        for post in (cell for cell in row if isinstance(cell, Post)):
            if wanted.pop(post, None) != rank:
                raise ValueError(f"row {rank + 1}: {post} is not needed there: twice, on another rank, or within one")
    if wanted:
        post, rank = next(iter(wanted.items()))
        raise ValueError(f"row {rank + 1}: {post} is missing; write all sends and receives, or none")


def _flat(slots: Iterable[Slot]) -> list[Action]:
    return [action for slot in slots for action in slot]
