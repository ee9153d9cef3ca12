"""A job's steps without stragglers: jobs made by hand, and ByteDance's own figures of a released job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from simulator.cli.app import main
from simulator.errors import InputError
from simulator.traces.job_stragglers import ideal_work, job_times, play, straggler_figures
from simulator.traces.job_trace import JobMeeting, read_job_trace

pytest.importorskip("pyarrow")
SHARED = Path(__file__).resolve().parents[3] / "shared/reference/files/traces"


def rows(replica: int, slow: float) -> list[dict[str, Any]]:
    """Return one micro-batch's way through two stages.

    A forward pass takes 1 s, a backward pass 2 s, ``slow`` times so long on the second stage. Hand-overs take 0.1 s.
    Gradients are reduced in 0.5 s once both replicas have come. All agree on the norm 0.1 s after the last of them, and
    the optimizer takes 0.2 s.
    """
    forward, backward = 1.0 * slow, 2.0 * slow
    received = 1.1 + forward + backward + 0.1  # stage 0 has its gradient
    ready = {0: received + 2.0, 1: received - 0.1}
    last = {0: 1.1 + 3.0 * SLOW + 0.1 + 2.0, 1: 1.1 + 3.0 * SLOW}  # when the slow replica is ready
    reduced = {stage: last[stage] + 0.5 for stage in (0, 1)}
    agreed = max(reduced.values()) + 0.1
    table = [
        (0, "forward-compute", 0.0, 1.0), (0, "forward-send", 1.0, 0.1), (1, "forward-recv", 0.0, 1.1),
        (1, "forward-compute", 1.1, forward), (1, "backward-compute", 1.1 + forward, backward),
        (1, "backward-send", received - 0.1, 0.1), (0, "backward-recv", 0.5, received - 0.5),
        (0, "backward-compute", received, 2.0),
    ]  # fmt: skip
    for stage in (0, 1):
        table += [
            (stage, "grads-reduce-scatter", ready[stage], reduced[stage] - ready[stage]),
            (stage, "optimizer-clip-main-grad", reduced[stage], agreed - reduced[stage]),
            (stage, "optimizer", agreed, 0.2),
        ]
    return [
        {"dp_rank": replica, "stage": stage, "step": 7, "optype": kind, "start_ts": start, "duration": length}
        | {"seq_id": 0, "mc": 0}
        for stage, kind, start, length in table
    ]


SLOW = 1.5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.parquet"
    pd.DataFrame([*rows(0, 1.0), *rows(1, SLOW)]).to_parquet(path)
    return path


def test_a_pipeline_without_stragglers(file: Path) -> None:
    """The slow replica decides: 1 + 0.1 + 4.5 + 0.1 + 2, and 0.5 + 0.1 + 0.2 at the end make 8.5 s.

    There are no delays but that of the receive that stage 0 posts at 0.5. A forward pass takes 4.5 s / 4 in the mean, a
    backward pass twice that. Without stragglers: 1.125 + 0.1 + 1.125 + 2.25 + 0.1 + 2.25 + 0.8 = 7.75 s.
    """
    job = read_job_trace(str(file))
    assert (job.stages, job.replicas, job.steps) == (2, 2, (7,))
    told = straggler_figures(job, "replica")
    assert told.recorded_s == pytest.approx((8.5,))
    assert told.played_s == pytest.approx((8.5,))
    assert told.without_delays_s == pytest.approx((8.5,))
    assert told.ideal_s == pytest.approx(7.75)
    assert told.slowdown == pytest.approx(8.5 / 7.75)
    # Replica 1 with its own times is the whole step. Replica 0 with its own is faster than the mean: the other decides.
    assert told.by_part == pytest.approx({"replica 1": 8.5 / 7.75, "replica 0": 1.0})
    assert next(iter(straggler_figures(job, "kind").by_part)) == "backward-compute"
    assert straggler_figures(job, "stage").by_part["stage 1"] > 1


def steps_of_three_replicas() -> list[dict[str, Any]]:
    """Return two steps of a job of one stage and three replicas, which reduce gradients and then update for 0.2 s.

    In step 3 replica 1 begins 0.2 s late, and replica 2 pauses for 0.5 s between its passes. Its backward pass takes
    4 s, all others 2 s, forward passes 1 s. In step 4 only replica 2's reduction is slow: 1.7 s, all others 0.5 s.
    """
    #: Step, replica, and the starts of its passes, of the reduction and of the update.
    times = [
        (3, 0, 0.0, 1.0, 3.0, 6.0), (3, 1, 0.2, 1.2, 3.2, 6.0), (3, 2, 0.0, 1.5, 5.5, 6.0),
        (4, 0, 10.0, 11.0, 13.0, 13.5), (4, 1, 10.0, 11.0, 13.0, 13.5), (4, 2, 10.0, 11.0, 13.0, 14.7),
    ]  # fmt: skip
    return [
        {"dp_rank": replica, "stage": 0, "step": step, "optype": kind, "start_ts": start, "duration": end - start}
        | {"seq_id": 0, "mc": 0}
        for step, replica, forward, backward, reduction, update in times
        for kind, start, end in (
            ("forward-compute", forward, forward + 1.0),
            ("backward-compute", backward, reduction),
            ("grads-reduce-scatter", reduction, update),
            ("optimizer", update, update + 0.2),
        )
    ]


def test_delays_steps_and_medians_worked_out_by_hand(tmp_path: Path) -> None:
    """Without delays replica 2 comes to step 3's reduction after 1 + 4 s: 5.7 s with 0.5 and 0.2. Step 4 has no delays.

    A usual backward pass takes the mean, (5 * 2 + 4) / 6 = 7/3 s. A usual reduction takes the median, 0.5 s, where the
    mean would be 0.7. So the usual step takes 1 + 7/3 + 0.5 + 0.2 s.

    With their own times alone backward passes make 5.7 s of step 3, and 1 + 2 + 0.7 of step 4. Reductions make step 4
    1.2 s longer than usual. Replica 2 does both: 5.7 s, and then 1.2 s more than usual, as it waits for the usual
    backward passes of the others. Replica 0, forward passes and the optimizer make the usual step.
    """
    path = tmp_path / "job.parquet"
    pd.DataFrame(steps_of_three_replicas()).to_parquet(path)
    job = read_job_trace(str(path))
    usual_s = 1 + 7 / 3 + 0.5 + 0.2
    told = straggler_figures(job, "kind")
    assert told.steps == (3, 4)
    assert told.recorded_s == pytest.approx((6.2, 4.9))
    assert told.played_s == pytest.approx((6.2, 4.9))
    assert told.without_delays_s == pytest.approx((5.7, 4.9))
    assert told.ideal_s == pytest.approx(usual_s)
    assert told.delays == pytest.approx((6.2 + 4.9) / (5.7 + 4.9))
    assert told.slowdown == pytest.approx((5.7 + 4.9) / 2 / usual_s)
    assert told.by_part == pytest.approx(
        {
            "backward-compute": (5.7 + 3.7) / 2 / usual_s,
            "grads-reduce-scatter": (usual_s + 0.6) / usual_s,
            "forward-compute": 1.0,
            "optimizer": 1.0,
        }
    )
    assert straggler_figures(job, "replica").by_part == pytest.approx(
        {"replica 2": (5.7 + usual_s + 1.2) / 2 / usual_s, "replica 0": 1.0, "replica 1": 1.0}
    )


def test_ends_of_a_hand_over_are_one_meeting(file: Path) -> None:
    """Both ends name the pair by its lower stage, whichever way it goes; a reduction is its stage's own."""
    ops = {(op.kind, op.stage): op.meeting for op in read_job_trace(str(file)).ops}
    assert ops["forward-send", 0] == ops["forward-recv", 1] == JobMeeting("pair", "forward", 0, 0)
    assert ops["backward-send", 1] == ops["backward-recv", 0] == JobMeeting("pair", "backward", 0, 0)
    assert ops["grads-reduce-scatter", 1] == JobMeeting("stage", "grads-reduce-scatter", 0, 1)
    assert ops["optimizer-clip-main-grad", 0] == ops["optimizer-clip-main-grad", 1]
    assert ops["optimizer", 0] is None


