"""Plans find the fewest GPUs that an exhaustive simulation finds, though more GPUs need not be faster."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.cli.app import main
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.planning.gpu_counts import CountRange, least_gpus, whole_nodes
from simulator.planning.result import PlanResult, why_not
from tests.support.searches import LARGE, figures_of, space_on
from tests.support.sweeps import SMALLEST, write_job

#: Few layouts on each number of GPUs. Three stages do not divide 8 layers: 24 GPUs have none with tp 8, and 12 none.
FIXED: dict[str, list[Any]] = {
    "cp": [1], "micro_batch": [1], "recompute": ["full"], "zero": [0], "vpp": [1], "schedule": ["1f1b"],
    "tp": [1, 4, 8],
}  # fmt: skip
COUNTS = [1, 2, 4, 8, 16, 24, 32]
#: So many tokens that a step of one second makes a run of one day.
TOKENS = 86400 * 8 * 2048


@pytest.fixture(scope="module")
def exhaustive() -> dict[int, float]:
    """Step time of the fastest layout that fits on each number of GPUs, of all layouts simulated."""
    best: dict[int, float] = {}
    for gpus in COUNTS:
        each = [figures_of(load_workload(LARGE, changes)) for changes in space_on(gpus, **FIXED).layouts()]
        times = [figures["step_time_s"] for figures in each if figures["fits"]]
        best |= {gpus: min(times)} if times else {}
    return best


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all plans of this module, so that no layout is simulated twice."""
    return tmp_path_factory.mktemp("plans") / "plans.db"


def planned(database: Path | None, workload: Any = LARGE, **options: Any) -> PlanResult:
    changes = {"training.total_tokens": TOKENS}
    return simulator.plan(workload, **{"fix": FIXED, "jobs": 1, "out": database, "set": changes, **options})


def test_every_number_has_the_best_of_all_its_layouts(exhaustive: dict[int, float], database: Path) -> None:
    """Days are seconds of a step, by the choice of tokens; speed-ups are over the first row with a layout."""
    result = planned(database, gpus=COUNTS)
    best = {row.gpus: row.best.step_time_s for row in result.rows if row.best}
    assert best == exhaustive
    assert len(best) < len(COUNTS)
    table = [row for row in result.table_rows if "days" in row]
    assert [row["days"] for row in table] == pytest.approx(list(exhaustive.values()))
    first = next(iter(exhaustive.values()))
    assert [row["speedup"] for row in table] == pytest.approx([first / one for one in exhaustive.values()])


@pytest.mark.parametrize("slack", [0.999, 1.001])
def test_the_fewest_gpus_are_those_of_the_exhaustive_simulation(
    exhaustive: dict[int, float], database: Path, slack: float
) -> None:
    """For ends just below and above the best steps of three numbers: the first number whose best step is in time."""
    for step_time_s in (exhaustive[4], exhaustive[16], min(exhaustive.values())):
        days = slack * step_time_s
        first = next((gpus for gpus, best_s in exhaustive.items() if best_s <= days), None)
        fewest = planned(database, between=(1, 32), days=days).fewest({})
        assert (fewest.gpus if fewest else None) == first


def test_what_is_ruled_out_has_its_reason(exhaustive: dict[int, float], database: Path) -> None:
    """One GPU lacks memory, 24 GPUs have no layout, and 32 are too slow for nine tenths of their time."""
    assert 24 not in exhaustive
    rows = planned(database, gpus=COUNTS).to_dict()["settings"][0]["rows"]
    every = {row["n_gpus"]: row["why"] for row in rows}
    assert every[1].startswith("none fits in memory: each lacks")
    assert every[24] == "no legal layout"
    late = planned(database, gpus=[32], days=0.9 * exhaustive[32]).rows[0]
    assert late.best is None
    assert "too slow" in why_not(late)


def test_more_finds_the_next_number_with_a_layout(database: Path) -> None:
    """After 16 GPUs come 24, which have none, and 32, for which the search goes on; layouts may then be slower."""
    rows = planned(database, gpus=[16], more=1).rows
    assert [(row.gpus, row.is_legal) for row in rows] == [(16, True), (24, False), (32, True)]


