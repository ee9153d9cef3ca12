"""Runs of training and the records that they leave."""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from calibration.__main__ import main
from calibration.commits import sha256
from calibration.compare.record import read_record
from calibration.train.length import Length
from calibration.train.record import RunResults
from simulator.config import load_workload
from simulator.errors import InputError
from tests.support.train_command import ENVIRONMENT, ROOT
from tests.support.training import LAYOUTS, workload

pytest.importorskip("torch")


LATE_S = 1.0


@pytest.mark.slow
def test_runs_of_one_and_two_ranks_leave_records_and_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command: one run on one rank, one on two, one that is refused, one that needs more ranks than there are."""
    monkeypatch.chdir(ROOT)  # the other rank and the workers are processes
    for name in ("PYTHONPATH", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    layouts = {"one": {}, "tp": LAYOUTS["sp"], "refused": {"cp": 2}, "large": LAYOUTS["1f1b"]}
    paths = []
    for name, layout in layouts.items():
        paths.append(tmp_path / f"file-{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(workload("llama one") | {"parallelism": layout, "name": name}))
    out = tmp_path / "out"
    command = ["train", "--device", "cpu", "--smoke", "--out", str(out), "--gpus", "2", *map(str, paths)]
    assert main(command) == 1  # two were skipped
    records = {name: json.loads((out / f"{name}.json").read_text()) for name in layouts}
    assert {name: record["status"] for name, record in records.items()} == {
        "one": "ok",
        "tp": "ok",
        "refused": "skipped",
        "large": "skipped",
    }
    assert "parallelism.cp" in records["refused"]["reason"]
    assert "more GPUs than there are" in records["large"]["reason"]
    for name, ranks in (("one", 1), ("tp", 2)):
        record = records[name]
        assert record["n_gpus"] == len(record["ranks"]) == ranks
        assert record["workload"]["text"] == (tmp_path / f"file-{name}.yaml").read_text()
        assert record["tokens_per_s"] == pytest.approx(
            record["tokens_per_step"] / record["step_time_s"]["median"], rel=1e-4
        )
        assert len(record["loss"]) == sum(record["steps"].values())
        for rank in record["ranks"]:
            classes = {kernel["class"] for kernel in rank["kernels"]}
            assert classes == {"matmul", "attention", "memory", "optimizer"} | (
                {"communication"} if ranks > 1 else set()
            )
            assert all(kernel["seconds"] >= 0 and kernel["launches"] > 0 for kernel in rank["kernels"])
        with gzip.open(out / f"{name}.timeline.csv.gz", "rt") as stream:
            rows = list(csv.DictReader(stream))
        assert {int(row["rank"]) for row in rows} == set(range(ranks))
        assert min(float(row["start_s"]) for row in rows) == 0.0
        assert all(float(row["end_s"]) >= float(row["start_s"]) for row in rows)
    # Both trained the same model.
    assert records["tp"]["loss"] == pytest.approx(records["one"]["loss"], rel=1e-5)
    written = {path: path.stat().st_mtime_ns for path in out.glob("*.gz")}
    assert main(command) == 1
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.gz")} == written


def meeting(rank: int, folder: str) -> None:
    """Two ranks, of which the second's host is probed for long between steps; the first writes how long steps took."""
    import torch
    import torch.distributed as dist

    from calibration.train import run
    from calibration.train.process_groups import ProcessGroups

    def probe(device: torch.device, samples: int) -> list[tuple[float, float]]:
        time.sleep(LATE_S * rank)
        return []

    run.probe = probe
    torch.set_num_threads(1)
    store, limit = dist.FileStore(f"{folder}/store", 2), timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    known = load_workload(workload("llama ddp"))
    groups = ProcessGroups.from_layout(known.parallelism, rank)
    assert groups is not None
    found = run._train(
        known, groups, torch.device("cpu"), Length(1, settle_s=0.0, row_s=0.0, least=2, most=4, seconds=0.0)
    )
    if rank == 0:
        Path(folder, "steps.json").write_text(json.dumps(found.events))
    dist.barrier()
    os._exit(0)  # as workers end: not in the destructors of groups


@pytest.mark.slow
def test_no_rank_begins_a_step_before_all_are_there(tmp_path: Path) -> None:
    """Else the first one's step would count what the others still do before it, as probes of their hosts."""
    import torch.multiprocessing as mp

    mp.start_processes(meeting, (str(tmp_path),), 2, start_method="spawn")
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert len(steps) == 2
    assert max(steps) < LATE_S / 2


