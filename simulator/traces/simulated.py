"""Rows of a simulated Timeline as a profiler would have seen them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats, Ints
from simulator.program import PointToPointKind
from simulator.timeline import CATEGORIES, Timeline
from simulator.timeline.rows import TimelineRows
from simulator.traces.classes import CLASSES, simulated_class


def class_codes(rows: TimelineRows) -> tuple[Ints, NDArray[np.object_]]:
    """Return of each row the index of its class in `CLASSES`, and its category."""
    category = np.array(CATEGORIES, dtype=object)[rows["category"].astype(np.int64)]
    pairs = list(zip(rows["kind"].tolist(), category.tolist(), strict=True))
    codes = {pair: CLASSES.index(simulated_class(*pair)) for pair in set(pairs)}
    return np.array([codes[pair] for pair in pairs], dtype=np.int64), category


def resident_s(timeline: Timeline, rows: TimelineRows) -> Floats:
    """Return when the kernel of each row would have begun, were it one of communication.

    A communication is on the GPU since its stream came to it and its host had launched it. Communication in line with
    kernels is there from its start, as sends are, whose kernels do not wait for the other rank (`Comm.spins`).
    """
    start = rows["start_s"].astype(np.float64)
    launched = timeline.launched_s[rows["span"].astype(np.int64)]
    resident = np.maximum(rows["posted_s"].astype(np.float64), np.minimum(launched, start))
    return np.where(rows["kind"] == PointToPointKind.SEND, start, resident)
