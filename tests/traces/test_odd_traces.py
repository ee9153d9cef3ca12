"""Whatever is wrong in a trace, it is read and played, or refused in a sentence: random changes of a good one."""

from __future__ import annotations

import contextlib
import copy
import random
from pathlib import Path
from typing import Any

import pytest

from simulator.errors import InputError
from simulator.traces.figures import figures
from simulator.traces.kineto import read_trace
from simulator.traces.replay import replay
from simulator.traces.windows import one_step
from tests.support.kineto import KinetoWriter, data_parallel_step

VALUES: tuple[Any, ...] = (None, -1, 0, 1e9, -5.5, "x", [], {}, True, 10**30, float("inf"), "7", 20, 1.5e17)


def spoil(trace: KinetoWriter, chance: random.Random) -> None:
    """Change, remove, repeat or move an event, or change the header."""
    event: dict[str, Any] = chance.choice(trace.events)
    kind = chance.choice(("field", "argument", "remove", "repeat", "move", "header"))
    if kind == "remove":
        trace.events.remove(event)
    elif kind == "repeat":
        trace.events.append(copy.deepcopy(event))
    elif kind == "move" and isinstance(event.get("ts"), int | float):
        event["ts"] += chance.uniform(-9000, 9000)
    else:
        where = {"argument": event["args"] or event, "header": trace.header}.get(kind, event)
        if isinstance(where, dict):
            where[chance.choice(list(where))] = chance.choice(VALUES)


@pytest.mark.parametrize("seed", range(30))
def test_odd_traces_never_end_in_a_traceback(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    traces = [data_parallel_step(rank) for rank in range(2)]
    for _ in range(chance.randint(1, 4)):
        spoil(chance.choice(traces), chance)
    paths = [trace.save(tmp_path / f"{rank}.json") for rank, trace in enumerate(traces)]
    with contextlib.suppress(InputError):  # any other exception fails the test
        trace = read_trace(paths)
        assert figures(trace).ranks
        assert replay(one_step(trace, None)).played.step_s >= 0
