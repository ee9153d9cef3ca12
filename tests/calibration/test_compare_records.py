"""Records and timelines that cannot be compared, and what is said of them."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibration.__main__ import main
from calibration.commits import sha256
from calibration.compare.measured import read_measured
from calibration.compare.meetings import Meetings, meetings
from calibration.compare.record import MeasuredMemory
from calibration.compare.software import with_software
from simulator.api import run
from simulator.config import load_workload
from tests.support import runs
from tests.support.comparison import reasons_of, with_changed, with_value

pytestmark = pytest.mark.usefixtures("equal_jobs_are_played_once")


def _probes(*of_ranks: tuple[list[float], list[float]]) -> Callable[[dict[str, Any]], Any]:
    """Puts probes of all ranks, and the forward ones, into a record."""

    def change(record: dict[str, Any]) -> None:
        for rank, (whole, forward) in zip(record["ranks"], of_ranks, strict=True):
            rank["host"] = {"probe_s": whole, "probe_forward_s": forward}

    return change


GOOD = ([0.08, 0.08], [0.03, 0.03])


def test_bytes_that_earlier_runs_left_are_not_the_runs() -> None:
    assert MeasuredMemory(steady_allocated_bytes=10, left_allocated_bytes=4).run_bytes == 10 - 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_value("format", to=2), "format: no record of a run found: 2"),
        (with_value("name", to="tp2"), "is of another run"),
        (with_value("date", to=5), "date:"),
        (with_value("environment", to=[]), "environment:"),
        (with_value("step_time_s", "median", to=math.nan), "step_time_s.median: must be a finite number"),
        (with_value("step_time_s", "median", to=math.inf), "step_time_s.median"),
        (with_value("step_time_s", "median", to="abc"), "step_time_s.median"),
        (with_value("step_time_s", "median", to=-1.0), "step_time_s.median: is out of range"),
        (lambda record: record.pop("step_time_s"), "step_time_s: a required key"),
        (lambda record: record["ranks"].pop(), "ranks: not one entry for each rank"),
        (lambda record: record["ranks"].append(record["ranks"][0]), "ranks: not one entry for each rank"),
        (with_value("ranks", to={"a": 1}), "ranks"),
        (with_value("ranks", 0, "memory", "steady_allocated_bytes", to=0), "ranks[0].memory.steady_allocated_bytes"),
        (with_value("ranks", 0, "memory", "left_allocated_bytes", to=10**15), "ranks.memory.left_allocated_bytes"),
        (with_value("ranks", 0, "memory", to={}), "ranks.memory: not of all ranks alike"),
        (with_value("ranks", 1, "kernels", 0, "seconds", to=math.nan), "ranks[1].kernels[0].seconds"),
        (with_value("ranks", 1, "kernels", 0, "class", to="foo"), "ranks[1].kernels[0].class"),
        (with_value("ranks", 1, "kernels", 0, "seconds", to=1.0), "is not the timeline of this run"),
        (_probes(GOOD, ([0.08] * 3, [0.03] * 3)), "host.probe_s: not of all ranks alike"),
        (_probes(GOOD, ([0.08] * 2, [0.03])), "unlike numbers"),
        (_probes(([0.08], [0.03]), ([0.08], [0.03])), "only one probe"),
        (_probes(GOOD, ([0.0] * 2, [0.0] * 2)), "ranks[1].host.probe_s[0]: is out of range"),
        (_probes(GOOD, ([0.08] * 2, [0.08] * 2)), "not less than probe_s"),
        (_probes(GOOD, ([math.nan] * 2, [0.03] * 2)), "ranks[1].host.probe_s[0]"),
    ],
)
def test_a_record_that_cannot_be_used_has_its_reason(
    made: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    assert words in reason_of(made, with_changed(made, tmp_path, change))


def reason_of(made: Path, measured: Path) -> str:
    path = made / "ddp2.yaml"
    return read_measured(measured, path, load_workload(path), Meetings({}, {})).reason


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        ("NVIDIA H100 80GB HBM3", ""),
        ("NVIDIA H200", "run on NVIDIA H200, simulated on h100-sxm-80gb"),
        ("NVIDIA GeForce RTX 4090", "run on NVIDIA GeForce RTX 4090, simulated on h100-sxm-80gb"),
        (None, "measured without a GPU"),
    ],
)
def test_a_run_on_other_gpus_is_not_compared(gpu: str | None, reason: str, made: Path, tmp_path: Path) -> None:
    environment = {"torch": "2.11"} | ({"gpu": gpu} if gpu else {})
    assert reason_of(made, with_changed(made, tmp_path, with_value("environment", to=environment))) == reason


@pytest.mark.parametrize(
    ("nvls", "cluster", "sharp"),
    [
        (True, "hgx_h100_4gpu", True),
        (False, "hgx_h100_4gpu", None),
        (False, "dgx_h100", False),
        (True, "dgx_h100", None),
        (None, "dgx_h100", None),
    ],
)
def test_switches_sum_up_where_they_did_in_the_run(
    nvls: bool | None, cluster: str, sharp: bool | None, tmp_path: Path
) -> None:
    """The key is set where the cluster says otherwise; of a GPU alone it says nothing, nor where the command does."""
    key, changes = "cluster.node.nvlink.sharp", {"cluster": cluster}
    for name, layout in (("tp2", {"tp": 2}), ("one", {})):
        path = runs.workload(tmp_path, name, layout)
        runs.save(tmp_path, path, "failed", "2030-01-01", environment={"nvls": nvls})
        expected = {} if sharp is None or name == "one" else {key: sharp}
        assert with_software(tmp_path, path, changes) == {**changes, **expected}
        said = {**changes, key: not sharp}
        assert with_software(tmp_path, path, said) == said


def test_a_run_goes_by_the_name_that_its_workload_says(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(json.dumps({"name": "ddp2", **json.loads((made / "ddp2.yaml").read_text())}))
    measured = with_changed(made, tmp_path, with_value("workload", "sha256", to=sha256(path.read_text())))
    found = read_measured(measured, path, load_workload(path), Meetings({}, {}))
    assert (found.reason, found.record is not None) == ("", True)


def test_a_name_that_no_file_can_have_is_refused(made: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(json.dumps({"name": "a/b", **json.loads((made / "ddp2.yaml").read_text())}))
    assert main(["predict", str(path), "--out", str(tmp_path / "p.json")]) == 2
    assert "file.yaml: name: a run's files cannot be called so" in capsys.readouterr().err


def test_a_run_of_another_model_in_the_file_that_its_workload_names_is_not_compared(made: Path, tmp_path: Path) -> None:
    """The workload's text stays as it is. A key that the record does not have yet says nothing."""
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 512,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1024,
    }
    data = json.loads((made / "alone.yaml").read_text()) | {"model": {"hf_config": "config.json"}}
    path = tmp_path / "w.yaml"
    path.write_text(json.dumps(data))
    reasons = []
    for layers in (4, 5):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        if layers == 4:
            runs.record(tmp_path, path, 1.0)
            record = json.loads((tmp_path / "w.json").read_text())
            record["workload"]["resolved"] = load_workload(path).model_dump(mode="json")
            del record["workload"]["resolved"]["training"]["grad_dtype"]
            (tmp_path / "w.json").write_text(json.dumps(record))
        known = load_workload(path)
        reasons.append(read_measured(tmp_path, path, known, meetings(run(known))).reason)
    assert reasons == ["", "the workload file, or one that it names, has changed since it was run"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_value("step_time_s", "median", to=math.nan), "step_time_s.median: must be a finite number"),
        (_probes(([1e9] * 2, [5e8] * 2), ([1e9] * 2, [5e8] * 2)), "its probes give no speed of a host"),
    ],
)
def test_one_bad_record_leaves_the_others(
    made: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    with_changed(made, tmp_path, change)
    found = reasons_of(made, tmp_path)
    assert words in found["ddp2"]
    assert found["alone"] == ""


def _end(line: str, end: str) -> str:
    return f"{line.rpartition(',')[0]},{end}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text, _: text[:1], "is not the timeline of this run"),
        (lambda text, _: text + text[1:], "is not the timeline of this run"),
        (lambda text, _: [line for line in text if not line.startswith("1")], "is not the timeline of this run"),
        (lambda _, other: other, "is not the timeline of this run"),
        (lambda text, _: [*text[:40], text[40][:-30]], "line 41"),
        (lambda text, _: [text[0], _end(text[1], ""), *text[2:]], "end_s: line 2"),
        (lambda text, _: [text[0], _end(text[1], "nan"), *text[2:]], "end_s: line 2"),
        (lambda text, _: [text[0], "x" + text[1][1:], *text[2:]], "rank: line 2"),
        (lambda text, _: [text[0].replace("end_s", "stop"), *text[1:]], "lacks columns"),
        (lambda *_: [], "is no table"),
    ],
)
def test_a_timeline_that_is_not_the_runs_is_none(
    made: Path, tmp_path: Path, change: Callable[[list[str], list[str]], list[str]], words: str
) -> None:
    measured = tmp_path / "measured"
    shutil.copytree(made / "measured", measured)
    text, other = (
        gzip.decompress((measured / f"{name}.timeline.csv.gz").read_bytes()).decode().splitlines()
        for name in ("ddp2", "alone")
    )
    content = gzip.compress("\n".join(change(text, other)).encode())
    (measured / "ddp2.timeline.csv.gz").write_bytes(content)
    reason = reason_of(made, measured)
    assert words in reason
    assert "ddp2.timeline.csv.gz" in reason