def test_no_layout_is_beaten_by_one_of_the_front(database: Path) -> None:
    """Every simulated layout that fits is on the front, or one of the front is as good in all respects."""
    result = planned(database, gpus=COUNTS, set={"training.total_tokens": TOKENS, "cluster.price_per_gpu_hour": 2.0})

    def losses(one: Any) -> list[float]:
        return [one["step_time_s"], -one["headroom_bytes"], one["n_gpus"], one["cost"]]

    front = result.pareto({})
    simulated = [one.outcome.figures for row in result.rows for one in row.search.ranking.fitting]
    assert {one["n_gpus"] for one in front} > {4}
    for figures in simulated:
        assert any(all(a <= b for a, b in zip(losses(one), losses(figures), strict=True)) for one in front)
    for one, other in itertools.permutations(front, 2):
        assert any(a < b for a, b in zip(losses(one), losses(other), strict=True))


def test_each_value_of_a_varied_key_has_rows_of_its_own() -> None:
    """Cards of a tenth of the speed between nodes make the step of two nodes slower, and not that of one."""
    key = "cluster.node.nics.bandwidth_bps"
    fixed = {**FIXED, "tp": [8], "pp": [1]}
    result = planned(None, gpus=[8, 16], vary={key: [200e9, 20e9]}, fix=fixed)
    fast, slow = ([row.best.step_time_s for row in result.rows_of({key: value}) if row.best] for value in (200e9, 20e9))
    assert slow[0] == pytest.approx(fast[0])
    assert slow[1] > fast[1]


def test_no_simulated_step_needs_fewer_gpus_than_the_peak_allows(exhaustive: dict[int, float]) -> None:
    """The floor of a number's best step is at most that number; half the time needs twice as many, but for rounding."""
    for gpus, step_time_s in exhaustive.items():
        assert least_gpus(load_workload(LARGE), step_time_s) <= gpus
    few, many = (least_gpus(load_workload(LARGE), seconds) for seconds in (0.01, 0.001))
    assert 10 * (few - 1) < many <= 10 * few


def test_a_cluster_of_a_fixed_size_has_no_more_gpus() -> None:
    groups = {"name": "two", "groups": [{"count": 2, "node": "dgx_a100"}]}
    workload = load_workload({**SMALLEST, "cluster": groups}, {"training.global_batch": 16})
    assert list(whole_nodes(workload, CountRange(4, 100))) == [4, 8, 16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is no number of GPUs to plan for"),
        ({"gpus": [8], "between": (1, 8)}, "is given beside a range"),
        ({"gpus": [0]}, "must be a whole number"),
        ({"between": (8, 4)}, "is no range"),
        ({"gpus": [8], "days": 0}, "is too short a run"),
        ({"days": 3.0, "set": {}}, "the length of the run is needed"),
        ({"gpus": [8], "more": -1}, "must be a whole number"),
        ({"gpus": [8], "vary": {"parallelism.tp": [1, 2]}}, "is what layouts differ in"),
        ({"gpus": [8], "vary": {"cluster.node.nics.speed": [1]}}, "unknown key"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(None, **options)


def test_the_command_prints_the_answer_and_writes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A day is enough for a tiny job on one GPU; a thousandth of the time of that step is not, on any number."""
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    words = ["plan", "tiny.yaml", "--tokens", "1M", "--price", "2", "--fix", "recompute=none", "--jobs", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--days", "1", "--json", "p.json", "--csv", "p.csv"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert out.startswith("tiny.yaml: the fewest for 1 days are 1 GPU; ")
    setting = json.loads(Path("p.json").read_text())["settings"][0]
    assert setting["fewest_gpus"] == 1
    assert setting["rows"][0]["figures"]["cost"] == pytest.approx(2 * setting["rows"][0]["figures"]["gpu_hours"])
    assert len(Path("p.csv").read_text().splitlines()) == 2
    with pytest.raises(SystemExit) as ended:
        main([*words, "--days", "1e-6", "--gpus", "1..2"])
    assert ended.value.code == 0
    assert "no number of GPUs that was tried is enough" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--tokens", "many", "--days", "3"], ["--gpus", "8-16"], ["--gpus", "8..x"]])
def test_numbers_that_are_none_end_with_2(
    options: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "gpt22b_tp8", *options])
    assert ended.value.code == 2
    assert "number" in capsys.readouterr().err
