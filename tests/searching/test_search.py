"""Searches rank layouts as an exhaustive search does, and say what is not proven and why others lost."""

from __future__ import annotations

import csv
import itertools
import shlex
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

import simulator
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.input_files import parse_changes
from simulator.output.search_table import search_summary
from simulator.searching.branch_and_bound import ranked
from simulator.searching.entry import layout_choices
from simulator.searching.result import SearchResult
from simulator.sweeping.evaluator import EvaluatedPoint, Evaluator
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point
from simulator.units import GiB, format_time
from tests.support.jobs import job
from tests.support.searches import LARGE, figures_of, space_on
from tests.support.sweeps import write_job

#: Layouts of 4 GPUs: 30, half of which do not fit.
FIXED: dict[str, list[Any]] = {
    "cp": [1], "micro_batch": [1], "recompute": ["none", "full"], "zero": [0, 1], "vpp": [1, 2],
}  # fmt: skip


def found(workload: dict[str, Any] = LARGE, **options: Any) -> SearchResult:
    return simulator.search(workload, **{"gpus": 4, "fix": FIXED, "jobs": 1, "top": 4, **options})


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return found()


@pytest.fixture(scope="module")
def exhaustive() -> list[tuple[float, dict[str, Any]]]:
    """Step time and keys of all layouts that fit, each simulated, the fastest first."""
    rows = []
    space = space_on(4, **dict(FIXED.items()))
    for number, changes in enumerate(space.layouts()):
        figures = figures_of(load_workload(LARGE, changes))
        if figures["fits"]:
            rows.append((figures["step_time_s"], number, changes))
    rows.sort(key=lambda row: row[:2])
    return [(step_time_s, changes) for step_time_s, _, changes in rows]


def test_the_first_ones_are_those_of_an_exhaustive_search(
    result: SearchResult, exhaustive: list[tuple[float, dict[str, Any]]]
) -> None:
    """Step times are the same to the last bit, though far fewer layouts were simulated."""
    assert result.is_proven
    ranking = [(one.step_time_s, dict(one.candidate.changes)) for one in result.ranking.fitting[:4]]
    assert ranking == exhaustive[:4]
    assert len(result.ranking.simulated) < len(exhaustive)


def test_what_was_not_simulated_has_its_reason(
    result: SearchResult, exhaustive: list[tuple[float, dict[str, Any]]]
) -> None:
    """Every legal layout is simulated, behind its bound, or larger than memory; none of the last kind fits in fact."""
    lost = result.lost
    assert len(result.ranking.simulated) + lost.bounded + lost.too_large == result.bounded.n_legal
    fitting = [changes for _, changes in exhaustive]
    assert lost.too_large > 0
    assert not [one for one in result.bounded.too_large if dict(one.changes) in fitting]


@pytest.fixture
def of_file(result: SearchResult, tmp_path: Path) -> SearchResult:
    """The same search of the same job in a file."""
    return replace(result, workload=write_job(tmp_path, **LARGE))


def test_the_command_line_of_the_best_gives_its_step(of_file: SearchResult, result: SearchResult) -> None:
    """No command reads a mapping, so that a search of one names none."""
    assert result.best is not None
    command = of_file.command_line(result.best)
    assert command is not None
    words = shlex.split(command)
    assert words[:3] == ["llmsim", "run", str(of_file.workload)]
    assert of_file.view().foot[-1] == f"To see it: {command}"
    assert not [line for line in result.view().foot if "To see it" in line]
    assert result.to_dict()["command_line"] is None
    changes = parse_changes([word for before, word in itertools.pairwise(words) if before == "--set"])
    assert figures_of(load_workload(LARGE, changes))["step_time_s"] == result.best.step_time_s


def test_a_command_has_units_where_these_went_in(of_file: SearchResult) -> None:
    """A search with cards of 400 Gb/s names them so, and the command is read as the same number."""
    key = "cluster.node.nics.bandwidth_bps"
    assert of_file.best is not None
    faster = replace(of_file, changes={**of_file.changes, key: 400_000_000_000})
    assert f"--set {key}=400Gbps" in str(faster.command_line(of_file.best))
    assert load_workload(LARGE, parse_changes([f"{key}=400Gbps"])).cluster == load_workload(LARGE, {key: 4e11}).cluster


