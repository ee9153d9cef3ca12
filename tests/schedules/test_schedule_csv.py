"""Schedules as CSV, in the text form of torch.distributed.pipelining."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.cli import app
from simulator.config import load_workload
from simulator.engine.invariants import check
from simulator.errors import DeadlockError, InputError
from simulator.schedules import SCHEDULES, from_csv, to_csv
from tests.support.grids import one_in
from tests.support.jobs import job
from tests.support.quick import play_undisturbed


def main(arguments: list[str]) -> int | str | None:
    """The exit status of a command."""
    with pytest.raises(SystemExit) as done:
        app.main(arguments)
    return done.value.code


#: 1F1B of two ranks and two micro-batches.
PLAIN = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
#: The same with its communication, as torch's _add_send_recv writes it.
POSTED = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "mine.csv"


@pytest.mark.parametrize("name", one_in(2, SCHEDULES))
def test_every_schedule_round_trips(name: str, written: Path) -> None:
    """Written and read, it is the same order, on the same ranks, and plays alike where torch's runtime plays both."""
    schedule = SCHEDULES[name]
    result = simulator.schedule(name, 4, 8, comm=0.25)
    text = result.to_csv()
    read = from_csv(text, "read")
    v = schedule.chunks or 2
    assert to_csv(read.order(4, 8, v), joined=read.joined) == text
    assert read.size == (4, 8, v)
    assert (read.copies, read.splits, read.joined) == (schedule.copies, schedule.splits, schedule.joined)
    assert all(read.rank_of(s, 4) == schedule.rank_of(s, 4) for s in range(4 * v * schedule.copies))
    written.write_text(text)
    again = simulator.schedule(str(written), comm=0.25).to_dict()
    known = result.to_dict()
    # A file is one step, so the period between steps is the schedule's alone.
    alike = schedule.posts_ahead and not schedule.steady
    same = ["order", "peak_activations", *(("makespan", "bubble_ratio") if alike else ())]
    assert {key: again[key] for key in same} == {key: known[key] for key in same}


