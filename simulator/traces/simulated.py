"""Rows of a simulated Timeline as a profiler would have seen them."""

from __future__ import annotations

import numpy as np

from simulator.arrays import Ints
from simulator.timeline import CATEGORIES
from simulator.timeline.rows import TimelineRows
from simulator.traces.classes import CLASSES, simulated_class


def class_codes(rows: TimelineRows) -> Ints:
    """Return of each row the index of its class in `CLASSES`."""
    category = np.array(CATEGORIES, dtype=object)[rows["category"].astype(np.int64)]
    pairs = list(zip(rows["kind"].tolist(), category.tolist(), strict=True))
    codes = {pair: CLASSES.index(simulated_class(*pair)) for pair in set(pairs)}
    return np.array([codes[pair] for pair in pairs], dtype=np.int64)
