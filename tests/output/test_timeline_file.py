"""A Timeline as a Parquet file, with a dictionary of its columns."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import simulator
from simulator.output.timeline_file import COLUMNS
from tests.support.commands import command

pyarrow = pytest.importorskip("pyarrow")
PAGE = Path(__file__).resolve().parents[2] / "docs/reference/timeline.md"


def test_a_timeline_read_back_is_the_timeline(tmp_path: Path) -> None:
    from pyarrow import parquet

    result = simulator.run("gpt22b_tp8", set={"model.layers": 2})
    path = tmp_path / "step.parquet"
    result.save_timeline(path)
    pd.testing.assert_frame_equal(pd.read_parquet(path), result.timeline, check_categorical=False)
    schema = parquet.read_schema(path)
    assert {name: schema.field(name).metadata[b"unit"].decode() for name in COLUMNS} == {
        name: unit for name, (unit, _) in COLUMNS.items()
    }
    assert float(schema.metadata[b"step_time_s"]) == result.step_time_s
    assert schema.metadata[b"ranks"] == b'{"0": 8}'  # all tensor ranks do the same


def test_the_page_has_the_dictionary_of_the_file() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = {name.strip(" `"): (unit.strip(), text.strip()) for name, unit, text in rows}
    assert listed == COLUMNS


def test_a_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("run", "gpt22b_tp8", "--set", "model.layers=2", "--quiet")
    assert command(*run, "--timeline", tmp_path / "step.parquet") == 0
    assert (tmp_path / "step.parquet").read_bytes()[:4] == b"PAR1"
    assert command(*run, "--timeline", tmp_path / "step.csv") == 2
    assert "a name that ends in .parquet" in capsys.readouterr().err