@pytest.mark.slow
def test_the_first_rank_of_a_job_is_trained_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process stands for two ranks of tensor parallelism, which are not there; the record says so by its ranks."""
    monkeypatch.chdir(ROOT)  # the worker is a process
    for name in ("PYTHONPATH", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    path = tmp_path / "pair.yaml"
    path.write_text(yaml.safe_dump(workload("llama one") | {"parallelism": LAYOUTS["sp"], "name": "pair"}))
    command = ["train", "--device", "cpu", "--smoke", "--alone", "--gpus", "1", "--out", str(tmp_path), str(path)]
    assert main(command) == 0
    record = json.loads((tmp_path / "pair.json").read_text())
    assert record["status"] == "ok"
    assert record["n_gpus"] == len(record["ranks"]) == 1
    assert record["workload"]["resolved"]["parallelism"]["tp"] == 2
    assert record["command"].endswith("--alone --smoke")


def test_runs_that_were_not_reached_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every workload has its record, also where the worker is killed before its first; the next command tries them."""
    from calibration.measure import agent

    monkeypatch.setattr(agent, "PYTHON", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    path, out = tmp_path / "one.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(workload("llama one")))
    assert main(["train", "--device", "cpu", "--smoke", "--out", str(out), "--gpus", "1", str(path)]) == 1
    record = json.loads((out / "one.json").read_text())
    assert record["status"] == "skipped"
    assert "SIGKILL" in record["reason"]
    records = RunResults(out, {"one": path}, "train", gpu=False)
    assert not records.stands("one", failed_too=True)


def _records(folder: Path, *, gpu: bool, warm_up: int) -> RunResults:
    return RunResults(folder, {"w": folder / "w.yaml"}, "train", gpu=gpu, warm_up=warm_up)


@pytest.mark.parametrize(
    ("on", "steps", "gpu", "warm_up", "stands"),
    [
        ({"gpu": "NVIDIA H200"}, 3, True, 3, True),
        ({"gpu": "NVIDIA H200"}, 3, True, 1, True),
        ({"gpu": "NVIDIA H200"}, 1, True, 3, False),
        ({"gpu": "NVIDIA H200"}, 3, False, 1, True),
        ({}, 3, True, 3, False),
        ({}, 1, False, 1, True),
    ],
)
def test_what_was_tried_does_not_stand_for_a_run(
    on: dict[str, Any], steps: int, gpu: bool, warm_up: int, stands: bool, tmp_path: Path
) -> None:
    """A run on GPUs stands for an attempt, an attempt without them or of two steps not for a run."""
    (tmp_path / "w.yaml").write_text("model: {}")
    made = _records(tmp_path, gpu=gpu, warm_up=warm_up)
    made.start(on)
    made.add({"name": "w", "steps": {"warm_up": steps}})
    assert _records(tmp_path, gpu=gpu, warm_up=warm_up).stands("w", failed_too=True) == stands


@pytest.mark.parametrize(
    ("length", "order"),
    [
        (Length(1, settle_s=0.1, row_s=0.2, least=2, seconds=0.4), "w" + "sstttt" + "p" + "sstttt"),
        (Length(1, settle_s=0.1, row_s=0.0, least=3, seconds=0.0), "w" + "sst" + "psst" + "psst"),
        (Length(2, settle_s=0.0, row_s=0.2, least=1, most=3, seconds=9.0), "ww" + "ttt"),
        (Length(2, settle_s=0.0, row_s=0.0, least=1, most=1, seconds=0.0), "wwt"),
    ],
)
def test_steps_are_timed_in_rows_behind_steps_that_are_not(
    length: Length, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that has rested while its host was probed is faster, so that no step is timed right behind a probe (p).

    Other steps (s) go before for long enough. Steps take 0.06 s here.
    """
    import torch

    from calibration.train import run
    from calibration.train.process_groups import ProcessGroups

    done, clock = [], [0.0]

    class Still:
        def __init__(self, *_: object) -> None:
            self.made = 0

        def step(self) -> Any:
            self.made += 1
            clock[0] += 0.06
            done.append("w" if self.made <= length.warm_up else "s")
            return torch.zeros(())

        def close(self) -> None: ...

    def timed(step: Callable[[], Any], *_: object, **__: object) -> tuple[float, float, Any]:
        loss = step()
        done[-1] = "t"
        return 0.06, 0.06, loss

    def probe(*_: object) -> list[tuple[float, float]]:
        done.append("p")
        return [(1.0, 2.0)]

    monkeypatch.setattr(run, "Trainer", Still)
    monkeypatch.setattr(run, "_timed", timed)
    monkeypatch.setattr(run, "probe", probe)
    monkeypatch.setattr(run, "profiled", lambda step, *_, **__: (step(), [])[1])
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock[0])
    known = load_workload(workload("llama one"))
    groups = ProcessGroups.from_layout(known.parallelism, 0)
    assert groups is not None
    found = run._train(known, groups, torch.device("cpu"), length)
    assert "".join(done) == order + "t"  # the one under the profiler
    assert len(found.events) == order.count("t")
    assert found.settling == order.count("s")
    assert len(found.probe) == order.count("p")


def test_a_run_of_another_model_does_not_stand(tmp_path: Path) -> None:
    """What the workload resolves to counts, not its text alone, as of an hf_config that it names."""
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(workload("llama one")))
    known = load_workload(path)
    made = RunResults(tmp_path, {"w": path}, "train", workloads={"w": known}, gpu=False)
    made.add({"name": "w", "steps": {"warm_up": 3}, "workload": {"resolved": known.model_dump(mode="json")}})
    assert made.stands("w", failed_too=True)
    other = known.model_copy(update={"model": known.model.model_copy(update={"layers": 9})})
    assert not RunResults(tmp_path, {"w": path}, "train", workloads={"w": other}, gpu=False).stands(
        "w", failed_too=True
    )


def test_workloads_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs are found by the name that the workload says, whatever its file is called."""
    paths = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for path in paths:
        path.write_text(yaml.safe_dump(workload("llama one") | {"name": "same"}))
    assert main(["train", "--device", "cpu", "--smoke", "--out", str(tmp_path / "out"), *map(str, paths)]) == 2
    assert "two workloads of one name, same" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


LEFT = {"format": 1, "name": "w", "status": "ok", "reason": "", "workload": {}, "environment": {}}


@pytest.mark.parametrize(
    "text",
    [
        *('{"format": 1, "na', "[]", "{}", '{"format": 1, "name": "w", "status": "ok"}'),
        *(json.dumps(LEFT | more) for more in ({"steps": []}, {"steps": {"warm_up": "x"}})),
    ],
)
def test_a_record_that_was_cut_off_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("model: {}")
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(InputError, match=r"w\.json"):
        _records(tmp_path, gpu=True, warm_up=3).stands("w", failed_too=True)


@pytest.mark.parametrize("wrong", [{"format": 2}, {"name": "other"}])
def test_records_are_the_same_to_train_and_to_compare(
    wrong: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that `compare` does not read does not stand for a run, whether that could be trained or not; the fix that
    is named, another folder, helps."""
    path, out = tmp_path / "w.yaml", tmp_path / "out"
    for layout in ({}, {"cp": 2}):
        path.write_text(yaml.safe_dump(workload("llama one") | {"parallelism": layout}))
        out.mkdir(exist_ok=True)
        text = json.dumps(LEFT | {"workload": {"sha256": sha256(path.read_text())}, **wrong})
        (out / "w.json").write_text(text)
        assert main(["train", "--device", "cpu", "--smoke", "--out", str(out), "--gpus", "1", str(path)]) == 2
        said = capsys.readouterr().err
        assert f"w.json: {next(iter(wrong))}: " in said
        assert "another --out" in said
        with pytest.raises(InputError) as refused:
            read_record(out, "w")
        assert f"error: {refused.value}" == said.strip()
        assert (out / "w.json").read_text() == text


def test_what_did_not_happen_takes_the_place_of_no_run_that_went_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of two steps on two ranks; then a whole one that has one rank, another workload of this name that cannot be
    trained, and one that fails. A failed run's record goes, and with it no timeline is left that is not its own."""
    path, timeline = tmp_path / "w.yaml", tmp_path / "w.timeline.csv.gz"
    content = workload("llama tp")
    path.write_text(yaml.safe_dump(content))
    made = _records(tmp_path, gpu=False, warm_up=1)
    made.start({})
    timeline.write_bytes(b"of the run")
    made.add({"name": "w", "steps": {"warm_up": 1}})
    text = (tmp_path / "w.json").read_text()
    command = ["train", "--device", "cpu", "--out", str(tmp_path), "--gpus", "1", str(path)]
    assert main(command) == 1
    assert "more GPUs than there are" in capsys.readouterr().err
    path.write_text(yaml.safe_dump(content | {"parallelism": {"cp": 2}}))
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "parallelism.cp" in said
    assert "0 trained, 1 failed or skipped" in said
    made.add({"op": "w", "error": "out of memory"})
    assert made.tell() == 1
    assert "failed w: out of memory\n  the record there stays" in capsys.readouterr().err
    assert ((tmp_path / "w.json").read_text(), timeline.read_bytes()) == (text, b"of the run")
    (tmp_path / "w.json").unlink()
    made.add({"op": "w", "error": "out of memory"})
    assert json.loads((tmp_path / "w.json").read_text())["status"] == "failed"
    assert not timeline.exists()


@pytest.mark.parametrize("name", ["n" * 239, "n" * 240, "n" * 300, "\u00f6" * 120])
def test_a_name_that_no_file_can_have_is_a_reason(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files may be called so for 255 bytes, of which the timeline's ending is 16."""
    path, out = tmp_path / "w.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(workload("llama one") | {"name": name, "parallelism": {"cp": 2}}))
    assert main(["train", "--device", "cpu", "--smoke", "--out", str(out), str(path)]) == 1
    too_long = len(name.encode()) > 239
    assert ("at most 239 bytes" in capsys.readouterr().err) == too_long
    assert (out / f"{'w' if too_long else name}.json").exists()
    renamed = path.rename(tmp_path / f"{'n' * 250}.yaml")
    assert main(["train", "--device", "cpu", "--smoke", "--out", str(out), str(renamed)]) == (2 if too_long else 1)


@pytest.mark.parametrize("option", ["--seconds=nan", "--seconds=-1", "--limit=inf", "--limit=0"])
def test_seconds_are_finite(option: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(tmp_path / "w.yaml"), "--out", str(tmp_path), option])
