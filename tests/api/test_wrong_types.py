"""Arguments of another type than a Python function takes: one sentence, never a traceback of the inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator import plot
from simulator.errors import InputError
from tests.support.sweeps import write_job

BARE: Any = simulator.schedule("1f1b", stages=2, microbatches=2)
WRONG: Any = "x"
CALLS: dict[str, Callable[[], object]] = {
    "budget_s: must be a number": lambda: simulator.advise("gpt22b_tp8", budget_s=WRONG),
    "budget_s: must be a number\n  found:   null": lambda: simulator.search("gpt22b_tp8", gpus=8, budget_s=None),  # type: ignore[arg-type]
    "limit: tp: must be least and most": lambda: simulator.search("gpt22b_tp8", gpus=8, limit={"tp": WRONG}),
    "sizes: must be a text or a list": lambda: simulator.collective("dgx_h100", "all_reduce", sizes=8),  # type: ignore[arg-type]
    "max_mean: must be a number": lambda: simulator.validate("megatron-2022", max_mean=WRONG),
    "plot.memory: draws another kind of result\n  found:   'ScheduleResult'": lambda: plot.memory(BARE),
    "plot.time_breakdown: draws another": lambda: plot.time_breakdown(BARE),
    "plot.critical_path: draws another": lambda: plot.critical_path(BARE),
    "plot.links: draws another": lambda: plot.links(BARE),
    "plot.gantt: draws another": lambda: plot.gantt(WRONG),
    "plot.layouts: draws another": lambda: plot.layouts(BARE),
}


@pytest.mark.parametrize(("message", "call"), CALLS.items())
def test_an_argument_of_another_type_is_named(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(InputError) as refused:
        call()
    assert str(refused.value).startswith(message)


def test_a_search_is_drawn(tmp_path: Path) -> None:
    """The line goes through the layouts that none other beats, the fastest first; each has its number in the legend."""
    write_job(tmp_path, parallelism={"dp": 2})
    fix = {"recompute": ["none", "full"], "zero": [0, 1], "micro_batch": [1]}
    result = simulator.search(tmp_path / "tiny.yaml", gpus=2, fix=fix, jobs=1)
    axes = plot.layouts(result)
    (front,) = [line for line in axes.lines if line.get_linewidth() == 1]
    times = list(front.get_xdata())
    assert times == sorted(times)
    assert len(times) == len(result.view().front)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(labels) >= len(times)
