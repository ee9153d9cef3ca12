"""Rows: columns that a Timeline expands to, and their DataFrame."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.timeline import CATEGORIES
from simulator.timeline.timeline import Timeline
from tests.support.jobs import job, play


@pytest.fixture(scope="module")
def spans() -> Timeline:
    """A pipeline of two stages with tensor parallelism, whose in-line collectives have a lane of their own."""
    return play(job(parallelism={"tp": 2, "pp": 2})).spans


def test_frame_holds_every_row_once_in_order(spans: Timeline) -> None:
    frame, rows = spans.frame(), spans.rows()
    assert len(frame) == len(rows) == spans.n_rows
    lane = np.array([spans.lane_names.index(name) for name in frame["lane"]])
    order = list(zip(frame["rank"], lane, frame["start_s"], strict=True))
    assert order == sorted(order)
    for column in ("nbytes", "flops", "start_s", "end_s", "posted_s"):
        assert sorted(frame[column]) == sorted(rows[column].tolist())


def test_texts_and_codes_say_the_same(spans: Timeline) -> None:
    frame, rows = spans.frame(), spans.rows()
    order = np.lexsort((rows["start_s"], rows["lane"], rows["rank"]))
    for column in ("name", "kind", "phase"):
        assert frame[column].tolist() == rows[column][order].tolist()
    assert frame["lane"].tolist() == [spans.lane_names[code] for code in rows["lane"][order].tolist()]
    assert frame["category"].tolist() == [CATEGORIES[int(code)] for code in rows["category"][order].tolist()]


def test_rows_that_pass_one_another_on_a_lane_are_ordered_by_start(spans: Timeline) -> None:
    """Two spans that are given each other's start stand in each other's place."""
    first, second = np.flatnonzero((spans.rank == 0) & (spans.lane == spans.lane[0]))[:2]
    start_s = spans.start_s.copy()
    start_s[[first, second]] = start_s[[second, first]]
    for _, lane in replace(spans, start_s=start_s).frame().groupby(["rank", "lane"], observed=True):
        assert lane["start_s"].is_monotonic_increasing


def test_an_unheard_of_column_is_refused(spans: Timeline) -> None:
    with pytest.raises(KeyError):
        spans.rows()["colour"]
