"""The database of a sweep or search: how an interrupted one goes on, and what else the database has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from simulator.cli.streams import ended_by
from simulator.cli.terminal import say
from simulator.units import counted

#: Workloads that are named.
_MOST_NAMES = 3


def said_of_others(database: Path, workloads: Collection[str]) -> str:
    """Return a sentence on points in ``database`` that are of none of the ``workloads``; empty where there are none."""
    from simulator.sweeping.point import source_name
    from simulator.sweeping.store import Store

    with Store.open(database) as store:
        counts = store.other_sources([source_name(workload) for workload in workloads])
    if not counts:
        return ""
    names = [f"{counted(number, 'point')} of {name}" for name, number in list(counts.items())[:_MOST_NAMES]]
    more = len(counts) - len(names)
    return f" It also has {', '.join([*names, *([counted(more, 'other workload')] if more else [])])}."


@contextmanager
def resumable(
    database: Path, kept: Callable[[], str], show_so_far: Callable[[], None], at_end: str = ""
) -> Iterator[None]:
    """End an interrupted block with what was simulated so far, and with what is ``kept`` and how to go on.

    ``at_end``: what the same command does at its end alone, as the end of that sentence.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:  # the latter by SIGTERM, see `signals_raise`
        show_so_far()
        say(f"interrupted: {kept()} are kept in {database}; the same command goes on from there{at_end}", sys.stderr)
        raise typer.Exit(ended_by(end)) from None
