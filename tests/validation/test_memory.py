"""The suite of published memory: rows as workloads, units, and that what is recorded comes out and is within bounds."""

from __future__ import annotations

import statistics

import pytest

from simulator.config import load_workload
from simulator.units import GiB, MiB
from simulator.validation import memory_suite
from simulator.validation.errors import recorded
from simulator.validation.evaluate import MAX_SKIPPED
from simulator.validation.record import outcomes_of_memory
from simulator.validation.rows import UnsupportedError, preset_of, split_layers, workload_of

SUITES = memory_suite.MEMORY_SUITES
PUBLISHED = SUITES["memory"]
ROWS = {row["id"]: row for row in PUBLISHED.rows}


def workload(row_id: str) -> dict[str, object]:
    return workload_of(ROWS[row_id], memory_suite.settings_of(ROWS[row_id]), memory_only=True)


@pytest.mark.parametrize("name", SUITES)
def test_recorded_errors_keep_the_bound_and_few_rows_are_skipped(name: str) -> None:
    errors, suite = recorded()[name], SUITES[name]
    rows = {row["id"] for row in suite.rows}
    assert set(errors) <= rows
    assert len(rows) - len(errors) <= MAX_SKIPPED * len(rows)
    assert suite.bounds.mean is not None
    assert statistics.fmean(map(abs, errors.values())) <= suite.bounds.mean


def test_every_row_that_is_skipped_says_why() -> None:
    """Those without a recorded error cannot become a workload, each with its reason; all others can."""
    errors = recorded()["memory"]
    for row_id in ROWS:
        if row_id in errors:
            load_workload(workload(row_id))
        else:
            with pytest.raises(UnsupportedError, match=r"does not say|is not simulated yet"):
                workload(row_id)


@pytest.mark.parametrize("row_id", ["simumax-b200-025", "zerobubble-t4-001", "tr3m-1b3-012", "bridge-moonlight-001"])
def test_what_is_recorded_is_what_comes_out(row_id: str) -> None:
    (outcome,) = outcomes_of_memory([ROWS[row_id]])
    assert outcome.error == pytest.approx(recorded()["memory"][row_id], abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_all_that_is_recorded_is_what_comes_out(name: str) -> None:
    found = {outcome.id: outcome.error for outcome in outcomes_of_memory(SUITES[name].rows)}
    assert {row: error for row, error in found.items() if error is not None} == pytest.approx(
        recorded()[name], abs=2e-6
    )


def test_a_figure_is_in_the_unit_of_its_source() -> None:
    """GB of nvidia-smi are thousands of MiB, those of a paper 1e9 bytes, torch's are GiB."""
    measured = {row_id: memory_suite.MEMORY.measured(ROWS[row_id]) for row_id in ROWS}
    assert measured["bloom-prequel-001"] == pytest.approx(47 * 1000 * MiB / GiB)
    assert measured["zerobubble-t4-001"] == pytest.approx(30e9 / GiB)
    assert measured["simumax-b200-001"] == 66.55


@pytest.mark.parametrize(
    ("layers", "stages", "split"),
    [
        (96, 12, None),
        (22, 8, [2, 3, 3, 3, 3, 3, 3, 2]),  # "first and last stage have one layer fewer" (arXiv 2401.10241)
        (106, 12, [8, *[9] * 10, 8]),  # "2 layers less, to match 2+nlayers*PP" (BigScience, Rebalancing layers)
        (78, 12, [*[7] * 11, 1]),  # "the last stage has 1 block, while the rest have 7" (BigScience, Re-do)
        (77, 6, [13, 13, 13, 13, 13, 12]),
        (9, 4, [3, 3, 2, 1]),
    ],
)
def test_layers_that_do_not_divide(layers: int, stages: int, split: list[int] | None) -> None:
    assert split_layers(layers, stages) == split


def test_layers_follow_from_the_parameters_where_only_those_are_given() -> None:
    """183B with 14,400 wide layers of 12 h^2 and a table of 250k rows: 72.1."""
    assert ROWS["bloom-prequel-009"].get("layers", "") == ""
    assert load_workload(workload("bloom-prequel-009")).model.layers == 72


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("Llama3.1-8B", "llama3-8b"),
        ("LLAMA3-70B SFT", "llama3-70b"),
        ("llama3-405b truncated to 4 layers", "llama3-405b"),
        ("deepseekv3 truncated to 4 layers", "deepseek-v3"),
        ("Qwen3_30B_a3B", "qwen3-30b-a3b"),
        ("GPT 200B", None),
        ("", None),
    ],
)
def test_models_that_rows_name(text: str, preset: str | None) -> None:
    assert preset_of({"model": text}) == preset


def test_a_gpu_without_a_profile_will_do_for_memory_alone() -> None:
    row = ROWS["simumax-b200-001"]
    assert load_workload(workload("simumax-b200-001")).cluster.name == "dgx_h100"
    with pytest.raises(UnsupportedError, match="gpu 'V100-32G'"):
        workload_of({**row, "gpu": "V100-32G"}, memory_suite.settings_of(row))


def test_every_source_says_what_it_measured() -> None:
    for source in memory_suite.SOURCES:
        assert source.evidence
        assert source.unit in (1e9, GiB, 1000 * MiB)
    assert {row["gpu"] for row in ROWS.values()} <= set(memory_suite.CAPACITY)
