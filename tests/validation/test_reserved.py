"""Reserved memory beside that of our own runs: PyTorch's allocator over the first steps."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from simulator.api import run
from simulator.validation.memory_suite import MEMORY_SUITES, capacity_of, settings_of
from simulator.validation.rows import Row, loaded

RESULTS = Path(__file__).parents[2] / "calibration" / "results"
#: Of the first four, states take the space of activations. The others recompute their layers, so that states break up
#: what the logits have left.
ROWS = (
    *("dense_h8192_l4_s2k", "ep4_h4096_l4_e8", "tt1_llama1b_bf16", "tt1_llama3b_compile"),
    *("tt1_llama3b_s8k_full", "tt1_llama8b16_full", "tt2_fsdp_llama3b_full", "tt2_fsdp_llama8b16_full"),
)
#: A replay of blocks is to tell whether a job fits. A tenth is what `simulator.analysis.training.uneven_experts` takes
#: for spare, and what published memory may be off in the mean.
BOUND = 0.10
#: What docs/limits.md says of all runs, rounded.
MEAN_OF_ALL = 0.07


@cache
def rows_by_name() -> dict[str, Row]:
    names = ("own-h200-memory", "own-frameworks-memory", "own-fp8-memory")
    return {row["id"]: row for name in names for row in MEMORY_SUITES[name].rows}


def memories(name: str) -> list[dict[str, int]]:
    """Return what PyTorch told of the memory of a run, GPU by GPU."""
    file = next(RESULTS.rglob(f"{name}.json"))
    return [rank["memory"] for rank in json.loads(file.read_text())["ranks"]]


def error(name: str) -> float:
    """Return how far off the most bytes are that PyTorch reserved on a GPU of a run."""
    row = rows_by_name()[name]
    simulated = run(loaded(row, settings_of(row), memory_only=True)).memories_within(capacity_of(row))
    measured = max(memory["peak_reserved_bytes"] for memory in memories(name))
    return max(memory.reserved for memory in simulated) / measured - 1


@pytest.mark.parametrize("name", ROWS)
def test_reserved_bytes_are_those_of_real_steps(name: str) -> None:
    assert abs(error(name)) < BOUND


@pytest.mark.slow
def test_reserved_bytes_of_all_runs_are_off_by_as_much_as_is_said() -> None:
    """The mean is over runs on GPUs on which runs before them had left nothing: that would count as theirs."""
    names = [
        name for name in rows_by_name() if not any(memory.get("left_allocated_bytes") for memory in memories(name))
    ]
    assert len(names) == 108
    assert fmean(abs(error(name)) for name in names) == pytest.approx(MEAN_OF_ALL, abs=0.005)
