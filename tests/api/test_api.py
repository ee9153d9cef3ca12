"""What Python users hold in their hands."""

from __future__ import annotations

import json
import pydoc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import simulator
from simulator import schedule_alone
from simulator.analysis.training.in_flight import peak_activations
from simulator.errors import InputError
from simulator.timeline import SpanLabels, Timeline
from tests.support.jobs import job
from tests.support.traces import trace_problems


def test_the_timeline_of_a_result_is_a_data_frame() -> None:
    for result in (simulator.run(job(parallelism__pp=2)), simulator.schedule("1f1b", 2, 4)):
        assert isinstance(result.timeline, pd.DataFrame)
        assert len(result.timeline) == result.spans.n_rows
        assert result.timeline["end_s"].max() == pytest.approx(result.spans.step_time_s, rel=1e-12)
        assert result.timeline is result.timeline  # expanded once


def test_peaks_of_a_schedule_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(spans: Timeline) -> dict[int, int]:
        calls.append(spans)
        return peak_activations(spans)

    monkeypatch.setattr(schedule_alone, "peak_activations", counted)
    assert simulator.schedule("1f1b", 8, 16).to_dict()["peak_activations"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert len(calls) == 1


@pytest.mark.parametrize(
    "layout",
    [{"dp": 4, "zero": 3}, {"dp": 4, "data_parallel": "async"}, {"dp": 4, "zero": 3, "offload": {"parameters": "cpu"}}],
)
def test_nothing_is_read_out_of_labels(layout: dict[str, object]) -> None:
    """They name steps for people and for each other: with numbers in their place results say the same."""
    work = job(framework="pytorch", training__global_batch=32) | {"parallelism": layout}
    result = simulator.run(work)
    number = {label: str(at) for at, label in enumerate(dict.fromkeys(result.played.labels))}
    played = replace(result.played, labels=SpanLabels.written([number[label] for label in result.played.labels]))
    if result.steady is None:
        nameless = replace(result, spans=played)
    else:
        nameless = replace(result, steady=replace(result.steady, played=played))
    assert nameless.memories == result.memories
    assert nameless.to_dict() == result.to_dict()


def test_a_trace_of_ranks_that_others_stand_for(tmp_path: Path) -> None:
    """Eight ranks of which some are folded away: asked for all, the trace has eight processes, each with the rows of
    the rank that was played for it."""
    result = simulator.run(job(parallelism__tp=2, parallelism__dp=2, parallelism__pp=2))
    assert len(result.spans.ranks) < 8
    path = tmp_path / "all.json"
    result.save_trace(path, ranks=range(8))
    assert trace_problems(path) == []
    events = json.loads(path.read_bytes())["traceEvents"]
    counts = Counter(event["pid"] for event in events if event["ph"] == "X")
    assert sorted(counts) == list(range(8))
    like = result.spans.simulated_as
    assert all(counts[rank] == counts[like[rank]] for rank in range(8))


def test_a_trace_that_nobody_could_open_is_refused(tmp_path: Path) -> None:
    result = simulator.run("gpt175b_3d")
    with pytest.raises(InputError, match="kernels and transfers"):
        result.save_trace(tmp_path / "all.json", ranks=range(1536))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [{"stages": 10**6, "microbatches": 10**6}, {"stages": 1, "microbatches": 10**6}])
def test_a_schedule_too_large_to_play_is_refused(size: dict[str, int]) -> None:
    with pytest.raises(InputError, match="too many to play"):
        simulator.schedule("1f1b", **size)


def test_a_cost_whose_sums_overflow_is_refused() -> None:
    with pytest.raises(InputError, match="not a cost"):
        simulator.schedule("1f1b", 2, 2, forward=1e308)


def test_a_job_of_one_gpu_crosses_no_link() -> None:
    result = simulator.run(job(training__global_batch=4))
    assert result.spans.n_ranks == 1
    assert not any(link["bytes"] for link in result.to_dict()["links"])


def test_a_result_shows_itself_in_a_few_lines() -> None:
    result = simulator.run(job(parallelism__pp=2))
    lines = repr(result).splitlines()
    assert len(lines) <= 24
    assert f"{result.workload.name} on 2 GPUs of {result.workload.cluster.name} with megatron_core" in lines
    assert any(line.startswith("step time") for line in lines)
    assert repr(simulator.schedule("1f1b", 4, 8)).startswith("1f1b: 4 stages of 1 chunk, 8 micro-batches: ")


