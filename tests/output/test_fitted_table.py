"""Tables that fit: what is shown is whole, and what is not shown is named."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from simulator.output.fitted_table import FittedTable
from simulator.output.summary import shared

JOB = "gpt22b_tp8"


def printed(part: object, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False, markup=False)
    console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run(name: str, met: str = "node0.nic0:tx") -> dict[str, Any]:
    flow = {"job": JOB, "axis": "dp", "op": "all_reduce", "at_once": 2, "seconds_together": 0.5, "lost_s": 0.25}
    return {
        "name": name,
        "n_gpus": 16,
        "step_time_s": 1.25,
        "tokens_per_s": 7251.0,
        "mfu": 0.406,
        "sharing": {"nodes": [0, 2], "alone_step_time_s": 1.0, "lost_s": 0.25, "slowdown": 1.25},
        "contention": [{"link": met, "kind": "nic", "count": 8, "flows": [flow]}],
    }


def of_runs(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"runs": list(runs), "share_fabric": {"nodes": 4, "cluster": "dgx_a100"}}


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_figures_and_names_stand_whole_or_their_column_is_named(width: int) -> None:
    """Columns that are shown are the first ones; of a column, all cells are there, or none."""
    columns = {
        "link": ["node0.gpu0.nvlink:tx", "job (2)"],
        "time": ["1,234.50 ms", "0.04 s"],
        "share": ["12.3 %", "4.5 %"],
        "what it says of itself": ["words that may stand one below the other", "few words"],
        "bytes": ["4,294,967,296", "1"],
        "bandwidth (GB/s)": ["123.45", "678.90"],
    }
    table = FittedTable("A title that is longer than all of the narrow terminal", *((name, "left") for name in columns))
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    text = printed(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    said = re.search(
        r"No room for (.*?): a wider terminal, or output into a file, shows (it|them)\.", " ".join(text.split())
    )
    left_out = said[1].split(", ") if said else []
    assert left_out == list(columns)[len(columns) - len(left_out) :]
    assert bool(left_out) is (width < 80)
    body = text.split("No room")[0]
    for name, cells in columns.items():
        pieces = [piece for cell in cells for piece in (cell.split() if len(cell) > 20 else [cell])]
        assert all((piece in body) is (name not in left_out) for piece in pieces if len(piece) > 5), name
    assert (table.full_width <= width) is ("words that may stand one below the other" in body)


def test_a_name_of_half_the_terminal_is_folded_and_all_of_it_is_there() -> None:
    table = FittedTable("", ("job", "left"), ("time", "right"))
    table.add_row("abcdefghij" * 10, "1.25 s")
    lines = printed(table, 40).splitlines()
    assert "".join(re.findall("[a-j]+", " ".join(lines[3:]))).count("abcdefghij") == 10
    assert sum("1.25 s" in line for line in lines) == 1


@pytest.mark.parametrize("width", [60, 80, 120])
def test_jobs_that_share_a_fabric_have_their_names_on_one_line(width: int) -> None:
    text = printed(shared(of_runs(run(JOB), run(f"{JOB} (2)"))), width)
    assert f" {JOB} (2) " in text
    assert text.count("1.25 s") == 2
    assert max(map(len, text.splitlines())) <= width


def test_where_alike_jobs_met_is_said_once() -> None:
    """Two met at one card and say so together; the third met elsewhere."""
    text = printed(shared(of_runs(run("a"), run("b"), run("c", met="node9.nic0:tx"))), 100)
    assert re.findall("Where transfers slowed each other, in a step of (.*)", text) == ["a, b", "c"]
    assert text.count("node0.nic0:tx") == text.count("node9.nic0:tx") == 1
