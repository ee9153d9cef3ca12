"""The set of runs that are simulated and made: of every kind, in both halves, and no two alike."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from calibration.commits import sha256
from calibration.compare.comparison import work_of
from calibration.workloads import is_of, texts_of
from simulator.api import run
from simulator.config import Workload, load_workload

RUNS = Path(__file__).resolve().parents[2] / "calibration" / "runs"
RESULTS = RUNS.parent / "results"
#: Those of plain PyTorch; `frameworks`, `fp8` and `hosts` have those of the code of others.
FILES = sorted(path for path in RUNS.glob("*/*.yaml") if path.parent.name not in ("frameworks", "fp8", "hosts"))
PREDICTED = [path for path in FILES if path.parent.name != "fit"]


@cache
def workloads() -> dict[Path, Workload]:
    """Return the workload of each of `FILES`, read once."""
    return {path: load_workload(path) for path in FILES}


def kinds(workload: Workload) -> set[str]:
    """What a run is an example of."""
    layout, axes = workload.parallelism, set()
    axes |= {axis for axis in ("tp", "pp", "dp") if getattr(layout, axis) > 1}
    found = {"dense"} if not axes else set()
    if axes == {"dp"} and layout.ep == 1:
        found.add("fsdp" if layout.zero == 3 else "ddp" if layout.overlap.grad_reduce else "ddp without overlap")
    if axes == {"tp"}:
        found.add(f"tp{layout.tp}")
        found |= {"sp"} if layout.sequence_parallel else {"tp without sp"}
    if axes == {"pp"}:
        found |= {f"pp{layout.pp}", layout.schedule}
    if len(axes) > 1:
        found.add(" x ".join(sorted(axes)))
    if layout.ep > 1:
        found.add(f"ep{layout.ep}")
    if workload.training.recompute.granularity != "none":
        found.add("recompute")
    if workload.name.startswith("host"):
        found.add("host-bound")
    return found


EXPECTED = {
    *("dense", "ddp", "ddp without overlap", "fsdp", "tp2", "tp4", "tp8", "sp", "tp without sp", "pp2", "pp4", "pp8"),
    *("gpipe", "1f1b", "interleaved", "interleaved_zb", "zb_v", "dualpipe_v"),
    *("pp x tp", "dp x pp", "dp x tp", "dp x pp x tp", "ep2", "ep4", "ep8", "recompute", "host-bound"),
}


def test_at_least_two_of_each_kind_one_of_them_predicted_before_it_is_run() -> None:
    every = Counter(kind for workload in workloads().values() for kind in kinds(workload))
    predicted = Counter(kind for path in PREDICTED for kind in kinds(workloads()[path]))
    assert set(every) == EXPECTED
    assert min(every.values()) >= 2
    assert set(predicted) == EXPECTED, EXPECTED - set(predicted)


def test_there_are_enough_and_a_third_is_predicted() -> None:
    assert len(FILES) >= 42
    assert len(PREDICTED) >= max(14, len(FILES) / 3)
    assert len({path.stem for path in FILES}) == len(FILES)


def test_sizes_span_what_is_asked_for() -> None:
    models = [workload.model for workload in workloads().values()]
    training = [workload.training for workload in workloads().values()]
    for sizes, low, high in (
        ({model.hidden for model in models}, 1024, 12288),
        ({model.layers for model in models}, 4, 24),
        ({t.seq for t in training}, 1024, 16384),
        ({t.micro_batch for t in training}, 1, 16),
    ):
        assert (min(sizes), max(sizes)) == (low, high)
    assert {t.precision for t in training} == {"bf16"}
    assert {workload.framework.title for workload in workloads().values()} == {"pytorch"}
    for path, workload in workloads().items():
        assert (workload.n_ranks == 8) == (path.parent.name == "eight"), path.stem
        assert workload.n_ranks in (1, 2, 4, 8)
        assert workload.cluster.nodes == 1


def test_most_layouts_of_eight_gpus_do_the_same_work() -> None:
    """So that `compare` can say whether they come in the measured order."""
    work = Counter(work_of(workload) for workload in workloads().values() if workload.n_ranks == 8)
    assert max(work.values()) >= 14
    assert len(work) >= 6


def test_records_and_predictions_are_of_the_files_whose_keys_were_renamed() -> None:
    """A file that says the same by another key is the workload that was run; one that was changed is not."""
    now = {path.stem: (path, workload) for path, workload in workloads().items()}
    records = [json.loads(path.read_text()) for path in sorted((RESULTS / "runs").glob("*.json"))]
    assert len(records) > 70
    assert all(is_of(record["workload"], *now[record["name"]]) for record in records)
    rows = [
        row
        for path in sorted(RESULTS.glob("predictions*.json"))
        for row in json.loads(path.read_text())["predictions"]
        if row["name"] in now
    ]
    assert rows
    assert all(row["workload_sha256"] in texts_of(sha256(now[row["name"]][0].read_text())) for row in rows)
    assert texts_of("another") == ("another",)


def test_no_two_differ_in_their_batch_alone() -> None:
    def without_batch(workload: Workload) -> str:
        data = workload.model_dump(mode="json", exclude={"name": True, "training": {"micro_batch", "global_batch"}})
        return json.dumps(data, sort_keys=True)

    text = {path: without_batch(workload) for path, workload in workloads().items()}
    assert not [(a.stem, b.stem) for a, b in combinations(FILES, 2) if text[a] == text[b]]


def test_the_trainer_takes_them_all() -> None:
    pytest.importorskip("torch")
    from calibration.train.limits import refusal

    assert not [reason for reason in map(refusal, workloads().values()) if reason]


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_fits_with_a_tenth_to_spare_and_takes_a_sensible_time(path: Path) -> None:
    result = run(path).to_dict()
    assert result["memory"]["peak_bytes"] <= 0.9 * result["memory"]["capacity_bytes"]
    assert 0.03 <= result["step_time_s"] <= 1.5