def test_what_to_dict_hands_out_is_the_callers_own() -> None:
    result = simulator.run(job(parallelism__pp=2))
    both = simulator.share([job(parallelism__dp=2)] * 2)
    for known in (result, both):
        kept = json.dumps(known.to_dict())
        spoilt = known.to_dict()
        spoilt.get("runs", [spoilt])[0]["memory"]["per_stage"].clear()
        assert json.dumps(known.to_dict()) == kept


def test_jobs_that_share_show_themselves_in_a_few_lines() -> None:
    lines = repr(simulator.share([job(parallelism__dp=2)] * 2)).splitlines()
    assert len(lines) < 20
    assert "at once" in lines[0]
    assert all(len(line) <= 100 for line in lines)


def test_numbers_of_numpy_are_numbers() -> None:
    changes = {
        "parallelism.pp": np.int64(2),
        "parallelism.layers_per_stage": np.array([1, 1]),
        "training.grad_clip": np.float32(2),
        "cluster.nodes": np.int32(1),
        "parallelism.dp": np.uint8(4),
    }
    plain = {"parallelism.pp": 2, "parallelism.layers_per_stage": [1, 1], "training.grad_clip": 2.0}
    workload = job(training__global_batch=8, model__layers=2)
    found = simulator.run(workload, set=changes).workload
    assert found == simulator.run(workload, set=plain | {"cluster.nodes": 1, "parallelism.dp": 4}).workload
    listed = {"parallelism.pp": 2, "parallelism.layers_per_stage": list(np.array([1, 1]))}
    assert simulator.run(workload, set=listed).workload.parallelism.layers_per_stage == (1, 1)
    for wrong in (np.bool_(True), np.float64(1.5), np.array([2])):
        with pytest.raises(InputError, match=r"parallelism\.pp: must be a whole number"):
            simulator.run(workload, set={"parallelism.pp": wrong})
    sizes = {"stages": np.int64(4), "microbatches": np.int16(8), "forward": np.float32(1)}
    assert simulator.schedule("1f1b", **sizes).to_dict() == simulator.schedule("1f1b", 4, 8).to_dict()


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        *(({"stages": value}, "stages") for value in ("4", 4.0, float("nan"), True, [4], 0)),
        ({"microbatches": "8"}, "microbatches"),
        ({"chunks": "a"}, "chunks"),
        *(({"forward": value}, "F") for value in (None, "1", True, 0, float("nan"))),
        ({"backward": None}, "B"),
        ({"weight": "1"}, "W"),
        ({"comm": -1}, "comm"),
        ({"kept": None}, "kept"),
        ({"zb_memory_limit": "1"}, "zb_memory_limit"),
        *(({"name": value}, "schedule") for value in (None, 1, b"1f1b", ["1f1b"])),
    ],
)
def test_what_is_no_size_cost_or_name_of_a_schedule_is_refused(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        simulator.schedule(**({"name": "1f1b", "stages": 4, "microbatches": 8} | wrong))
    assert caught.value.key == key
    assert caught.value.allowed


def test_keys_to_set_are_text() -> None:
    with pytest.raises(InputError, match="set: has a key that is no text"):
        simulator.run(job(), set={1: 2})  # type: ignore[dict-item]


@pytest.mark.parametrize("ranks", [[2], [-1], ["a"], [0.5], [True], "0", 3, []])
def test_a_trace_has_ranks_of_the_job_only(ranks: Any, tmp_path: Path) -> None:
    result = simulator.run(job(parallelism__pp=2))
    with pytest.raises(InputError, match="ranks: no ranks of this job") as caught:
        result.save_trace(tmp_path / "trace.json", ranks=ranks)
    assert "0 to 1" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    result.save_trace(tmp_path / "trace.json", ranks=np.arange(2))


def test_a_rank_that_is_asked_for_twice_is_in_a_trace_once(tmp_path: Path) -> None:
    once, twice = tmp_path / "once.json", tmp_path / "twice.json"
    result = simulator.run(job(parallelism__pp=2))
    result.save_trace(once, ranks=[1, 0])
    result.save_trace(twice, ranks=[1, 0, 1, 1])
    assert twice.read_bytes() == once.read_bytes()


@pytest.mark.parametrize("wrong", ["gpt22b_tp8", job(), None, 2])
def test_one_workload_is_no_list_of_them(wrong: Any) -> None:
    with pytest.raises(InputError, match="must be a list of workloads") as caught:
        simulator.share(wrong)
    assert "['gpt22b_tp8', " in str(caught.value)


def test_help_shows_what_the_package_hands_out() -> None:
    text = pydoc.plain(pydoc.render_doc(simulator))
    for name in ("run", "schedule", "share", "simulate"):
        assert f"\n    {name}(" in text
    assert set(simulator.__all__) <= set(dir(simulator))
