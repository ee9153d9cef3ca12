"""The smallest workload, and what is refused of it."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config import Workload, load_workload
from simulator.errors import InputError

SMALL: dict[str, Any] = {
    "model": {"layers": 12, "hidden": 1024, "heads": 16, "vocab": 50257},
    "training": {"seq": 1024, "global_batch": 32},
    "cluster": "dgx_a100",
}


def small(**changes: Any) -> Workload:
    """A small workload with dotted keys (dots written __) changed."""
    return load_workload(SMALL, {key.replace("__", "."): value for key, value in changes.items()})


def refused(changes: dict[str, Any], base: dict[str, Any] = SMALL) -> str:
    with pytest.raises(InputError) as caught:
        load_workload(base, changes)
    return str(caught.value)
