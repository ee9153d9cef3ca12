"""What Python users hold in their hands."""

from __future__ import annotations

import pandas as pd
import pytest

import simulator
from simulator import api
from simulator.analysis.metrics import peak_activations
from simulator.timeline import Timeline
from tests.jobs import job


def test_the_timeline_of_a_result_is_a_data_frame() -> None:
    for result in (simulator.run(job(parallelism__pp=2)), simulator.schedule("1f1b", 2, 4)):
        assert isinstance(result.timeline, pd.DataFrame)
        assert len(result.timeline) == result.spans.n_rows
        assert result.timeline["end_s"].max() == result.spans.step_time_s
        assert result.timeline is result.timeline  # expanded once


def test_peaks_of_a_schedule_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(spans: Timeline) -> dict[int, int]:
        calls.append(spans)
        return peak_activations(spans)

    monkeypatch.setattr(api, "peak_activations", counted)
    assert simulator.schedule("1f1b", 8, 16).to_dict()["peak_activations"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert len(calls) == 1
