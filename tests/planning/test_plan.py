"""Plans find the fewest GPUs that an exhaustive simulation finds, though more GPUs need not be faster."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.cli.app import main
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.planning.gpu_counts import CountRange, least_gpus, whole_nodes
from simulator.planning.result import PlanResult, why_not
from simulator.searching.branch_and_bound import SimulatedLayout
from simulator.searching.layout_search import SearchWatch
from simulator.sweeping.outcome import PointOutcome, Status
from tests.support.jobs import job
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


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_what_broke_the_simulator_is_not_said_to_lack_memory(database: Path) -> None:
    """Of one GPU no layout fits: all are too large by their bounds. Were one broken, no more would be known of that."""
    (row,) = planned(database, gpus=[1]).rows
    candidate = row.search.bounded.too_large[0]
    broken = SimulatedLayout(candidate, PointOutcome("key", Status.FAILED, error="KeyError: 3"))
    search = replace(row.search, ranking=replace(row.search.ranking, simulated=(broken,)))
    assert why_not(row).startswith("none fits in memory: each lacks")
    assert why_not(replace(row, search=search)).startswith("none that could be simulated fits in memory: each lacks")


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


def test_half_the_time_needs_twice_as_many_gpus_at_their_peak() -> None:
    few, many = (least_gpus(load_workload(LARGE), seconds) for seconds in (0.01, 0.001))
    assert 10 * (few - 1) < many <= 10 * few


MIXTURE = job(
    model={"layers": 1, "hidden": 4096, "heads": 32, "vocab": 1000},
    model__moe={"experts": 8, "top_k": 2, "ffn_hidden": 14336, "capacity_factor": 0.1},
    training={"seq": 4096, "global_batch": 8, "precision": "bf16"},
    parallelism={"ep": 8, "dp": 8},
)


@pytest.mark.parametrize(
    "workload",
    [
        MIXTURE,
        {**MIXTURE, "model": {**MIXTURE["model"], "moe": {**MIXTURE["model"]["moe"], "pad_to_capacity": False}}},
        {
            **LARGE,
            "model": {**LARGE["model"], "tied_embeddings": False},
            "training": {**LARGE["training"], "freeze": ["layers", "embedding"]},
        },
        {**LARGE, "training": {**LARGE["training"], "adapters": {"rank": 8, "targets": ["up"]}}},
    ],
    ids=["dropped tokens", "dropped and not padded", "all but the head frozen", "adapters"],
)
def test_no_simulated_step_needs_fewer_gpus_than_the_peak_allows(workload: dict[str, Any]) -> None:
    """Nine tenths of the tokens are dropped by experts, or most of the backward pass is not there."""
    loaded = load_workload(workload)
    assert least_gpus(loaded, simulator.run(loaded).report["step_time_s"]) <= loaded.n_ranks


def test_products_of_a_captured_model_may_be_of_another_type_than_its_weights(tmp_path: Path) -> None:
    """Most weights are the fp32 table's, and all products are in bf16, of sixteen times the peak."""
    torch = pytest.importorskip("torch")

    class Mixed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(60000, 4096)
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(10)
            )

        def forward(self, tokens: Any) -> Any:
            x = self.table(tokens).to(torch.bfloat16)
            for layer in self.layers:
                x = layer(x)
            return x.float().sum()

    with torch.device("meta"):
        module = Mixed()
    captured = simulator.capture(module, torch.zeros(8, 2048, dtype=torch.long))
    assert captured.dtype == "fp32"
    captured.save(tmp_path / "mixed.json")
    loaded = load_workload(
        {
            "model": {"captured": str(tmp_path / "mixed.json")},
            "training": {"global_batch": 512},
            "parallelism": {"dp": 1},
            "cluster": "dgx_h100",
        }
    )
    assert least_gpus(loaded, simulator.run(loaded).report["step_time_s"]) == 1


