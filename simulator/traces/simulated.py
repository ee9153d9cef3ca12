"""Rows of a simulated Timeline as a profiler would have seen them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Ints
from simulator.timeline import CATEGORIES
from simulator.timeline.rows import TimelineRows
from simulator.traces.classes import CLASSES, simulated_class


def categories(rows: TimelineRows) -> NDArray[np.object_]:
    """Return of each row the name of its category."""
    return np.array(CATEGORIES, dtype=object)[rows["category"].astype(np.int64)]


def class_codes(rows: TimelineRows) -> Ints:
    """Return of each row the index of its class in `CLASSES`."""
    pairs = list(zip(rows["kind"].tolist(), categories(rows).tolist(), strict=True))
    codes = {pair: CLASSES.index(simulated_class(*pair)) for pair in set(pairs)}
    return np.array([codes[pair] for pair in pairs], dtype=np.int64)
