"""A remark on a database that sweeps and searches of several workloads share."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

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
