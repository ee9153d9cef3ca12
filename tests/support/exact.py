"""Two plays of one job that must come to the same: with and without the engine's shortcuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd

from simulator.engine.invariants import Place, check
from simulator.step_result import StepResult
from simulator.timeline import Timeline
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


def timeline_differences(first: Timeline, second: Timeline) -> Iterator[str]:
    """Yield the columns and facts in which two timelines differ, to the last bit; not how long each took to play."""
    for column in (field.name for field in fields(Timeline)):
        one, other = getattr(first, column), getattr(second, column)
        if column == "stretched":
            one, other = ({span: np.stack(rows_s).tolist() for span, rows_s in rows.items()} for rows in (one, other))
        if column == "templates":  # which are numbered in the order in which they were made
            one, other = ([played.templates[number].names for number in played.template] for played in (first, second))
        if column == "template" or column == "wall_s":
            continue
        if isinstance(one, np.ndarray):
            one, other = one.tolist(), other.tolist()
        if one != other:
            yield f"{column}: {str(one)[:200]} and {str(other)[:200]}"


def steady_differences(short: Timeline, whole: Timeline) -> Iterator[str]:
    """Yield the columns in which a timeline with periods put in differs from that of all that was played."""
    if len(short.rank) != len(whole.rank):
        yield f"{len(short.rank)} and {len(whole.rank)} spans"
        return
    for column in ("rank", "lane", "step", "microbatch", "stage", "chunk", "phase", "labels", "parts"):
        if list(getattr(short, column)) != list(getattr(whole, column)):
            yield f"{column} differs"
    for column in ("posted_s", "launched_s", "start_s", "end_s"):
        apart_s = np.abs(getattr(short, column) - getattr(whole, column)).max()
        if apart_s > 1e-9 * whole.step_time_s:
            yield f"{column} differs by {apart_s:g} s"
    for column in ("alloc_bytes", "free_bytes", "workspace_bytes"):
        if not np.array_equal(getattr(short, column), getattr(whole, column)):
            yield f"{column} differs"


def compare(section: dict[str, Any], **changes: Any) -> None:
    workload = job(**changes) | {"parallelism": section}
    short = play(workload, fold=True, coalesce=True)
    plain = play(workload, fold=False, coalesce=False, engine="python")
    check(short.program, short.played, Place(short.placed, short.cluster))
    check(plain.program, plain.played, Place(plain.placed, plain.cluster))
    assert_same(short, plain)


def leaves(node: dict[str, Any]) -> list[float]:
    """Return the numbers of a nested mapping, in order."""
    return [x for value in node.values() for x in (leaves(value) if isinstance(value, dict) else [value])]
