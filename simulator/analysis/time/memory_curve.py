"""Bytes that a rank's steps hold over time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.timeline import Floats, Ints, Timeline

#: Times no more apart are one, added up in another order.
_MOMENT_s = 1e-12


class Curve(NamedTuple):
    """Memory of a rank's steps: from each of ``times`` (s) on it holds ``held`` bytes and needs ``workspace`` bytes.
    ``span`` is what starts (``begins``) or ends then."""

    times: Floats
    held: Floats
    workspace: Floats
    span: Ints
    begins: Ints


def memory_curve(timeline: Timeline, rank: int) -> Curve:
    """Memory that a rank's steps take over the step.

    A span holds ``alloc_bytes`` from its start, gives ``free_bytes`` back at its end, and needs ``workspace_bytes``
    in between; what ends at a moment is given back before what starts at it is taken, to a rounding.
    """
    spans = np.flatnonzero(timeline.rank == rank)
    times = np.concatenate((timeline.end_s[spans], timeline.start_s[spans]))
    held = np.concatenate((-timeline.free_bytes[spans], timeline.alloc_bytes[spans]))
    workspace = np.concatenate((-timeline.workspace_bytes[spans], timeline.workspace_bytes[spans]))
    begins = np.repeat(np.array([0, 1], dtype=np.int64), len(spans))
    order = np.argsort(times, kind="stable")
    moment = np.cumsum(np.diff(times[order], prepend=0.0) > _MOMENT_s)
    order = order[np.lexsort((begins[order], moment))]
    both = np.concatenate((spans, spans))
    return Curve(
        np.maximum.accumulate(times[order]),
        np.cumsum(held[order]),
        np.cumsum(workspace[order]),
        both[order],
        begins[order],
    )