def test_the_command_prints_and_writes(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        main(["trace", "stragglers", str(file), "--by", "stage", "--json", str(out)])
    assert ended.value.code == 0
    assert "without delays and stragglers" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["ideal_s"] == pytest.approx(7.75)
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/traces.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| `stragglers` |")]
    assert {key for key in result if f"`{key}`" not in row} == {"schema_version", "command", "warnings"}
    with pytest.raises(SystemExit) as ended:
        main(["trace", "stragglers", str(file), "--by", "rank"])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.iloc[:-1], "lack operations"),
        (lambda frame: frame.iloc[:0], "is empty"),
        (lambda frame: frame.drop(columns="stage"), "lacks columns: stage"),
        (
            lambda frame: frame.assign(rank=0, lane="compute", posted_s=0.0, start_s=0.0, end_s=1.0),
            "is the timeline of one step, as run --timeline writes it",
        ),
        (lambda frame: frame.assign(optype=frame["optype"] + "s"), "operations that are not known"),
        (lambda frame: frame.assign(mc=1), "operations that are not known"),
        (lambda frame: frame.assign(duration=-1.0), "negative numbers"),
        (lambda frame: frame.assign(start_ts=np.nan), "no number"),
    ],
)  # fmt: skip
def test_other_files_are_refused(file: Path, change: Any, message: str) -> None:
    change(pd.read_parquet(file)).to_parquet(file)
    with pytest.raises(InputError, match=message):
        read_job_trace(str(file))


def test_what_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "no.parquet"
    path.write_text("hello")
    for name in (path, tmp_path / "none.parquet"):
        with pytest.raises(InputError, match="cannot be read"):
            read_job_trace(str(name))


@pytest.mark.parametrize("name", ["ST", pytest.param("SE", marks=pytest.mark.slow)])
def test_bytedance_has_the_same_figures(name: str) -> None:
    """The artifact's results, of two jobs' first steps, to 0.1 %: recorded, without delays, without stragglers."""
    path, result = (SHARED / f"bytedance_{what}" for what in (f"trace-{name}.parquet", f"result-{name}.json"))
    if not (path.exists() and result.exists()):
        pytest.skip("the files of another project are not here")
    job, published = read_job_trace(str(path)), json.loads(result.read_text())
    times = job_times(job)
    ideal = ideal_work(job, times.work_s)
    step = str(job.steps[0])
    assert job.step_s[0] == pytest.approx(published["step_t_base"][step], rel=1e-6)
    assert play(job, times.delay_s[0], times.work_s[0]) == pytest.approx(job.step_s[0], rel=1e-3)
    bare_s = play(job, np.zeros_like(ideal), times.work_s[0])
    assert bare_s == pytest.approx(published["step_t_nodelay"][step], rel=1e-3)
    assert play(job, np.zeros_like(ideal), ideal) == pytest.approx(published["step_t_noblk"][step], rel=1e-3)