@pytest.mark.parametrize("spoilt", [lambda packed: packed[: len(packed) // 2], lambda _: b"rank,stream", lambda _: b""])
def test_a_file_that_cannot_be_unpacked_is_said(made: Path, tmp_path: Path, spoilt: Callable[[bytes], bytes]) -> None:
    measured = tmp_path / "measured"
    shutil.copytree(made / "measured", measured)
    path = measured / "ddp2.timeline.csv.gz"
    path.write_bytes(spoilt(path.read_bytes()))
    assert "ddp2.timeline.csv.gz: " in reason_of(made, measured)


@pytest.mark.parametrize("text", ["", "not json", "[]", "null", '{"format": 1, "status": "ok"}'])
def test_a_file_that_is_no_record_is_said(made: Path, tmp_path: Path, text: str) -> None:
    measured = tmp_path / "measured"
    shutil.copytree(made / "measured", measured)
    (measured / "ddp2.json").write_text(text)
    assert "ddp2.json: " in reason_of(made, measured)


def test_an_unusable_call_is_refused(made: Path, tmp_path: Path, capsys: Any) -> None:
    alone = str(made / "alone.yaml")
    assert main(["compare", alone, "--measured", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert main(["compare", alone, "--measured", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert main(["predict", alone, alone, "--out", str(tmp_path / "p.json")]) == 2
    assert "two workloads of one name" in capsys.readouterr().err
    (tmp_path / "p.json").write_text("{}")
    with_file = ["--predictions", str(tmp_path / "p.json")]
    assert main(["compare", alone, "--measured", str(tmp_path), "--out", str(tmp_path / "o"), *with_file]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["compare", alone, "--measured", str(tmp_path), "--out", str(tmp_path / "o"), "--max-mean=-1"])