def test_the_pareto_front_gains_memory_for_time(result: SearchResult) -> None:
    front = [entry["figures"] for entry in result.to_dict()["pareto"]]
    assert front[0]["step_time_s"] == result.to_dict()["ranking"][0]["figures"]["step_time_s"]
    for one, other in itertools.pairwise(front):
        assert other["step_time_s"] > one["step_time_s"]
        assert other["headroom_bytes"] > one["headroom_bytes"]


def test_rows_of_all_tables_can_be_told_apart_and_have_the_degrees(result: SearchResult) -> None:
    """One place is shown, and a front of more: the columns suffice to tell all of its rows from each other."""
    view = replace(result, top=1).view()
    assert len(view.front) > 1
    assert len({tuple(str(row[key]) for key in view.keys) for row in view.front}) == len(view.front)
    assert {f"parallelism.{degree}" for degree in ("tp", "pp", "dp", "ep")} <= set(view.keys)


def test_a_layout_that_barely_fits_has_a_star(result: SearchResult) -> None:
    """Less than 3 % of 40 GiB is 1.2 GiB; a layout that leaves that much has none, and no line explains a star."""
    best = result.ranking.fitting[0]
    for left_gib, starred in ((1.1, True), (1.3, False)):
        figures = {**best.outcome.figures, "capacity_bytes": 40 * GiB, "headroom_bytes": left_gib * GiB}
        first = replace(best, outcome=replace(best.outcome, figures=figures))
        view = replace(result, top=1, ranking=replace(result.ranking, simulated=(first,))).view()
        console = Console(width=160)
        with console.capture() as captured:
            console.print(search_summary(view))
        printed = captured.get()
        assert (f"* {left_gib:.1f} GiB" in printed) == starred
        assert ("* barely fits: less than 3 % of a GPU is left" in printed) == starred


def test_warnings_name_the_places_that_they_are_about(result: SearchResult) -> None:
    """Two places are shown of four that were asked for: a warning of both names neither."""
    both, second = "of both", "of the second"
    fitting = result.ranking.fitting[:2]
    warned = zip(fitting, ((both, both), (both, second)), strict=True)
    shown = tuple(replace(one, outcome=replace(one.outcome, warnings=texts)) for one, texts in warned)
    few = replace(result, ranking=replace(result.ranking, simulated=shown))
    assert few.warnings[-2:] == [both, f"place 2: {second}"]


def test_a_search_of_all_places_simulates_all_that_may_fit() -> None:
    everything = found(top=1000, fix={**FIXED, "recompute": ["none"]})
    assert everything.is_proven
    assert everything.lost.bounded == 0


def test_without_time_nothing_is_proven() -> None:
    """No layout gets bounds, none is simulated, and the warning says so."""
    hurried = found(budget_s=0.0)
    assert not hurried.is_proven
    assert hurried.best is None
    assert "before all layouts had bounds" in hurried.warnings[0]
    assert hurried.to_dict()["n_proven"] == 0