def test_communication_stands_where_the_author_put_it(written: Path) -> None:
    """F 1, B 2, transfers 0.25, by hand. Rank 0: F0 0-1, F1 1-2. Rank 1 gets F0 at 1.25, runs it until 2.25; RECV_F1 is
    written after 1F0, so that it starts at 2.25 and not at 2; B0 until 4.25, then F1 until 5.25, B1 until 7.25. Rank 0
    has B0 from 4.5, after RECV_B0, until 6.5; B1 arrives at 7.5 and ends at 9.5."""
    written.write_text(POSTED)
    result = simulator.schedule(str(written), comm=0.25)
    assert result.to_csv() == POSTED
    assert result.to_dict()["makespan"] == pytest.approx(9.5)
    assert result.to_dict()["order"] == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    spans = result.spans
    assert spans.start_s[spans.labels.index("1RECV_F1")] == pytest.approx(2.25)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_csv_is_written_whole_or_not_at_all(
    raised: BaseException | type[BaseException], written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted, or without room, what stood there stays, and nothing is beside it."""
    arguments = ["schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--quiet", "--csv", str(written)]
    assert main(arguments) == 0
    before = written.read_text()

    class Failing(io.FileIO):
        def write(self, content: Any) -> int:
            super().write(content[:5])
            raise raised

    monkeypatch.setattr(os, "fdopen", lambda handle, mode: Failing(handle, mode))
    arguments[1] = "1f1b"
    assert main(arguments) == (130 if raised is KeyboardInterrupt else 2)
    assert written.read_text() == before
    assert list(written.parent.iterdir()) == [written]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("text", [PLAIN, POSTED])
def test_a_workload_runs_a_schedule_file(text: str, overlap: bool, tmp_path: Path) -> None:
    """Beside the workload, or by --set; a plain 1F1B from a file takes as long as the shipped one.

    Transfers take nothing from kernels here.
    """
    (tmp_path / "mine.csv").write_text(text)
    changes = {"overlap": {"p2p": overlap}}
    workload = job(parallelism__pp=2, training__global_batch=2) | {}
    workload["parallelism"] |= changes | {"schedule": str(tmp_path / "mine.csv")}
    result = play_undisturbed(load_workload(workload))
    check(result.program, result.spans)
    workload["parallelism"]["schedule"] = "1f1b"
    shipped = play_undisturbed(load_workload(workload)).to_dict()["step_time_s"]
    assert result.to_dict()["step_time_s"] == pytest.approx(shipped, rel=0.05)
    if overlap and text == PLAIN:
        assert result.to_dict()["step_time_s"] == shipped


def test_a_file_is_found_beside_the_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.csv").write_text(PLAIN)
    (tmp_path / "job.yaml").write_text(
        "model: {layers: 4, hidden: 256, heads: 8, vocab: 1024}\ntraining: {seq: 128, global_batch: 2}\n"
        "parallelism: {pp: 2, schedule: mine.csv}\ncluster: dgx_a100\n"
    )
    monkeypatch.chdir("/")
    assert load_workload(tmp_path / "job.yaml").parallelism.pipeline_schedule.name == "mine.csv"


def test_a_file_that_begins_with_a_byte_order_mark_is_read(written: Path) -> None:
    """Spreadsheets write one in front of UTF-8."""
    written.write_text(PLAIN, encoding="utf-8-sig")
    assert simulator.schedule(str(written)).to_csv() == simulator.schedule("1f1b", 2, 2).to_csv()


def test_chunks_come_from_the_file(written: Path) -> None:
    written.write_text(simulator.schedule("zb_v", 2, 4).to_csv())
    workload = load_workload(job(parallelism__pp=2, parallelism__schedule=str(written), training__global_batch=4))
    assert workload.parallelism.vpp == 2
    assert workload.parallelism.stages_of(0) == (0, 3)


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",  # rank 0 wants B0 before it makes F1, for which rank 1 waits
        "0B0,0F0\n",  # a backward before its own forward
        "0F0,0W0,0I0\n",
        "0F0,0RECV_B0,0B0,0SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n",  # sends what it has only when it got the answer
        "1F0,0F0,0B0,1B0\n",  # two stages of one rank, the second first
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_an_order_that_cannot_be_run_ends_in_a_report(text: str, overlap: bool, written: Path) -> None:
    written.write_text(text)
    with pytest.raises(DeadlockError, match="cannot go on"):
        simulator.schedule(str(written))
    assert main(["schedule", str(written)]) == 2
    read = from_csv(text, "read")
    assert read.size is not None
    p, m, _ = read.size
    workload = job(parallelism__pp=p, parallelism__schedule=str(written), training__global_batch=m)
    workload["parallelism"] |= {"overlap": {"p2p": overlap}}
    if p > 1:
        with pytest.raises(DeadlockError, match="cannot go on"):
            simulator.run(workload)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0X0\n", "row 1, cell 2: cannot use '0X0'"),
        ("0F0,0UNSHARD\n", "cannot use '0UNSHARD'"),
        ('0F0,0B0\n1F0,"1B0\n', "row 2: cannot be read as CSV: unexpected end of data"),
        (140_000 * "0" + "F0,0B0\n", "row 1: cannot be read as CSV: field larger"),
        ("0F0\n", "need one F and either one B or one I and one W; there is 0F0"),
        ("0F0,0I0,0W0,0B0\n", "there is 0B0, 0F0, 0I0, 0W0"),
        ("0F0,0B0,0B0\n", "there is 0B0, 0B0, 0F0"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is on rank 0 and on rank 1"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no actions"),
        ("", "has no actions"),
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", "3 stages do not divide over 2 ranks"),
        (POSTED.replace("0SEND_F1,", ""), "0SEND_F1 is missing"),
        (POSTED.replace("0SEND_F1", "0SEND_F0"), "0SEND_F0 is not needed there"),
    ],
)
def test_a_file_that_means_nothing_says_where(text: str, words: str, written: Path) -> None:
    written.write_text(text)
    with pytest.raises(InputError) as caught:
        simulator.schedule(str(written))
    assert words in str(caught.value)
    assert str(written) in str(caught.value)


@pytest.mark.parametrize(
    ("older", "today"),
    [
        ("0F0,0B0,0W0\n", "0F0,0I0,0W0\n"),  # B beside W is the input gradient
        ("0F0,0F1,0BW0,0B1,0W1\n", "0F0,0F1,0B0,0I1,0W1\n"),
        ("0F0,0BW0\n", "0F0,0B0\n"),  # BW is both at once
        (POSTED.replace("0B", "0BW").replace("1B", "1BW"), POSTED),  # SEND_B and RECV_B are the same in both
    ],
)
def test_letters_of_pytorch_2_5_are_read(older: str, today: str) -> None:
    read, wanted = from_csv(older, "older"), from_csv(today, "today")
    assert wanted.size is not None
    assert read.size == wanted.size
    assert read.order(*wanted.size) == wanted.order(*wanted.size)
    assert read.rows == wanted.rows


def test_a_file_of_other_sizes_is_refused(written: Path) -> None:
    written.write_text(PLAIN)
    with pytest.raises(InputError, match=r"is of 2 pipeline ranks of 1 chunk and 2 micro-batches, not of 2 .* 8 micro"):
        simulator.schedule(str(written), microbatches=8)
    with pytest.raises(InputError, match="global_batch: 2"):
        load_workload(job(parallelism__pp=2, parallelism__schedule=str(written), training__global_batch=8))
    with pytest.raises(InputError, match="is of 2 pipeline ranks"):
        load_workload(job(parallelism__pp=4, parallelism__schedule=str(written)))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the schedule"):
        load_workload(job(parallelism__pp=2, parallelism__schedule=str(tmp_path / "none.csv")))
    assert main(["schedule", str(tmp_path / "none.csv")]) == 2
    assert main(["schedule", "1f1b", "--stages", "2"]) == 2


def test_the_command_writes_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    assert main(["schedule", "dualpipe_v", "--stages", "2", "--microbatches", "4", "--csv", str(first)]) == 0
    assert main(["schedule", str(first), "--csv", str(second)]) == 0
    assert "(0F3;3B1)OVERLAP_F_B" in first.read_text()
    assert first.read_text() == second.read_text()
    assert "2 ranks, 4 micro-batches, 2 chunks per rank" in capsys.readouterr().out


def test_costs_of_a_split_backward(tmp_path: Path) -> None:
    """I = B - W; W is half of B where it is not given, and never more than B."""
    out = tmp_path / "out.json"
    command = ["schedule", "zb_h1", "--stages", "2", "--microbatches", "1", "--quiet", "--json", str(out), "--cost"]
    # One micro-batch on two ranks: F F I I W on the longest way, 1 + 1 + 2.5 + 2.5 + 0.5.
    assert main([*command, "F=1,B=3,W=0.5"]) == 0
    assert json.loads(out.read_text())["makespan"] == pytest.approx(7.5)
    assert main([*command, "B=3"]) == 0
    assert json.loads(out.read_text())["cost"] == {"forward": 1, "backward": 3, "weight": 1.5, "comm": 0}
    assert main([*command, "F=1,B=1,W=2"]) == 2
