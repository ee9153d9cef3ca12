"""Two plays of one job that must come to the same: with and without the engine's shortcuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from simulator.api import StepResult
from simulator.engine.invariants import Place, check
from tests.support.jobs import job, play


def rows_of(result: StepResult) -> pd.DataFrame:
    """Rows of the simulated ranks, in an order that does not depend on rounding."""
    frame = result.timeline
    return frame.sort_values(["rank", "lane", "start_s", "end_s", "name"], kind="stable", ignore_index=True)


def assert_same(short: StepResult, plain: StepResult) -> None:
    """Every rank of the plain run has the rows of the rank that was simulated for it."""
    of_rank = {rank: frame.reset_index(drop=True) for rank, frame in rows_of(short).groupby("rank")}
    plain_rows = rows_of(plain)
    step = plain.spans.step_time_s
    assert len(plain.spans.ranks) == plain.workload.n_ranks
    for rank, frame in plain_rows.groupby("rank"):
        twin = of_rank[short.spans.simulated_as[int(rank)]]
        assert list(twin["name"]) == list(frame["name"])
        for column in ("start_s", "end_s", "nbytes"):
            scale = step if column != "nbytes" else max(float(frame[column].max()), 1.0)
            assert np.abs(twin[column].to_numpy() - frame[column].to_numpy()).max() <= 1e-9 * scale, (rank, column)


def compare(section: dict[str, Any], **changes: Any) -> None:
    workload = job(**changes) | {"parallelism": section}
    short, plain = play(workload, fold=True, coalesce=True), play(workload, fold=False, coalesce=False)
    check(short.program, short.played, Place(short.placed, short.cluster))
    check(plain.program, plain.played, Place(plain.placed, plain.cluster))
    assert_same(short, plain)


def leaves(node: dict[str, Any]) -> list[float]:
    """Return the numbers of a nested mapping, in order."""
    return [x for value in node.values() for x in (leaves(value) if isinstance(value, dict) else [value])]