def test_every_number_that_was_asked_for_is_told_of(database: Path) -> None:
    """A step of 1 us is too short for any: listed numbers are searched, those of a range fall to the peak alone."""
    listed = planned(database, gpus=[8, 16], days=1e-6)
    assert [(row.gpus, row.best) for row in listed.rows] == [(8, None), (16, None)]
    assert all("too slow" in why_not(row) for row in listed.rows)
    between = planned(database, between=(8, 16), days=1e-6)
    setting = between.to_dict()["settings"][0]
    assert (setting["rows"], setting["too_few_gpus"]) == ([], [8, 16])
    assert [(numbers, why) for _, numbers, why in between.summary_view().without] == [
        ("8, 16", "too few even if each computed at its peak all the time")
    ]


def test_the_command_that_is_shown_is_of_the_answer(
    exhaustive: dict[int, float], database: Path, tmp_path: Path
) -> None:
    """Without days that is the fastest step, with them the fewest GPUs that are enough; settings are named.

    No command reads a mapping.
    """
    file = write_job(tmp_path, **LARGE)
    fastest = min(exhaustive, key=lambda gpus: (exhaustive[gpus], gpus))
    assert not planned(database, gpus=COUNTS).summary_view().foot
    (line,) = planned(database, file, gpus=COUNTS).summary_view().foot
    assert line.startswith(f"To see {fastest} GPUs: ")
    assert fastest > 4
    *_, line = planned(database, file, gpus=COUNTS, days=1.001 * exhaustive[4]).summary_view().foot
    assert line.startswith("To see 4 GPUs: ")
    varied = planned(database, file, gpus=[8], vary={"seed": [1, 2]}, fix={**FIXED, "tp": [8]}).summary_view().foot
    assert [line.partition(":")[0] for line in varied] == ["To see 8 GPUs with seed=1", "To see 8 GPUs with seed=2"]