@pytest.mark.parametrize(("place", "n_proven"), [(0, 0), (2, 2)])
def test_a_layout_that_broke_the_simulator_is_told_as_that(result: SearchResult, place: int, n_proven: int) -> None:
    """Every layout was looked at in time. Of the broken one no more is known than its bound, here the best step's
    or the third's: places behind that are not proven."""
    best = result.ranking.fitting[place]
    bound = replace(best.candidate.bound, step_time_s=best.step_time_s - 1e-9)
    outcome = PointOutcome("key", Status.FAILED, error="KeyError: 3")
    broken = replace(best, candidate=replace(best.candidate, bound=bound), outcome=outcome)
    outcomes = {one.candidate.number: one.outcome for one in result.ranking.simulated}
    outcomes[best.candidate.number] = outcome

    class Recorded:
        def outcomes(self, points: Iterable[Point]) -> Iterator[EvaluatedPoint]:
            yield from (EvaluatedPoint(point, outcomes[point.number], True) for point in points)

    fitting = tuple(
        broken.candidate if one.number == best.candidate.number else one
        for one in result.bounded.fitting
        if one.number in outcomes
    )
    space = replace(result.bounded, fitting=fitting)
    ranking = ranked(
        space, cast(Evaluator, Recorded()), lambda one: Point(one.number, LARGE, {}), 4, lambda: False, lambda one: None
    )
    with_broken = replace(result, bounded=space, ranking=ranking)
    assert (ranking.n_proven, with_broken.is_proven, with_broken.out_of_time) == (n_proven, False, False)
    places = "the first 2 places are" if n_proven else "no place of the ranking is"
    least = format_time(bound.step_time_s)
    assert with_broken.warnings[:2] == [
        f"1 layout whose step takes {least} or more could not be simulated: {places} proven",
        "1 layout broke the simulator: KeyError: 3",
    ]


def test_the_files_own_layout_is_compared_where_it_is_for_as_many_gpus() -> None:
    own = {**LARGE, "parallelism": {"tp": 4, "sequence_parallel": True}}
    compared = found(own)
    step_time_s = figures_of(load_workload(own))["step_time_s"]
    assert compared.speedup == pytest.approx(step_time_s / compared.ranking.fitting[0].step_time_s)
    assert f"{compared.speedup:.3f} times as fast as the file's own layout" in compared.view().foot[1]
    assert found({**own, "parallelism": {"tp": 2}}).speedup is None


def test_a_file_whose_layout_is_the_best_is_not_compared_with_itself(result: SearchResult) -> None:
    best = result.ranking.fitting[0]
    own = replace(best, candidate=replace(best.candidate, is_own=True))
    at_best = replace(result, ranking=replace(result.ranking, simulated=(own,)), file_layout=best.outcome)
    assert at_best.view().foot[1] == "The first is the file's own layout."


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"parallelism.tp": 3}, "do not divide by tp 3"),
        ({"parallelism.dp": 4, "parallelism.zero": 0}, "none of them fits: each lacks"),
        ({"parallelism.tp": 4, "training.recompute": "full"}, "a step of any that may fit takes"),
        ({"parallelism.dp": 4}, "the fastest of them takes"),
        ({"training.micro_batch": 2}, "no layout of the space has these values"),
    ],
)
def test_why_a_layout_lost(result: SearchResult, settings: dict[str, Any], said: str) -> None:
    assert said in "; ".join(result.why(settings))


def test_why_asks_for_keys_of_the_search(result: SearchResult) -> None:
    with pytest.raises(InputError, match="is no key of the search"):
        result.why({"parallelism.prefetch": 2})


def test_the_table_of_all_layouts_has_a_row_each(result: SearchResult, tmp_path: Path) -> None:
    result.save_csv(tmp_path / "all.csv")
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == result.bounded.n_legal
    assert float(rows[0]["step_time_s"]) == pytest.approx(result.ranking.fitting[0].step_time_s)
    assert {row["status"] for row in rows} >= {"simulated", "does not fit", "bound is too slow"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 0}, "gpus"),
        ({"top": 0}, "top"),
        ({"jobs": 0}, "jobs"),
        ({"fix": {"tp": 4}}, "must be a list of values"),
        ({"fix": {"tp": []}}, "fix: tp: has no values"),
        ({"fix": {"tp": [4, 4]}}, "fix: tp: stands twice"),
        ({"fix": {"tp": deque([4, 4])}}, "fix: tp: stands twice"),
        ({"fix": {"tp": ["x"]}}, "fix: parallelism.tp: must be a whole number"),
        ({"fix": {"tp": [2.5]}}, "fix: parallelism.tp: must be a whole number"),
        ({"fix": {"pp": [{}]}}, "fix: parallelism.pp: must be a whole number"),
        ({"fix": {"micro_batch": [1, 0]}}, "fix: training.micro_batch: is out of range"),
        ({"fix": {"schedule": [1]}}, "fix: parallelism.schedule: is none of the known values"),
        ({"fix": {"tp": [3]}}, "no layout on 4 GPUs is legal"),
        ({"limit": {"pp": (5, 6)}}, "no layout on 4 GPUs is legal"),
        ({"limit": {"pp": (True, 8)}}, "limit: pp: must be least and most"),
        ({"fix": {"depth": [3]}}, "is no key of a layout"),
        ({"set": {"parallelism.zero": 1}, "fix": {"tp": [4]}}, "fix:     --fix parallelism.zero=1"),
    ],
)
def test_what_cannot_be_searched_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        found(**options)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("values", "texts"),
    [(deque([1, 2]), "(1, 2)"), ([1, True], "(1, True)"), (np.array([1, 2]), "(1, 2)")],
    ids=["deque", "one and true", "array"],
)
def test_values_are_fixed_by_any_sequence(values: Any, texts: str) -> None:
    """One and true are told apart, as they are in a file."""
    assert repr(layout_choices(LARGE, {"tp": values}, None, None).fixed["parallelism.tp"]) == texts


