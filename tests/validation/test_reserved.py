"""Reserved memory beside that of our own runs: PyTorch's allocator over the first steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.api import run
from simulator.validation.memory_suite import MEMORY_SUITES, capacity_of, settings_of
from simulator.validation.rows import Row, loaded

RESULTS = Path(__file__).parents[2] / "calibration" / "results"
#: Row -> largest error of its reserved bytes. Of the first four, states take the space of activations. The others
#: recompute their layers, so that states break up what the logits have left.
ROWS = {
    "dense_h8192_l4_s2k": 0.03,
    "ep4_h4096_l4_e8": 0.03,
    "tt1_llama1b_bf16": 0.01,
    "tt1_llama3b_compile": 0.02,
    "tt1_llama3b_s8k_full": 0.04,
    "tt1_llama8b16_full": 0.08,
    "tt2_fsdp_llama3b_full": 0.02,
    "tt2_fsdp_llama8b16_full": 0.05,
}


def rows_named(names: set[str]) -> dict[str, Row]:
    suites = (MEMORY_SUITES[name] for name in ("own-h200-memory", "own-frameworks-memory"))
    return {row["id"]: row for suite in suites for row in suite.rows if row["id"] in names}


def measured_bytes(name: str) -> int:
    """Return the most that PyTorch reserved on a GPU of a run."""
    file = next(RESULTS.rglob(f"{name}.json"))
    ranks = json.loads(file.read_text())["ranks"]
    return max(int(rank["memory"]["peak_reserved_bytes"]) for rank in ranks)


@pytest.mark.parametrize("name", ROWS)
def test_reserved_bytes_are_those_of_real_steps(name: str) -> None:
    row = rows_named({name})[name]
    memories = run(loaded(row, settings_of(row), memory_only=True)).memories_within(capacity_of(row))
    assert max(memory.reserved for memory in memories) == pytest.approx(measured_bytes(name), rel=ROWS[name])
