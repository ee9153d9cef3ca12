"""``llmsim list``."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest

from simulator.cli import listing
from tests.support.commands import command
from tests.support.grids import one_in

KINDS = [
    "models",
    "topologies",
    "gpus",
    "schedules",
    "profiles",
    "stacks",
    "collectives",
    "recipes",
    "workloads",
    "suites",
]


#: Kind -> its rows, worked out once.
ROWS = {kind: cache(listing._ROWS[kind]) for kind in KINDS}


@pytest.fixture(autouse=True)
def rows_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        monkeypatch.setitem(listing._ROWS, kind, ROWS[kind])


@pytest.mark.parametrize("kind", one_in(2, KINDS))
def test_a_list_that_is_too_wide_leaves_out_columns_and_cuts_no_name_or_number(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of every kind is shipped, and a wide page names all of it."""
    assert command("list", kind, "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows
    names = list(rows[0])
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert command("list", kind) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= width
        left_out = re.search(r"No room for (.*?):", " ".join(out.split()))
        shown = names[: -len(left_out[1].split(", "))] if left_out else names
        assert len(shown) >= 2
        for row in rows:
            cells = [f"{row[name]:,}" if isinstance(row[name], int) else str(row[name]) for name in shown]
            assert all(cell in out for cell in cells if " " not in cell)
    monkeypatch.delenv("COLUMNS")
    assert command("list", kind) == 0
    whole = capsys.readouterr().out
    assert "No room" not in whole
    assert all(str(next(iter(row.values()))) in whole for row in rows)
    monkeypatch.setenv("COLUMNS", "0")
    assert command("list", kind) == 0
    assert capsys.readouterr().out == whole


def test_a_listing_of_workloads_has_every_axis_and_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", "workloads", "--json", "-") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "ep 8" in rows["mixtral_8x7b"]["layout"]
    assert "cp 16" in rows["llama3_405b_131k"]["layout"]
    assert [name for name, row in rows.items() if "does not fit" in row["note"]] == ["deepseek_v3_dualpipe"]


def test_a_recipe_says_once_that_its_frameworks_compile(capsys: pytest.CaptureFixture[str]) -> None:
    """torchao's casts are fused by torch.compile alone, under either framework; Transformer Engine's need none."""
    assert command("list", "recipes", "--json", "-") == 0
    frameworks = {row["name"]: row["frameworks"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert frameworks["torchao_rowwise"] == "torchtitan, pytorch (compiled)"
    assert frameworks["te_nvfp4"] == "megatron_core"


def test_computers_without_a_network_have_no_cards(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", "topologies") == 0
    assert " 0 Gb/s" not in capsys.readouterr().out