@pytest.mark.slow
def test_processes_find_the_same() -> None:
    """Two at a time, on a smaller space: the order in which they end does not matter."""
    fixed = {**FIXED, "recompute": ["full"], "tp": [2, 4]}
    alone, together = found(fix=fixed, top=2), found(fix=fixed, top=2, jobs=2)
    times = [[one.step_time_s for one in each.ranking.fitting[:2]] for each in (alone, together)]
    assert times[0] == times[1]
    assert together.is_proven


def test_gpus_of_every_type_count() -> None:
    """The file is for the slow node alone; on both, kernels of bounds are no slower than those of the fast one."""
    groups = [{"count": 1, "node": "dgx_a100"}, {"count": 1, "node": "dgx_h100"}]
    sizes = {"model": LARGE["model"], "training": {**LARGE["training"], "global_batch": 16}}
    workload = job(**sizes, cluster={"name": "mixed", "groups": groups}, parallelism={"tp": 8})
    fixed = {"cp": [1], "micro_batch": [1], "recompute": ["none"], "zero": [1], "tp": [8], "vpp": [1]}
    mixed = simulator.search(workload, gpus=16, fix=fixed, jobs=1, top=10)
    assert mixed.ranking.fitting
    for one in mixed.ranking.simulated:
        assert one.candidate.bound.step_time_s <= one.outcome.figures["step_time_s"]


def test_a_cluster_of_one_size_keeps_it() -> None:
    """More GPUs than it has are refused; with fewer the others idle."""
    groups = [{"count": 1, "node": "dgx_a100"}]
    workload = job(cluster={"name": "one", "groups": groups}, training__global_batch=8)
    fixed = {"cp": [1], "recompute": ["none"], "zero": [0], "pp": [1], "micro_batch": [1]}
    assert simulator.search(workload, gpus=4, fix=fixed, jobs=1, top=1).best is not None
    with pytest.raises(InputError, match="has fewer GPUs"):
        simulator.search(workload, gpus=16, fix=fixed, jobs=1)


def test_a_captured_model_is_searched_with_the_micro_batch_that_was_recorded(tmp_path: Path) -> None:
    """32 sequences, more than are tried of other models, as no other number has kernels."""
    torch = pytest.importorskip("torch")
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
    simulator.capture(layers, torch.zeros(32, 64), dtype="bf16").save(tmp_path / "two.json")
    workload = {
        "model": {"captured": str(tmp_path / "two.json")},
        "training": {"global_batch": 64},
        "parallelism": {"dp": 1},
        "cluster": "dgx_h100",
    }
    searched = simulator.search(workload, gpus=2, fix={"pp": [1], "tp": [1], "recompute": ["none"]}, jobs=1)
    assert searched.best is not None
    assert searched.best.candidate.changes["training.micro_batch"] == 32


def test_without_a_number_of_gpus_it_is_that_of_the_workload() -> None:
    result = simulator.search(
        "gpt22b_tp8", fix={"micro_batch": [4], "schedule": ["1f1b"], "recompute": ["full"]}, top=1
    )
    assert result.gpus == 8
