"""``llmsim schedule``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import command


def test_one_micro_batch_is_counted_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("schedule", "1f1b", "--stages", 4, "--microbatches", 1) == 0
    assert "1f1b: 4 ranks, 1 micro-batch\n" in re.sub(r" *\n", "\n", capsys.readouterr().out)


def test_several_schedules_follow_compare(capsys: pytest.CaptureFixture[str]) -> None:
    """``--compare NAME ...``; without it a second name is one too many."""
    sizes = ("--stages", 2, "--microbatches", 4)
    assert command("schedule", "gpipe", *sizes, "--compare", "1f1b", "zb_h1", "--json", "-") == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["schedules"]] == ["gpipe", "1f1b", "zb_h1"]
    assert command("schedule", "gpipe", "1f1b", *sizes) == 2
    assert "unexpected extra argument" in capsys.readouterr().err


def test_compared_schedules_do_equal_work(capsys: pytest.CaptureFixture[str]) -> None:
    """8 micro-batches of 1 + 2 on 4 ranks. 1f1b fills and drains for 3 whole passes of a stage: (8 + 3) x 3 = 33. Two
    chunks of half a stage fill and drain in half of that: (8 + 3 / 2) x 3 = 28.5. Of the warm-up's 4 micro-batches on
    the first rank 1f1b holds all, interleaved 11 halves. Every rank of both works for 8 x 3."""
    sizes = ("--stages", 4, "--microbatches", 8, "--compare", "interleaved")
    assert command("schedule", "1f1b", *sizes, "--json", "-") == 0
    reports = json.loads(capsys.readouterr().out)["schedules"]
    assert [report["makespan"] for report in reports] == pytest.approx([33, 28.5])
    busy = [report["makespan"] * (1 - report["bubble_fraction"]) for report in reports]
    assert busy == pytest.approx([24, 24])
    assert command("schedule", "1f1b", *sizes) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    figures = {row[0]: (row[1], row[-1]) for row in rows if row and row[0] in ("1f1b", "interleaved")}
    assert figures == {"1f1b": ("33", "4"), "interleaved": ("28.5", "5.5")}


def test_compared_files_of_other_sizes_do_not_do_the_same_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file has a rank of one chunk, the other two ranks of two: neither the table nor a sentence equates them."""
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    one.write_text("0F0,0B0\n")
    assert command("schedule", "interleaved", "--stages", 2, "--microbatches", 2, "--csv", two) == 0
    capsys.readouterr()
    assert command("schedule", one, "--compare", two) == 0
    out, err = capsys.readouterr()
    assert "All do the same work" not in out
    assert "the schedules do not do the same work" in err
    assert f"{one}: 1 rank, 1 micro-batch; {two}: 2 ranks, 2 micro-batches" in err
    assert command("schedule", "1f1b", "--compare", two, "--stages", 2, "--microbatches", 2) == 0
    out, err = capsys.readouterr()
    assert "All do the same work" in out
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", 4], ["--microbatches: is missing", "fix:     a number, such as 8"]),
        ([], ["--stages: is missing", "--microbatches: is missing"]),
        (["--stages", 4, "--microbatches", 0], ["--microbatches: too small"]),
        (["--stages", 4, "--microbatches", 8, "--cost", "F=1,F=2"], ["--cost: F: is given twice"]),
        (["--stages", 4, "--microbatches", 8, "--cost", "F=0"], ["--cost: F: not a cost"]),
        (["--stages", 4, "--microbatches", 8, "--zb-memory-limit", 2], ["--zb-memory-limit: has no meaning"]),
    ],
)
def test_sizes_and_costs_of_a_schedule_are_refused_by_their_options(
    arguments: list[Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("schedule", "1f1b", *arguments) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words)


def test_the_file_of_a_steady_schedule_says_that_it_is_one_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, hints in (("zb_v", 1), ("1f1b", 0)):
        path = tmp_path / f"{name}.csv"
        assert command("schedule", name, "--stages", 2, "--microbatches", 4, "--csv", path) == 0
        assert capsys.readouterr().err.count("one step") == hints


def test_costs_that_are_given_are_said_with_those_that_follow(capsys: pytest.CaptureFixture[str]) -> None:
    """The weight gradient is half of B where B alone is given."""
    assert command("schedule", "zb_h1", "--stages", 2, "--microbatches", 4, "--cost", "B=0.5") == 0
    assert "Costs: F 1, B 0.5, W 0.25, comm 0. W is a part of B." in capsys.readouterr().out
    assert command("schedule", "zb_h1", "--stages", 2, "--microbatches", 4) == 0
    assert "Costs:" not in capsys.readouterr().out