def test_numbers_that_are_not_searched_are_told(exhaustive: dict[int, float], database: Path) -> None:
    """Four GPUs are enough for their own time: of a list the larger ones are left. A range has whole nodes of 8 alone,
    and parts of one. Without a range the search begins with what could be enough: here with one GPU."""
    days = 1.001 * exhaustive[4]

    def told(**options: Any) -> list[str]:
        return planned(database, **options).to_dict()["settings"][0]["not_searched"]

    assert told(gpus=COUNTS) == []
    assert told(gpus=COUNTS, days=days) == ["8, 16, 24, 32, as 4 are enough"]
    whole = "numbers that fill neither whole nodes of 8 nor an even part of one"
    assert told(between=(1, 8)) == [whole]
    assert told(between=(1, 32), days=days) == [whole, "more than 4, as 4 are enough"]
    *first, last = told(days=days)
    assert first[0] == whole
    assert last == "more than 4, as 4 are enough"
    foot = planned(database, between=(1, 32), days=days).summary_view().foot
    assert f"Numbers of GPUs not searched: {whole}; more than 4, as 4 are enough." in foot


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": [8, 16, 64]},
        {"gpus": [8], "set": {"parallelism.tp": 2}, "fix": {"cp": [1]}},
        {"between": (17, 64)},
    ],
    ids=["more than the cluster has", "a key that layouts differ in", "a range beyond the cluster"],
)
def test_what_cannot_be_used_is_told_before_the_first_search(options: dict[str, Any]) -> None:
    searched: list[int] = []

    def watch(gpus: int) -> SearchWatch:
        searched.append(gpus)
        return SearchWatch()

    two = {**SMALLEST, "cluster": {"name": "two", "groups": [{"count": 2, "node": "dgx_a100"}]}}
    two["training"] = {**SMALLEST["training"], "global_batch": 16}
    with pytest.raises(InputError):
        simulator.plan(two, **{"fix": FIXED, "jobs": 1, "watch": watch, **options})
    assert searched == []


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
        ({"gpus": [10**30]}, "allowed: >= 1, <= 1,000,000"),
        ({"between": (8, 4)}, "is no range"),
        ({"between": (16,)}, "must be two numbers"),
        ({"between": 8}, "must be two numbers"),
        ({"between": ()}, "must be two numbers"),
        ({"gpus": b"a"}, "must be a list of numbers"),
        ({"gpus": [8], "jobs": True}, "needs a process"),
        ({"gpus": [8], "fix": [("tp", 8)]}, "must be a mapping"),
        ({"gpus": [8], "limit": 3}, "must be a mapping"),
        ({"gpus": [8], "set": 3}, "must be a mapping"),
        ({"gpus": [8], "vary": {"cluster.nodes": [1, 2]}}, "follows from the number of GPUs"),
        ({"gpus": [8], "vary": {"parallelism": [{}]}}, "is what layouts differ in"),
        ({"gpus": [8], "vary": {"training.recompute.granularity": ["full"]}}, "is what layouts differ in"),
        (
            {"gpus": [8], "vary": {"training.precision": ["bf16"]}, "fix": {"training.precision": ["fp16"]}},
            "one of both",
        ),
        ({"gpus": [8], "set": {"parallelism.tp": 4}, "fix": {"tp": [8]}}, "one of both"),
        ({"days": 1e-6, "set": {"training.total_tokens": 1e18}}, "GPUs or more are needed even at their peak"),
        ({"between": (3, 3)}, "has no number that could be tried"),
        ({"gpus": [8], "limit": {"tp": (8, 1)}}, "has no number"),
        ({"gpus": [8], "limit": {"schedule": (1, 8)}}, "has values that are no numbers"),
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
    assert out.startswith("tiny.yaml: the fewest for 1 day are 1 GPU; ")
    setting = json.loads(Path("p.json").read_text())["settings"][0]
    assert setting["fewest_gpus"] == 1
    assert setting["rows"][0]["figures"]["cost"] == pytest.approx(2 * setting["rows"][0]["figures"]["gpu_hours"])
    assert len(Path("p.csv").read_text().splitlines()) == 2
    with pytest.raises(SystemExit) as ended:
        main([*words, "--days", "1e-6", "--gpus", "1..2"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "no number of GPUs that was tried is enough" in out
    assert "all that may fit are too slow" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "parallelism.tp=4"], "--set: parallelism.tp: is what layouts differ in"),
        (["--vary", "parallelism.tp=4,2"], "--vary: parallelism.tp: is what layouts differ in"),
        (["--limit", "tp=8..1"], "--limit: tp: has no number"),
        (["--vary", "tp=4,8"], "--vary: tp: is what layouts differ in"),
        (["--vary", "clustr=a"], "--vary: clustr: unknown key"),
        (["--price", "-1"], "--price: is out of range"),
        (["--price", "2", "--set", "cluster.price_per_gpu_hour=5"], "--price: stands for cluster.price_per_gpu_hour"),
        (["--tokens", "1T", "--set", "training.total_tokens=5"], "--tokens: stands for training.total_tokens"),
    ],
)
def test_errors_name_the_option(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], in_folder: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "gpt22b_tp8", "--gpus", "8", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--tokens", "many", "--days", "3"], ["--gpus", "8-16"], ["--gpus", "8..x"]])
def test_numbers_that_are_none_end_with_2(
    options: list[str], capsys: pytest.CaptureFixture[str], in_folder: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "gpt22b_tp8", *options])
    assert ended.value.code == 2
    assert "number" in capsys.readouterr().err


def test_rows_of_the_front_can_be_told_apart() -> None:
    """Layouts of the front differ in the micro-batch. The table of the best has one row, and needs no such column."""
    fixed = {**FIXED, "tp": [1, 2], "micro_batch": [1, 2], "recompute": ["selective"], "zero": [1], "pp": [1]}
    view = planned(None, gpus=[8], fix=fixed).summary_view()
    assert len(view.front) > len(view.rows) == 1
    assert "training.micro_batch" in view.keys
